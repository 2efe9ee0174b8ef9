"""The text of each token of a tokenizer, as bytes, which makes tokens of two tokenizers comparable.

Byte-level BPE writes a byte as a visible character (GPT-2). SentencePiece writes a space as U+2581 and a byte as
<0x0A>. WordPiece marks tokens that continue a word. The tokenizer's decoder defines its way of writing.
"""

import json
import re
from collections.abc import Callable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """The tokens of one tokenizer.

    Args:
        vocab_size: The model's vocabulary size; tokens beyond it are left out.

    Attributes:
        by_text: The id of each byte string, for all tokens but special ones. If several tokens stand for the same
            bytes, a byte token written by its number gives way, then later tokens do.
        marks: The content of each special token, by id.
        drops_first_space: True if the space of a text's first token is not part of the text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        steps = _steps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
        token_bytes, kinds = _token_bytes(steps), {step["type"] for step in steps}
        self.drops_first_space = not steps or "WordPiece" in kinds or any(map(_drops_first_space, steps))
        added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if i < vocab_size}
        special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        vocab = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i < vocab_size)
        self.marks = {i: token for i, token in vocab if i in special}
        self.bos, self.eos = (self._mark(i) for i in (tokenizer.bos_token_id, tokenizer.eos_token_id))
        self._texts = [b""] * vocab_size
        for i, token in vocab:
            if i not in self.marks:
                self._texts[i] = token.encode() if i in added else token_bytes(token)
        by_number = {i for i, token in vocab if "ByteFallback" in kinds and _BYTE.fullmatch(token)}
        last_choice = sorted((i for i, _ in vocab), key=lambda i: (i in by_number, i), reverse=True)
        self.by_text = {self._texts[i]: i for i in last_choice if self._texts[i]}
        self._num_tokens = len(vocab)

    def __len__(self) -> int:
        return self._num_tokens

    def text(self, token: int) -> bytes:
        """Return the bytes of the token; empty if it is special or beyond the tokenizer's tokens."""
        return self._texts[token]

    def _mark(self, i: int | None) -> int | None:
        return i if i in self.marks else None


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _drops_first_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)


def _token_bytes(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """Return a function from a token, as written in the vocabulary, to its bytes."""
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    if not steps:  # such tokens are joined with spaces
        return lambda token: b" " + token.encode()

    def token_bytes(token: str) -> bytes:
        if "ByteFallback" in kinds and (match := _BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for step in steps:
            match step["type"]:
                case "Metaspace":
                    token = token.replace(step["replacement"], " ")
                case "Replace" if "String" in step["pattern"]:
                    token = token.replace(step["pattern"]["String"], step["content"])
                case "WordPiece":
                    continues = token.startswith(step["prefix"])
                    token = token.removeprefix(step["prefix"]) if continues else " " + token
                case "BPEDecoder":
                    token = token.replace(step["suffix"], " ")
        return token.encode()

    return token_bytes


def _byte_level(token: str) -> bytes:
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()


def _bytes_by_name() -> dict[str, int]:
    """Return the byte of each of GPT-2's visible characters; bytes that are not visible have characters from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _bytes_by_name()
