"""Parsing of a response's text into a thought, content and tool calls, piece by piece as it comes.

Each character is looked at a bounded number of times, and nothing is evaluated. The parser does not rely on the
grammar of `call_grammar.py`: text that turns out not to be a call becomes content.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specinfer.core.text import overlap
from specinfer.core.thought import Reasoning
from specinfer.inputs.formats.call_reader import CallReader, OutputDelta
from specinfer.inputs.formats.calls import CallFormat
from specinfer.inputs.formats.harmony import read_channels
from specinfer.inputs.formats.scanner import SPACES, Reading, Scanner, Trimmed

__all__ = ["OutputDelta", "OutputParser"]
_PART = 1 << 12  # characters that are added at once: what is pending is copied whenever some of it is read


class OutputParser:
    """A parser of one response as it is generated.

    Args:
        call_format: The model's format of calls, or None for a response without tools.
        functions: The JSON schemas of the arguments of functions that may be called, by name.
        reasoning: The thought before the answer, or None if there is none.
    """

    def __init__(
        self,
        call_format: CallFormat | None = None,
        functions: Mapping[str, Mapping[str, Any]] | None = None,
        reasoning: Reasoning | None = None,
    ) -> None:
        self._format, self._reasoning = call_format, reasoning
        self._scanner = Scanner()
        self._calls = CallReader(self._scanner, functions or {}, self._send_call)
        self._deltas: list[OutputDelta] = []
        self._content, self._thought = Trimmed(strips_start=False), Trimmed(strips_start=True)
        self._is_blank_line = True  # the line before the pending text has no characters but whitespace
        self._reading = self._read()

    @property
    def has_calls(self) -> bool:
        """True if at least one call has begun."""
        return self._calls.num_calls > 0

    @property
    def has_whole_calls(self) -> bool:
        """True if there are calls, and the arguments of the last one have ended."""
        return self.has_calls and not self._calls.is_in_call

    def push(self, text: str) -> list[OutputDelta]:
        """Add text, and return the deltas that are certain now."""
        if self._format is None and self._reasoning is None:
            return [OutputDelta(text)] if text else []
        for start in range(0, len(text), _PART):
            self._scanner.pending += text[start : start + _PART]
            next(self._reading)
        return self._taken()

    def finish(self) -> list[OutputDelta]:
        """Return the text that was held back at the end of the response. A call without arguments is dropped."""
        self._scanner.is_complete = True
        for _ in self._reading:
            pass
        spaces = self._content.rest()
        if spaces and not self.has_calls:
            self._deltas.append(OutputDelta(spaces))
        return self._taken()

    def _taken(self) -> list[OutputDelta]:
        deltas, self._deltas = self._deltas, []
        return _joined(deltas)

    def _read(self) -> Reading[None]:
        style, reasoning = self._format, self._reasoning
        if (style is not None and style.has_channels) or (reasoning is not None and reasoning.has_channels):
            yield from read_channels(self._scanner, self._calls, self._send_thought, self._send)
            return
        if reasoning is not None:
            yield from self._read_thought(reasoning)
        if style is not None and style.follows_text:
            yield from self._read_content_and_calls(style)
        elif style is not None:
            yield from self._read_calls_at_start(style)
        while (yield from self._scanner.wait_for_text()):
            self._send_first(len(self._scanner.pending))

    def _read_thought(self, reasoning: Reasoning) -> Reading[None]:
        scanner = self._scanner
        scanner.begin()
        if not (yield from scanner.take(reasoning.start)):
            scanner.put_back()
            if not reasoning.is_open:
                return
        yield from scanner.read_until((reasoning.end,), self._send_thought)
        self._content = Trimmed(strips_start=True)

    # ------------------------------------------------------------------------------------ calls

    def _read_calls_at_start(self, style: CallFormat) -> Reading[None]:
        """Read calls where only whitespace came before; other text is left."""
        scanner = self._scanner
        scanner.begin()
        if style.lead is None or not (yield from scanner.take(style.lead)):
            scanner.put_back()
        is_cut = False
        for parts in (style.call, *style.also):
            if (yield from self._calls.read_group(replace(style, call=parts))):
                return
            is_cut = is_cut or scanner.is_cut
        if is_cut and scanner.pending.lstrip(SPACES).startswith(style.trigger):
            scanner.drop()  # a call that was cut off before its arguments leaves no markup

    def _read_content_and_calls(self, style: CallFormat) -> Reading[None]:
        scanner = self._scanner
        alone = replace(style, begin=(), between=(), end=())
        others = [replace(alone, call=parts) for parts in style.also] if self._calls.functions else []
        # Other forms that begin like the first one may be anywhere, all others only at the start of a line.
        forms = [style, *(form for form in others if form.trigger == style.trigger)]
        others = [form for form in others if form.trigger != style.trigger]
        while (yield from self._read_to_call(style.trigger, {form.trigger for form in others})):
            is_first, is_cut = scanner.pending.startswith(style.trigger), False
            for form in forms if is_first else others:
                if not is_first and not form.trigger.startswith(scanner.pending[: len(form.trigger)]):
                    continue
                if (yield from self._calls.read_group(form, is_known=not is_first)):
                    break
                is_cut = is_cut or scanner.is_cut
            else:
                if is_first and is_cut:
                    scanner.drop()  # a call that was cut off before its arguments leaves no markup
                    return
                self._send_first(len(style.trigger) if is_first else 1)

    def _read_to_call(self, trigger: str, others: set[str]) -> Reading[bool]:
        """Send content up to a text with which a call may begin; False if there is none.

        Args:
            others: Texts that begin a call only at the start of a line.
        """
        scanner, pattern = self._scanner, re.escape(trigger)
        if others:
            pattern += rf"|^[ \t]*(?P<other>{'|'.join(map(re.escape, sorted(others, reverse=True)))})"
        openers = re.compile(pattern, re.MULTILINE)
        while (yield from scanner.wait_for_text()):
            for match in openers.finditer(scanner.pending):
                is_other = match.lastgroup == "other"
                if not is_other or match.start() or self._is_blank_line:
                    self._send_first(match.start("other" if is_other else 0))
                    return True
            keep = max(overlap(scanner.pending, trigger), self._begun(others))
            self._send_first(len(scanner.pending) - keep)
            if keep and not (yield from scanner.wait()):
                self._send_first(keep)
        return False

    def _begun(self, others: set[str]) -> int:
        """Return the length of the last line's text if it may be the beginning of one of the other texts."""
        pending = self._scanner.pending
        begun = pending.rpartition("\n")[2].lstrip(" \t")
        is_start = "\n" in pending or self._is_blank_line
        return len(begun) if is_start and begun and any(other.startswith(begun) for other in others) else 0

    # ----------------------------------------------------------------------------------- deltas

    def _send_first(self, length: int) -> None:
        """Send the first characters of the pending text as content."""
        text, self._scanner.pending = self._scanner.pending[:length], self._scanner.pending[length:]
        self._send(text)

    def _send(self, text: str) -> None:
        line = text.rpartition("\n")[2]
        self._is_blank_line = not line.strip(SPACES) and (self._is_blank_line or "\n" in text)
        if body := self._content.push(text):
            self._deltas.append(OutputDelta(body))

    def _send_thought(self, text: str) -> None:
        if body := self._thought.push(text):
            self._deltas.append(OutputDelta(reasoning=body))

    def _send_call(self, delta: OutputDelta) -> None:
        self._content.rest()  # whitespace before a call
        self._deltas.append(delta)


def _joined(deltas: list[OutputDelta]) -> list[OutputDelta]:
    """Join neighbouring deltas of the same call, of a thought or of content."""
    joined: list[OutputDelta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        is_same = last is not None and last.index == delta.index and last.id is delta.id is None
        if last is not None and is_same and bool(last.reasoning) == bool(delta.reasoning):
            joined[-1] = replace(
                last,
                content=last.content + delta.content,
                reasoning=last.reasoning + delta.reasoning,
                arguments=last.arguments + delta.arguments,
            )
        else:
            joined.append(delta)
    return joined
