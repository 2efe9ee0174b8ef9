"""Conversion of tokens to text, one token at a time, with stop strings found inside the tokens of one pass."""

from collections.abc import Callable, Sequence

from specinfer.core.thought import Phase, Thought

_MAX_UNFINISHED = 8


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    ending = "es" if noun.endswith("ss") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"


class TextBuffer:
    """The text of one output as it grows.

    A token may be part of a character, and a tokenizer may join tokens with or without a space. So text
    is decoded from a window of recent tokens, and withheld while it ends in an unfinished character.

    Args:
        thought: The thought of the output, if it may have one. Stop strings count after it, from the answer's first
            character that is no whitespace.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        thought: Thought | None = None,
    ) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._thought = thought
        self._answer = 0 if thought is None else None  # where the answer begins; None before
        self._tokens: list[int] = []
        # Tokens of [window, read) were decoded into earlier text; those of [read, end) are new.
        self._window = self._read = 0
        self.text = ""
        self.ends: list[int] = []  # for each token, the length of the text after it

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Add one token's text and return the stop string that ends the output with it, or None."""
        before = len(self.text)
        self._add(token)
        before = self._find_answer(before)
        stop = self._cut_at_stop(before, self._answer) if may_stop and self._answer is not None else None
        self.ends.append(len(self.text))
        return stop

    def _add(self, token: int) -> None:
        self._tokens.append(token)
        shown = self._decode(self._tokens[self._window : self._read])
        whole = self._decode(self._tokens[self._window :])
        # A character has at most four bytes, so what stays unfinished for longer is not a character.
        unfinished = whole.endswith("\ufffd") and len(self._tokens) - self._read <= _MAX_UNFINISHED
        if len(whole) <= len(shown) or unfinished:
            # Special tokens have no text, and thousands may follow one another: keep the window short.
            if whole == shown and len(self._tokens) - self._read > _MAX_UNFINISHED:
                del self._tokens[self._read]
            return
        self.text += whole[len(shown) :]
        self._window, self._read = self._read, len(self._tokens)

    def finish(self) -> None:
        """Append the withheld text, because no more tokens will complete it."""
        shown = self._decode(self._tokens[self._window : self._read])
        whole = self._decode(self._tokens[self._window :])
        self.text += whole[len(shown) :]
        self._window = self._read = len(self._tokens)

    def settled(self) -> str:
        """Return the text that no later token can change: all but what may be the start of a stop string."""
        if self._answer is None:
            is_decided = self._thought is None or self._thought.phase is not Phase.UNDECIDED
            return self.text if is_decided or not self._stop else ""
        num_held_back = max((overlap(self.text, stop) for stop in self._stop), default=0)
        return self.text[: max(len(self.text) - num_held_back, self._answer)]

    def _find_answer(self, before: int) -> int:
        """Note where the answer begins, once that is known; return from where on the text is new to stop strings."""
        thought = self._thought
        if self._answer is None and thought is not None and thought.is_over:
            end = thought.reasoning.end
            at = self.text.find(end, max(0, before - len(end)))
            before = at + len(end) if at >= 0 else len(self.text)  # special tokens may have no text
            self._answer = before = before if thought.phase is Phase.ANSWER else 0
        if self._answer is not None and thought is not None and thought.phase is Phase.ANSWER:
            while self._answer < len(self.text) and self.text[self._answer].isspace():
                self._answer += 1
        return before

    def _cut_at_stop(self, before: int, first: int) -> str | None:
        """Cut the text at the earliest stop string from `first` on that ends in the text added since `before`."""
        earliest: tuple[int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, max(first, before - len(stop) + 1))
            if at >= 0 and (earliest is None or at < earliest[0]):
                earliest = (at, stop)
        if earliest is None:
            return None
        at, stop = earliest
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        return stop


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of a stop string that the text ends with."""
    # Jump between the places where it could begin, because a caller may send many long stop strings.
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
