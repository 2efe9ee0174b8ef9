"""The blocks of an output: its thoughts, texts and calls, one after another, as they begin, grow and end.

Each API writes its stream from these events, and a whole answer from the blocks that they leave. The model calls a
custom tool, which takes text, as a function of a string, whose JSON is decoded as it comes.
"""

import base64
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from specinfer.core.outputs import TextChunk
from specinfer.inputs.formats.parser import OutputDelta, OutputParser

_BEGINNING = ("{", '"input"', ":", '"')
# Characters of a JSON string. The first half of a surrogate pair is read together with what follows.
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[\da-fA-F]{4}|\\u[\da-fA-F]{4}(?=[^\\]|\\[^u]|\\u[\da-fA-F]{4}))*', re.ASCII
)


def function_of_custom(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a custom tool as a function. A grammar of its input is described to the model; a regex also holds."""
    text: dict[str, Any] = {"type": "string"}
    form = tool.get("format")
    grammar = form.get("grammar", form) if isinstance(form, dict) else None
    if isinstance(grammar, dict) and isinstance(definition := grammar.get("definition"), str):
        text["description"] = f"Text that matches this {grammar.get('syntax')} grammar:\n{definition}"
        if grammar.get("syntax") == "regex":
            text["pattern"] = f"^(?:{definition})$"
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}


class CustomInputs:
    """A parser in whose deltas the arguments of custom tools are the text of their input.

    Args:
        names: The names of custom tools.
    """

    def __init__(self, parser: OutputParser, names: frozenset[str]) -> None:
        self._parser, self._names = parser, names
        self._is_custom = False
        self._expected: list[str] = []  # what is left of the beginning of the JSON
        self._pending = ""  # JSON of the input that is not decoded yet

    @property
    def has_whole_calls(self) -> bool:
        return self._parser.has_whole_calls

    def push(self, text: str) -> list[OutputDelta]:
        return self._decoded(self._parser.push(text))

    def finish(self) -> list[OutputDelta]:
        return self._decoded(self._parser.finish())

    def _decoded(self, deltas: Sequence[OutputDelta]) -> list[OutputDelta]:
        result = []
        for delta in deltas:
            if delta.name is not None:
                self._is_custom, self._expected, self._pending = delta.name in self._names, list(_BEGINNING), ""
            is_input = delta.index is not None and self._is_custom
            result.append(replace(delta, arguments=self._decode(delta.arguments)) if is_input else delta)
        return result

    def _decode(self, text: str) -> str:
        self._pending += text
        while self._expected:
            self._pending = self._pending.lstrip()
            if not self._pending.startswith(self._expected[0]):
                return ""
            self._pending = self._pending.removeprefix(self._expected.pop(0))
        match = _CHARACTERS.match(self._pending)
        assert match is not None
        self._pending = self._pending[match.end() :]
        value: str = json.loads(f'"{match[0]}"', strict=False)
        return value


Parser: TypeAlias = OutputParser | CustomInputs


Kind: TypeAlias = Literal["thought", "text", "call"]
_SEALED = "specinfer:"  # begins the encoding of a thought


@dataclass(slots=True, eq=False)
class Block:
    """A thought, a text or a call.

    Attributes:
        index: Its place among the blocks of the output.
        call: The first part of a call, which has its id, its name and its number; an empty one for other blocks.
        parts: The parts of its text, or of a call's arguments, so far.
    """

    kind: Kind
    index: int
    call: OutputDelta
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockEvent(NamedTuple):
    """A block that begins, grows by a text, or ends."""

    change: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one output, read from its chunks.

    Attributes:
        all: All blocks so far.
        open: The block that is being generated, if there is one.
    """

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self.all: list[Block] = []
        self.open: Block | None = None

    @property
    def has_whole_calls(self) -> bool:
        """True if there are calls, and the arguments of the last one have ended."""
        return self._parser.has_whole_calls

    def read(self, chunk: TextChunk) -> list[BlockEvent]:
        """Add a chunk, and return what is new; the last block stays open."""
        deltas = self._parser.push(chunk.text)
        deltas = deltas if chunk.finish_reason is None else deltas + self._parser.finish()
        return [event for delta in deltas for event in self._add(delta)]

    def begin(self, kind: Kind, call: OutputDelta | None = None) -> list[BlockEvent]:
        """End the open block, and begin another."""
        ended = self.end()
        self.open = Block(kind, len(self.all), call or OutputDelta())
        self.all.append(self.open)
        return [*ended, BlockEvent("begin", self.open)]

    def end(self) -> list[BlockEvent]:
        """End the open block."""
        ended, self.open = self.open, None
        return [] if ended is None else [BlockEvent("end", ended)]

    def text(self, kind: Kind) -> str:
        """Return the joined texts of all blocks of a kind."""
        return "".join(block.text for block in self.all if block.kind == kind)

    def calls(self) -> list[Block]:
        return [block for block in self.all if block.kind == "call"]

    def _add(self, delta: OutputDelta) -> Iterator[BlockEvent]:
        text = delta.reasoning or delta.content or delta.arguments
        kind: Kind = "call" if delta.index is not None else "thought" if delta.reasoning else "text"
        is_same = self.open is not None and (kind, delta.index) == (self.open.kind, self.open.call.index)
        if not is_same and (text or kind == "call"):
            yield from self.begin(kind, delta)
        if text:
            assert self.open is not None
            self.open.parts.append(text)
            yield BlockEvent("grow", self.open, text)


def sealed(thought: str) -> str:
    """Return a thought in an encoding that clients send back as it is."""
    return _SEALED + base64.b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def unsealed(given: Any) -> str:
    """Return the thought in an encoding; none if it was not made here."""
    try:
        return base64.b64decode(given.removeprefix(_SEALED)).decode() if given.startswith(_SEALED) else ""
    except (AttributeError, ValueError):
        return ""
