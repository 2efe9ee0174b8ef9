"""The content blocks of a message in Anthropic's format, as a whole and as events."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.server.blocks import Block, BlockEvent, Blocks, sealed
from specinfer.server.dialects import Event, to_json
from specinfer.server.generations import metrics_of, usage_of
from specinfer.server.json_body import read_generated

_EMPTY: Mapping[str, Mapping[str, Any]] = {  # the fields of a block at its start, by its type
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
_TYPES = {"text": "text", "thought": "thinking", "call": "tool_use"}


class MessageBlocks:
    """The writer of one message.

    The message begins with the first step, which knows how many tokens were cached. Clients that wait for events, for
    which a ping is none, are sent empty pieces of text or of a thought instead.

    Args:
        head: The fields that are known from the start.
        max_tokens: The limit that the request asked for; 0 for an answer without content.
        thinks: Whether a thought is likely to come first.
        omits_thoughts: Whether thoughts are omitted; their signature has them for when it is sent back.
    """

    def __init__(
        self,
        head: dict[str, Any],
        generation: Generation,
        blocks: Blocks,
        max_tokens: int,
        *,
        thinks: bool,
        omits_thoughts: bool,
    ) -> None:
        self._head, self._generation, self._blocks, self._max_tokens = head, generation, blocks, max_tokens
        self._thinks, self._omits_thoughts = thinks, omits_thoughts
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._is_begun = False

    def begin(self) -> list[Event]:
        return []

    def wait(self) -> list[Event]:
        if not self._is_begun:
            return self._begin()
        if self._blocks.open is None:
            return self._written(self._blocks.begin("thought" if self._thinks else "text"))
        return [self._piece(self._blocks.open, "")]

    def write(self, chunk: TextChunk, place: int = 0) -> list[Event]:
        events = self._begin()  # without content
        events += self._written(self._blocks.read(chunk) if self._max_tokens != 0 else ())
        return events if chunk.finish_reason is None else [*events, *self._finish(chunk)]

    def whole(self, chunks: Sequence[Sequence[TextChunk]]) -> bytes:
        self.write(chunks[0][0])
        return to_json(self.message())

    def message(self) -> dict[str, Any]:
        """Return the message as it is now."""
        content = []
        for block in self._blocks.all:
            text, made = block.text, self._empty(block)
            if block.kind == "thought":
                made |= {"thinking": "" if self._omits_thoughts else text, "signature": self._signature(text)}
            else:  # a call that was cut off has no arguments
                made |= {"text": text} if block.kind == "text" else {"input": read_generated(text) or {}}
            content.append(made)
        return self._head | {"content": content} | self._end | {"usage": self._usage()}

    def _begin(self) -> list[Event]:
        is_begun, self._is_begun = self._is_begun, True
        return [] if is_begun else [{"type": "message_start", "message": self.message()}]

    def _finish(self, chunk: TextChunk) -> list[Event]:
        events = self._written(self._blocks.end())
        self._end["stop_reason"] = self._reason(chunk)
        if self._end["stop_reason"] == "stop_sequence":
            self._end["stop_sequence"] = chunk.stop_reason
        metrics = metrics_of([self._generation])
        self._head["metrics"] = metrics
        last = {"type": "message_delta", "delta": dict(self._end), "usage": self._usage(), "metrics": metrics}
        return [*events, last, {"type": "message_stop"}]

    def _written(self, changes: Iterable[BlockEvent]) -> list[Event]:
        """Return the events for changes of blocks."""
        events: list[Event] = []
        for change, block, text in changes:
            place = {"index": block.index}
            if change == "begin":
                events.append({"type": "content_block_start", **place, "content_block": self._empty(block)})
            elif change == "grow":
                events.append(self._piece(block, text))
            else:
                if block.kind == "thought":
                    signature = {"type": "signature_delta", "signature": self._signature(block.text)}
                    events.append({"type": "content_block_delta", **place, "delta": signature})
                events.append({"type": "content_block_stop", **place})
        return events

    def _empty(self, block: Block) -> dict[str, Any]:
        """Return a block as it is at its start."""
        kind = _TYPES[block.kind]
        call = {"id": block.call.id, "name": block.call.name} if block.kind == "call" else {}
        return {"type": kind, **call, **_EMPTY[kind]}

    def _signature(self, thought: str) -> str:
        return sealed(thought) if self._omits_thoughts else sha256(thought.encode()).hexdigest()

    def _piece(self, block: Block, text: str) -> Event:
        kind = _TYPES[block.kind]
        piece = {"type": f"{kind}_delta", kind: "" if block.kind == "thought" and self._omits_thoughts else text}
        if block.kind == "call":
            piece = {"type": "input_json_delta", "partial_json": text}
        return {"type": "content_block_delta", "index": block.index, "delta": piece}

    def _reason(self, chunk: TextChunk) -> str:
        if self._max_tokens == 0:
            return "max_tokens"
        if chunk.finish_reason == "length":
            num_tokens = self._generation.requests[0].num_output
            return "max_tokens" if num_tokens >= self._max_tokens else "model_context_window_exceeded"
        if self._blocks.calls():
            return "tool_use"
        return "stop_sequence" if isinstance(chunk.stop_reason, str) else "end_turn"

    def _usage(self) -> dict[str, Any]:
        usage = usage_of([self._generation], hides_output=self._max_tokens == 0)
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
        }
