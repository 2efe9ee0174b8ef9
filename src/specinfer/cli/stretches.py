"""Text cut into stretches of one origin each, and broken into lines, before it is shown."""

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from specinfer.core.text import TextBuffer

if TYPE_CHECKING:  # importing these imports torch, which takes seconds
    from specinfer.core.outputs import RequestOutput, TextChunk
    from specinfer.llm import LLM

Stretch: TypeAlias = tuple[str, str | None]  # text, and the drafter that proposed it, or None for the target
Piece: TypeAlias = tuple[str, list[Stretch]]  # new text, and the stretches that it is shown as


class Painter:
    """A splitter of shown text into stretches of one origin each.

    Text may come later than its tokens, while a character or a stop string is incomplete. So the painter decodes each
    token's share of the text itself, and assigns origins by length.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._buffer = TextBuffer(functools.partial(tokenizer.decode, skip_special_tokens=True))
        self._shares: deque[tuple[int, str | None]] = deque()  # characters that are not yet assigned, with their origin
        self._origin: str | None = None

    def add(self, token_ids: Sequence[int], origins: Sequence[str | None]) -> None:
        for token, origin in zip(token_ids, origins, strict=True):
            before = len(self._buffer.text)
            self._buffer.push(token)
            self._shares.append((len(self._buffer.text) - before, origin))

    def cut(self, text: str) -> Iterator[Stretch]:
        """Yield the stretches of the next shown text."""
        while text:
            # Text after the last share is part of an incomplete character, released at the end of the output.
            length, self._origin = self._shares.popleft() if self._shares else (len(text), self._origin)
            if length > len(text):
                self._shares.appendleft((length - len(text), self._origin))
            if length:
                yield text[:length], self._origin
            text = text[length:]


class WordWrap:
    """A line breaker between words; an incomplete word is withheld.

    Args:
        width: Maximum columns of a line, unless a single word is longer.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._gap: Stretch | None = None  # the space before the word
        self._word: list[Stretch] = []  # the characters of the word

    def add(self, stretches: Iterable[Stretch]) -> Iterator[Stretch]:
        """Yield the text that can be shown so far."""
        for char, origin in ((char, origin) for text, origin in stretches for char in text):
            if not char.isspace():
                self._word.append((char, origin))
                continue
            yield from self.flush()
            if char == "\n":
                self._column = 0
                yield char, origin
            else:
                self._gap = char, origin

    def flush(self) -> Iterator[Stretch]:
        """Yield the text that was withheld."""
        if self._gap is not None:
            breaks = bool(self._word) and self._column + 1 + len(self._word) > self._width
            self._column = 0 if breaks else self._column + 1
            yield ("\n", self._gap[1]) if breaks else self._gap
        yield from self._word
        self._column += len(self._word)
        self._gap = None
        self._word.clear()


def pieces_of(llm: "LLM", chunks: "Iterable[TextChunk]", outputs: "list[RequestOutput]") -> Iterator[Piece]:
    """Yield the pieces of a stream, and append its output to the list."""
    painter = None if llm.tokenizer is None else Painter(llm.tokenizer)
    for chunk in chunks:
        if chunk.output is not None:
            outputs.append(chunk.output)
        if painter is None:
            yield chunk.text, list(id_stretches(chunk.token_ids, chunk.origins))
        else:
            painter.add(chunk.token_ids, chunk.origins)
            yield chunk.text, list(painter.cut(chunk.text))


def id_stretches(token_ids: Sequence[int], origins: Sequence[str | None]) -> Iterator[Stretch]:
    """Return token ids in place of text, for a model without a tokenizer."""
    for token, origin in zip(token_ids, origins, strict=True):
        yield f"{token} ", origin
