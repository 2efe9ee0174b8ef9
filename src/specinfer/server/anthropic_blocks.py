"""The content blocks of a message in Anthropic's format, as a whole and as events."""

from collections.abc import Sequence
from typing import Any

from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.inputs.formats.parser import OutputDelta
from specinfer.server.dialect import ANTHROPIC
from specinfer.server.errors import ApiError
from specinfer.server.json_body import read_generated
from specinfer.server.usage import metrics_of, usage_of


class MessageBlocks:
    """The content blocks of one message.

    Args:
        head: The fields that are known from the start.
        max_tokens: The limit that the request asked for.
    """

    def __init__(self, head: dict[str, Any], generation: Generation, max_tokens: int | None) -> None:
        self._head, self._generation, self._max_tokens = head, generation, max_tokens
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []  # the parts of each block's text, or of its input's JSON
        self._open: int | None = None  # the index of the call that the open block is, -1 for text, None for no block

    def begin(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self.whole()}]

    def push(self, deltas: Sequence[OutputDelta], chunk: TextChunk) -> list[dict[str, Any]]:
        events = []
        for delta in deltas:
            text = delta.content if delta.index is None else delta.arguments
            index = -1 if delta.index is None else delta.index
            if index != self._open and (text or delta.index is not None):
                events += [*self._close(), self._begin_block(delta, index)]
            if text:
                self._texts[-1].append(text)
                part = {"type": "text_delta", "text": text}
                if delta.index is not None:
                    part = {"type": "input_json_delta", "partial_json": text}
                events.append({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": part})
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
            text = "".join(parts)
            content.append(block | ({"text": text} if block["type"] == "text" else {"input": _input_of(text)}))
        return self._head | {"content": content} | self._end | {"usage": self._usage()}

    def _begin_block(self, delta: OutputDelta, index: int) -> dict[str, Any]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if delta.index is not None:
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
        self._open = index
        self._blocks.append(block)
        self._texts.append([])
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _reason(self, chunk: TextChunk) -> str:
        if chunk.finish_reason == "length":
            num_tokens = self._generation.requests[0].num_output
            is_asked = self._max_tokens is not None and num_tokens >= self._max_tokens
            return "max_tokens" if is_asked else "model_context_window_exceeded"
        if any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use"
        return "stop_sequence" if isinstance(chunk.stop_reason, str) else "end_turn"

    def _usage(self) -> dict[str, Any]:
        usage = usage_of([self._generation])
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
        }


def _input_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call; {} if the call was cut off."""
    found = read_generated(text)
    return found if isinstance(found, dict) else {}
