"""Corpus: the texts of a file that an operator gives, such as a repository of code, as a source of the suffix drafter.

A file has the tokens of all texts and the order of their suffixes, so a stretch is found by bisection and nothing is
read at start but for a check. The file is mapped: processes share its pages, and the system may drop them.

    magic | CRC-32 of all that follows | size of the header | header (JSON) | tokens | places of the suffixes, in order

A token is four bytes, the largest first, so that bytes compare as tokens do. Each text ends with `END`.
"""

import json
import mmap
import sys
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specinfer.core.files import write_atomically
from specinfer.drafters.lookup.suffix_growth import Match

MAX_MATCH = 32  # length of the longest stretch that is looked up
MIN_MATCH = 3  # a shorter one is in any large corpus, and what follows predicts little of this text
MAX_TOKENS = 2**30
END = 2**32 - 1
_MAGIC = b"SPECCRP1"
_START = len(_MAGIC) + 8
_SORTED = 64  # tokens by which suffixes are sorted at least: a stretch and the drafts behind it
_LOOKED_AT = 64  # occurrences of a stretch whose next tokens are compared
_NONE = -1


class CorpusFileError(ValueError):
    """Error for a file that is no corpus for this tokenizer; the message names the remedy."""


class Corpus:
    """A mapped file of texts.

    Args:
        fingerprint: Fingerprint of the target's tokenizer, as in `write_corpus`.
        vocab_size: Number of the target's tokens.

    Raises:
        CorpusFileError: The file cannot be used.
    """

    def __init__(self, path: str | Path, fingerprint: str, vocab_size: int) -> None:
        try:
            with Path(path).open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: it is empty
            reason = error.strerror if isinstance(error, OSError) else "it is empty"
            raise CorpusFileError(f"{path} cannot be read ({reason}); {_REMEDY}") from error
        header, start = _read_header(path, self._map)
        if header.get("tokenizer") != fingerprint:
            raise CorpusFileError(
                f"{path} was made with the tokenizer of {str(header.get('model'))!r:.100}, which is not that of this "
                f"target; {_REMEDY}"
            )
        size = header.get("num_tokens")
        if type(size) is not int or not 0 < size <= MAX_TOKENS or len(self._map) != start + 8 * size:
            raise CorpusFileError(f"{path} is cut or damaged; {_REMEDY}")
        self.num_tokens = size
        self.bytes = memoryview(self._map)[start : start + 4 * size]  # of the tokens
        self.places = memoryview(self._map)[start + 4 * size :].cast("I")
        tokens = np.frombuffer(self.bytes, dtype=">u4")
        if zlib.crc32(memoryview(self._map)[len(_MAGIC) + 4 :]) != int.from_bytes(self._map[len(_MAGIC) :][:4], "big"):
            raise CorpusFileError(f"{path} is damaged, its checksum does not agree; {_REMEDY}")
        if np.any((tokens >= vocab_size) & (tokens != END)) or np.any(np.frombuffer(self.places, np.uint32) >= size):
            raise CorpusFileError(f"{path} has tokens or places that do not exist; {_REMEDY}")

    def match(self, tokens: Sequence[int], name: str, longer_than: int = 0) -> Match | None:
        """Return the longest stretch of the corpus that these tokens end with, if it is longer than this.

        Args:
            name: Name of draft tokens from there.
        """
        # If a stretch is in the corpus, each shorter one is too, so bisection finds the longest.
        low, high = max(longer_than + 1, MIN_MATCH), min(len(tokens), MAX_MATCH)
        if low > high or not self.find(pattern := _as_bytes(tokens[-low:])):
            return None
        while low < high:
            middle = (low + high + 1) // 2
            known = _as_bytes(tokens[-middle:])
            low, high, pattern = (middle, high, known) if self.find(known) else (low, middle - 1, pattern)
        view = CorpusView(self)
        return Match(view, view.state(*self.range_of(pattern), low), low, name)

    def find(self, pattern: bytes) -> bool:
        first = bisect_left(self.places, pattern, key=self._stretch(len(pattern)))
        return first < self.num_tokens and self._stretch(len(pattern))(self.places[first]) == pattern

    def range_of(self, pattern: bytes) -> tuple[int, int]:
        """Return the half-open range of the suffixes that begin with a stretch."""
        key = self._stretch(len(pattern))
        first = bisect_left(self.places, pattern, key=key)
        return first, bisect_right(self.places, pattern, first, key=key)

    def token(self, rank: int, offset: int) -> int:
        """Return a token of a suffix, or `END` beyond the last one."""
        place = 4 * (self.places[rank] + offset)
        return int.from_bytes(self.bytes[place : place + 4], "big") if place < len(self.bytes) else END

    def pattern(self, rank: int, length: int) -> bytes:
        """Return the first tokens of a suffix."""
        return bytes(self.bytes[4 * self.places[rank] : 4 * (self.places[rank] + length)])

    def _stretch(self, num_bytes: int) -> Callable[[int], bytes]:
        tokens = self.bytes
        return lambda place: bytes(tokens[4 * place : 4 * place + num_bytes])


@dataclass(frozen=True, slots=True)
class _Computed:
    """A number of each state that is computed when it is read."""

    compute: Callable[[int], int]

    def __getitem__(self, state: int) -> int:
        return self.compute(state)


class CorpusView:
    """The part of a corpus around one match, as the growth of drafts reads a text.

    A state is a stretch: the range of the suffixes that begin with it, and its length. It is made when it is reached.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._ranges: list[tuple[int, int]] = []
        self._continuations: dict[int, tuple[tuple[int, int], ...]] = {}
        self._links: dict[int, int] = {}
        self._targets: dict[int, int] = {}
        self.lengths: array[int] = array("i")
        self.counts: array[int] = array("i")

    @property
    def links(self) -> _Computed:
        return _Computed(self._link)

    @property
    def only_tokens(self) -> _Computed:
        return _Computed(self._only_token)

    @property
    def only_targets(self) -> _Computed:
        return _Computed(self._only_target)

    def state(self, first: int, last: int, length: int) -> int:
        self._ranges.append((first, last))
        self.lengths.append(length)
        self.counts.append(min(last - first, _LOOKED_AT))
        return len(self._ranges) - 1

    def follow(self, state: int, token: int) -> int:
        """Return the state after one more token, or -1 if the stretch was never followed by it."""
        first, last = self._after(state, token)
        return self.state(first, last, self.lengths[state] + 1) if last > first else _NONE

    def continuations(self, state: int, limit: int) -> Sequence[tuple[int, int]]:
        """Return (token, state after it) of what followed, the rarest first; of many occurrences some are looked at."""
        if state not in self._continuations:
            first, last = self._ranges[state]
            step = max((last - first) / _LOOKED_AT, 1)
            ranks = {first + int(i * step) for i in range(min(last - first, _LOOKED_AT))}
            tokens = {self._corpus.token(rank, self.lengths[state]) for rank in ranks} - {END}
            seen = [(token, self.follow(state, token)) for token in sorted(tokens)]
            self._continuations[state] = tuple(sorted(seen, key=lambda item: self.counts[item[1]]))
        return self._continuations[state][-limit:]

    def _after(self, state: int, token: int) -> tuple[int, int]:
        (first, last), length = self._ranges[state], self.lengths[state]
        ranks = range(first, last)
        next_token: Callable[[int], int] = lambda rank: self._corpus.token(rank, length)  # noqa: E731
        low = bisect_left(ranks, token, key=next_token)
        return first + low, first + bisect_right(ranks, token, low, key=next_token)

    def _only_token(self, state: int) -> int:
        first, last = self._ranges[state]
        token = self._corpus.token(first, self.lengths[state])
        is_only = token != END and token == self._corpus.token(last - 1, self.lengths[state])
        return token if is_only else _NONE

    def _only_target(self, state: int) -> int:
        if state not in self._targets:
            self._targets[state] = self.state(*self._ranges[state], self.lengths[state] + 1)
        return self._targets[state]

    def _link(self, state: int) -> int:
        """Return the state of a suffix that may occur more often: of half the length, or -1 if that is too short."""
        if state not in self._links:
            shorter = self.lengths[state] // 2
            pattern = self._corpus.pattern(self._ranges[state][0], self.lengths[state])[-4 * shorter :]
            is_long = shorter >= MIN_MATCH
            self._links[state] = self.state(*self._corpus.range_of(pattern), shorter) if is_long else _NONE
        return self._links[state]


def write_corpus(path: Path, texts: Sequence[Sequence[int]], fingerprint: str, model: str) -> int:
    """Write the tokens of texts as a corpus, and return their number.

    Args:
        fingerprint: Fingerprint of the tokenizer.
        model: Name of the model that it is of.

    Raises:
        OSError: The file cannot be written.
    """
    tokens = np.array([token for text in texts for token in (*text, END)], dtype=np.uint32)
    order = _suffix_order(tokens)
    fields = {"tokenizer": fingerprint, "model": model, "num_tokens": len(tokens), "byte_order": sys.byteorder}
    header = json.dumps(fields).encode()
    header += b" " * (-(len(header) + _START) % 8)
    rest = [len(header).to_bytes(4, "big"), header, tokens.astype(">u4").tobytes(), order.astype(np.uint32).tobytes()]
    checksum = 0
    for part in rest:
        checksum = zlib.crc32(part, checksum)

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            file.writelines([_MAGIC, checksum.to_bytes(4, "big"), *rest])

    write_atomically(path, write)
    return len(tokens) - len(texts)


def _suffix_order(tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Return the places of all suffixes, sorted by their first 64 tokens at least (Manber and Myers, 1993)."""
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    order, size = np.argsort(rank, kind="stable"), 1
    while size < _SORTED and rank.max() < len(tokens):
        behind = np.zeros_like(rank)
        behind[:-size] = rank[size:]
        keys = rank * (len(tokens) + 1) + behind
        order = np.argsort(keys, kind="stable")
        is_new = np.diff(keys[order], prepend=-1) != 0
        rank[order] = np.cumsum(is_new)
        size *= 2
    return order


def _as_bytes(tokens: Sequence[int]) -> bytes:
    return b"".join([token.to_bytes(4, "big") for token in tokens])


_REMEDY = "make one for this target: specinfer corpus build PATH --model MODEL --out FILE"


def _read_header(path: str | Path, data: mmap.mmap) -> tuple[dict[str, object], int]:
    """Return the header of a file, and the place of the tokens."""
    size = int.from_bytes(data[_START - 4 : _START], "big")
    if data[: len(_MAGIC)] != _MAGIC or size > 1 << 16 or _START + size > len(data):
        raise CorpusFileError(f"{path} is no corpus; {_REMEDY}")
    try:
        header = json.loads(data[_START : _START + size])
    except (ValueError, RecursionError) as error:
        raise CorpusFileError(f"{path} is damaged; {_REMEDY}") from error
    if not isinstance(header, dict) or header.get("byte_order") != sys.byteorder or (_START + size) % 8:
        raise CorpusFileError(f"{path} is damaged, or from another kind of machine; {_REMEDY}")
    return header, _START + size
