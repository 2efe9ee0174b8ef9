"""The format of gpt-oss: an answer is a list of messages, each with a channel and perhaps a recipient.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...` is a thought and an answer.
A message to `functions.NAME` is a call; the recipient is named before the channel or after it.
"""

import re
from collections.abc import Callable, Iterable

from specinfer.inputs.formats.call_reader import CallReader
from specinfer.inputs.formats.calls import HARMONY
from specinfer.inputs.formats.lark import Literals, quoted
from specinfer.inputs.formats.scanner import Reading, Scanner

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
_ENDS = (END, CALL, "<|return|>", START, CHANNEL)
_RECIPIENT = re.compile(r"to=functions\.([^\s<]{1,256})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

TEXTS = (START, CHANNEL, MESSAGE, END, "<|constrain|>")


def channel_rules(names: Iterable[str], answer: str | None, literals: Literals) -> list[str]:
    """Return the grammar of thoughts and texts before an answer or a call, in Lark's notation.

    The call of the i-th function has arguments that match the rule `arguments_i`.

    Args:
        answer: What matches the answer, or None if the response must be a call.
    """
    channel, message, end, start, constrain = map(literals.text, (CHANNEL, MESSAGE, END, START, "<|constrain|>"))
    kind = f'(WS? {constrain}? WS? "json")? WS? {message}'
    calls = []
    for i, name in enumerate(names):
        to = quoted(f"to=functions.{name}")
        calls += [f'WS {to} WS? {channel} "commentary" {kind} arguments_{i}']
        calls += [f'{channel} "commentary" WS {to} {kind} arguments_{i}']
    lasts = calls if answer is None else [f'{channel} "final" {message} {answer}', *calls]
    return [
        "start: other_message* last",
        f'other_message: {channel} ("analysis" | "commentary") {message} TEXT {end} {start} "assistant"',
        f"last: {' | '.join(lasts)}",
        "TEXT: /(?s:.*)/",
    ]


def read_channels(
    scanner: Scanner, calls: CallReader, send_thought: Callable[[str], None], send: Callable[[str], None]
) -> Reading[None]:
    """Read messages until the text ends: thoughts, calls, and content of all other channels."""
    mark = ""
    while (yield from scanner.wait_for_text()):
        header = [mark if mark == CHANNEL else ""]
        ended_by = yield from scanner.read_until((MESSAGE,), header.append)
        text = "".join(header)
        if ended_by is None:
            if CHANNEL not in text and START not in text:  # not of this format
                send(text)
            return
        recipient, channel = _RECIPIENT.search(text), _CHANNEL.search(text)
        if recipient is not None:
            calls.begin_call(HARMONY, recipient[1])
            mark = (yield from scanner.read_until(_ENDS, calls.send_arguments)) or ""
            calls.is_in_call = not mark and not scanner.is_complete
        elif channel is not None and channel[1] == "analysis":
            mark = (yield from scanner.read_until(_ENDS, send_thought)) or ""
        else:
            mark = (yield from scanner.read_until(_ENDS, send)) or ""
