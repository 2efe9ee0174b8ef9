"""The content blocks of a message in Anthropic's format, as a whole and as events."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.inputs.formats.parser import OutputDelta
from specinfer.server.dialect import ANTHROPIC
from specinfer.server.errors import ApiError
from specinfer.server.generations import metrics_of, usage_of
from specinfer.server.json_body import read_generated
from specinfer.server.responses_items import sealed

_EMPTY: Mapping[str, Mapping[str, Any]] = {  # the fields of a block at its start, by its type
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


class MessageBlocks:
    """The content blocks of one message.

    The message begins with the first step, which knows how many tokens were cached. Clients that wait for events, for
    which a ping is none, are sent empty pieces of text or of a thought instead.

    Args:
        head: The fields that are known from the start.
        max_tokens: The limit that the request asked for; 0 for an answer without content.
        thinks: Whether a thought is likely to come first.
        omits_thoughts: Whether thoughts are left out; their signature has them for when it is sent back.
    """

    def __init__(
        self, head: dict[str, Any], generation: Generation, max_tokens: int, *, thinks: bool, omits_thoughts: bool
    ) -> None:
        self._head, self._generation, self._max_tokens = head, generation, max_tokens
        self._thinks, self._omits_thoughts = thinks, omits_thoughts
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []  # the parts of each block's text, or of its input's JSON
        self._open: str | int | None = None  # the kind of the open block, the index of its call, or None for no block
        self._is_begun = False

    def begin(self) -> list[dict[str, Any]]:
        return []

    def wait(self) -> list[dict[str, Any]]:
        if not self._is_begun:
            return self._begin()
        if self._open is None:
            return self._add("thinking" if self._thinks else "text", "")
        return [self._piece("")]

    def push(self, deltas: Sequence[OutputDelta], chunk: TextChunk) -> list[dict[str, Any]]:
        events = self._begin()
        for delta in deltas if self._max_tokens != 0 else ():
            if delta.reasoning:
                events += self._add("thinking", delta.reasoning)
            if delta.content:
                events += self._add("text", delta.content)
            if delta.index is not None:
                events += self._add(delta.index, delta.arguments, {"id": delta.id, "name": delta.name})
        return events

    def finish(self, chunk: TextChunk) -> list[dict[str, Any]]:
        events = self._close()
        self._end["stop_reason"] = self._reason(chunk)
        if self._end["stop_reason"] == "stop_sequence":
            self._end["stop_sequence"] = chunk.stop_reason
        metrics = metrics_of([self._generation])
        self._head["metrics"] = metrics
        last = {"type": "message_delta", "delta": dict(self._end), "usage": self._usage(), "metrics": metrics}
        return [*events, last, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        return [ANTHROPIC.error(error)]

    def whole(self) -> dict[str, Any]:
        content = []
        for block, parts in zip(self._blocks, self._texts, strict=True):
            text = "" if block["type"] == "thinking" and self._omits_thoughts else "".join(parts)
            is_call = block["type"] == "tool_use"  # without arguments if it was cut off
            content.append(block | ({"input": read_generated(text) or {}} if is_call else {block["type"]: text}))
        return self._head | {"content": content} | self._end | {"usage": self._usage()}

    def _begin(self) -> list[dict[str, Any]]:
        is_begun, self._is_begun = self._is_begun, True
        return [] if is_begun else [{"type": "message_start", "message": self.whole()}]

    def _add(self, key: str | int, text: str, call: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Add text to the open block, or to a new one if another is open."""
        events = []
        if key != self._open:
            events, self._open = self._close(), key
            kind = key if isinstance(key, str) else "tool_use"
            self._blocks.append({"type": kind, **(call or {}), **_EMPTY[kind]})
            self._texts.append([])
            index = len(self._blocks) - 1
            events.append({"type": "content_block_start", "index": index, "content_block": dict(self._blocks[-1])})
        if text:
            self._texts[-1].append(text)
            events.append(self._piece(text))
        return events

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        events, self._open = [], None
        if self._blocks[-1]["type"] == "thinking":
            thought = "".join(self._texts[-1])
            signature = sealed(thought) if self._omits_thoughts else sha256(thought.encode()).hexdigest()
            self._blocks[-1]["signature"] = signature
            events.append(self._delta({"type": "signature_delta", "signature": signature}))
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _piece(self, text: str) -> dict[str, Any]:
        kind = self._blocks[-1]["type"]
        if kind == "tool_use":
            return self._delta({"type": "input_json_delta", "partial_json": text})
        return self._delta({"type": f"{kind}_delta", kind: "" if kind == "thinking" and self._omits_thoughts else text})

    def _delta(self, piece: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": piece}

    def _reason(self, chunk: TextChunk) -> str:
        if self._max_tokens == 0:
            return "max_tokens"
        if chunk.finish_reason == "length":
            num_tokens = self._generation.requests[0].num_output
            return "max_tokens" if num_tokens >= self._max_tokens else "model_context_window_exceeded"
        if any(block["type"] == "tool_use" for block in self._blocks):
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
