"""A reader of text that comes in pieces.

Each method that reads is a generator, which yields where it needs more text. Whitespace before a text is skipped.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from specinfer.core.text import overlap

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]

SPACES = " \t\r\n"
_QUOTED = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.){1,256}"')
_BEGUN_QUOTED = re.compile(r'(?:"(?:[^"\\\x00-\x1f]|\\.){0,256}\\?)?')
_WORD = re.compile(r"[^\s\"'`\\<>()\[\]{}=,|]{1,256}")
_WORD_TO_COLON = re.compile(r"[^\s\"'`\\<>()\[\]{}=,|:]{1,256}")


class Scanner:
    """Text that is read from its start while it grows.

    Attributes:
        pending: Text that was received and is not read yet.
        is_complete: Whether no more text will come.
        is_cut: Whether the text ended where more of it was expected.
    """

    def __init__(self) -> None:
        self.pending = ""
        self.is_complete = self.is_cut = False
        self._taken: list[str] = []

    def begin(self) -> None:
        """Forget what was taken: `put_back` and `taken` begin here."""
        self._taken, self.is_cut = [], False

    def drop(self) -> None:
        """Forget the pending text, and what was taken."""
        self.pending, self._taken = "", []

    def put_back(self) -> None:
        """Make what was taken since `begin` pending again."""
        self.pending = "".join(self._taken) + self.pending
        self._taken = []

    def record(self, text: str) -> None:
        """Count a text that was read as taken."""
        self._taken.append(text)

    def wait(self) -> Reading[bool]:
        """Wait for more text; return False if none will come."""
        if self.is_complete:
            self.is_cut = True
            return False
        yield
        return True

    def wait_for_text(self) -> Reading[bool]:
        """Wait until there is text; return False if none will come."""
        while not self.pending:
            if not (yield from self.wait()):
                return False
        return True

    def skip_spaces(self) -> None:
        """Take the whitespace that is pending."""
        self._take_first(len(self.pending) - len(self.pending.lstrip(SPACES)))

    def sees(self, text: str) -> Reading[bool]:
        """Return whether a text is next."""
        while True:
            self.skip_spaces()
            if self.pending.startswith(text):
                return True
            if not text.startswith(self.pending) or not (yield from self.wait()):
                return False

    def take(self, text: str) -> Reading[bool]:
        """Take a text; return whether it was next."""
        text = text.strip()
        is_next = yield from self.sees(text)
        if is_next:
            self._take_first(len(text))
        return is_next

    def take_word(self, stop: str) -> Reading[str | None]:
        """Take a word without quotes and brackets, up to whitespace or a character; None if there is none."""
        pattern = _WORD_TO_COLON if stop == ":" else _WORD
        while True:
            self.skip_spaces()
            match = pattern.match(self.pending)
            end = 0 if match is None else match.end()
            if end < len(self.pending):
                return self._take_first(end) or None
            if not (yield from self.wait()):
                return None

    def take_quoted(self) -> Reading[str | None]:
        """Take a short JSON string and return its text; None if there is none."""
        while True:
            self.skip_spaces()
            if (match := _QUOTED.match(self.pending)) is not None:
                try:
                    text: str = json.loads(self._take_first(match.end()))
                except ValueError:  # an escape that JSON does not have
                    return None
                return text
            if _BEGUN_QUOTED.fullmatch(self.pending) is None or not (yield from self.wait()):
                return None

    def read_until(
        self, marks: tuple[str, ...], send: Callable[[str], object], *, drops_begun: bool = False
    ) -> Reading[str | None]:
        """Send all text before the first of some texts, and return that one; None if the text ended before it.

        Args:
            drops_begun: Whether the beginning of such a text is dropped if it is cut off, and not sent.
        """
        pattern = re.compile("|".join(map(re.escape, marks)))
        while (yield from self.wait_for_text()):
            match = pattern.search(self.pending)
            if match is not None:
                text, self.pending = self.pending[: match.start()], self.pending[match.end() :]
                send(text)
                return match[0]
            if not (yield from self._send_all_but(marks, send, drops_rest=drops_begun)):
                break
        return None

    def read_balanced(
        self, structure: re.Pattern[str], quotes: tuple[str, ...], send: Callable[[str], object]
    ) -> Reading[bool]:
        """Send text up to the bracket that closes one before it; return whether it came.

        Args:
            structure: Finds brackets, quotes, and backslashes if these escape characters in quotes.
        """
        depth, quote, is_escaped = 1, "", False
        while (yield from self.wait_for_text()):
            text, at = self.pending, int(is_escaped)
            is_escaped = False
            while (match := structure.search(text, at)) is not None:
                at = match.end()
                if match[0] == "\\":
                    is_escaped = bool(quote) and at == len(text)
                    at += bool(quote)
                elif quote:
                    quote = "" if match[0] == quote else quote
                elif match[0] in quotes:
                    quote = match[0]
                else:
                    depth += 1 if match[0] in "([{" else -1
                    if depth == 0:
                        self.pending = text[at:]
                        send(text[:at])
                        return True
            if not (yield from self._send_all_but(quotes, send)):
                break
        return False

    def _send_all_but(
        self, marks: tuple[str, ...], send: Callable[[str], object], *, drops_rest: bool = False
    ) -> Reading[bool]:
        """Send the pending text but for what may be the beginning of a text at its end; False if no more will come."""
        end = len(self.pending) - max(overlap(self.pending, mark) for mark in marks)
        text, self.pending = self.pending[:end], self.pending[end:]
        send(text)
        if self.pending and not (yield from self.wait()):
            text, self.pending = self.pending, ""
            send("" if drops_rest else text)
            return False
        return True

    def _take_first(self, length: int) -> str:
        text, self.pending = self.pending[:length], self.pending[length:]
        self._taken.append(text)
        return text


class Trimmed:
    """Text without the whitespace at its end, which is held back until more text follows.

    Args:
        strips_start: Whether the whitespace at its start is dropped, too.
    """

    def __init__(self, *, strips_start: bool) -> None:
        self._strips = strips_start
        self._spaces: list[str] = []

    def push(self, text: str) -> str:
        """Add text and return what is certain."""
        text = text.lstrip(SPACES) if self._strips else text
        self._strips = self._strips and not text
        body = text.rstrip(SPACES)
        if not body:
            self._spaces.append(text)
            return ""
        whole = "".join([*self._spaces, body])
        self._spaces = [text[len(body) :]]
        return whole

    def rest(self) -> str:
        """Return the whitespace at the end, and forget it."""
        spaces, self._spaces = "".join(self._spaces), []
        return spaces


class Lines:
    """Text without the line breaks at its start and its end."""

    def __init__(self) -> None:
        self._is_begun = False
        self._break = ""

    def push(self, text: str) -> str:
        """Add text and return what is certain."""
        if text and not self._is_begun:
            self._is_begun = True
            text = text.removeprefix("\n")
        text = self._break + text
        self._break = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")
