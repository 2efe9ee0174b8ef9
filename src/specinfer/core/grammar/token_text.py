"""TokenText: the bytes of tokens, and the tokens of bytes, as grammars see them. Special tokens are bytes of their own.

llguidance writes the special token 151657 as b"\\xff[151657]", which no UTF-8 text contains.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

_Bits = npt.NDArray[np.uint8]
MARK = 0xFF  # first byte of a special token
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")
_CUT_SPECIAL = re.compile(rb"\xff(\[\d*)?$")


class TokenText:
    """The bytes of one model's tokens.

    Args:
        ends: Tokens that end a text, which are no part of it.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, ends: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, tuple(ends)

    def tokens_of(self, text: bytes) -> tuple[int, ...]:
        """Return the tokens of a text as its tokenizer splits it; a special token cut off at its end is left out."""
        tokens: list[int] = []
        for place, piece in enumerate(_SPECIAL.split(_CUT_SPECIAL.sub(b"", text))):
            if place % 2:
                tokens.append(int(piece))
            elif piece:
                tokens += self._tokenizer.tokenize_bytes(piece)
        return tuple(tokens)

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens."""
        return b"".join([_special(token) if token in self._specials else self._bytes(token) for token in tokens])

    def next_texts(self, legal: _Bits) -> list[bytes]:
        """Return the bytes and the special tokens that a text may go on with, given its legal tokens: [vocab / 8]."""
        tokens, texts = self._starts
        is_legal = (legal[tokens // 8] >> (tokens % 8) & 1).nonzero()[0]
        return [texts[i] for i in is_legal.tolist()]

    def ends(self, legal: _Bits) -> list[int]:
        """Return the legal tokens that end a text."""
        ends = [token for token in self._ends if token in self._specials and token < self._vocab_size]
        return [token for token in ends if legal[token // 8] >> (token % 8) & 1]

    def _bytes(self, token: int) -> bytes:
        return self._tokenizer.decode_bytes([token]) if 0 <= token < self._vocab_size else b""

    @cached_property
    def _specials(self) -> frozenset[int]:
        is_special = self._tokenizer.is_special_token
        return frozenset(token for token in range(self._tokenizer.vocab_size) if is_special(token))

    @cached_property
    def _starts(self) -> tuple[npt.NDArray[np.int64], list[bytes]]:
        """The tokens of single bytes, and special ones, and their texts."""
        starts: dict[int, bytes] = {}
        for byte in range(MARK):
            tokens = self._tokenizer.tokenize_bytes(bytes([byte]))
            if len(tokens) == 1 and tokens[0] < self._vocab_size and self._bytes(tokens[0]) == bytes([byte]):
                starts[tokens[0]] = bytes([byte])
        for token in sorted(self._specials.difference(self._ends)):
            if token < self._vocab_size:
                starts[token] = _special(token)
        return np.array(list(starts), dtype=np.int64), list(starts.values())


def _special(token: int) -> bytes:
    return b"\xff[%d]" % token
