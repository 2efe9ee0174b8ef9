"""A response in the format of /v1/responses: its items, and the events that report them."""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.server.blocks import Block, BlockEvent, Blocks, sealed
from specinfer.server.dialects import Event, to_json
from specinfer.server.errors import ApiError
from specinfer.server.generations import metrics_of, usage_of
from specinfer.server.json_body import read_generated


@dataclass(frozen=True, slots=True)
class _Text:
    """A text of an item.

    Attributes:
        events: The events that report it.
        field: The field of the item that has it.
        part: The type of the part that it is the text of, or None if it is the field's value.
    """

    events: str
    field: str
    part: str | None = None

    def made(self, text: str) -> dict[str, Any]:
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self.part == "output_text" else {}
        return {"type": self.part, "text": text, **more}


_TEXTS = {
    "message": (_Text("output_text", "content", "output_text"),),
    "reasoning": (
        _Text("reasoning_text", "content", "reasoning_text"),
        _Text("reasoning_summary_text", "summary", "summary_text"),
    ),
    "function_call": (_Text("function_call_arguments", "arguments"),),
    "custom_tool_call": (_Text("custom_tool_call_input", "input"),),
    "tool_search_call": (),
}
_IDS = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc", "tool_search_call": "tsc",
}  # fmt: skip


class ResponseItems:
    """The writer of one response, each block of which is an item.

    Args:
        name: The request's id, which is part of the items' ids.
        head: The fields of the response object, except its status and its output.
        calls: The fields of items that report calls, by the names of functions that need others than their own name.
        has_summaries: Whether a thought is also its own summary, which clients show.
        seals: Whether thoughts have an encoding that clients send back.
    """

    def __init__(
        self,
        name: str,
        head: dict[str, Any],
        generation: Generation,
        blocks: Blocks,
        calls: Mapping[str, dict[str, Any]],
        *,
        has_summaries: bool,
        seals: bool,
    ) -> None:
        self._name, self._head, self._generation, self._blocks = name, head, generation, blocks
        self._calls, self._has_summaries, self._seals = calls, has_summaries, seals
        self._status = "in_progress"
        self._items: list[dict[str, Any]] = []
        self._numbers = itertools.count()

    def begin(self) -> list[Event]:
        return [self._state("response.created"), self._state("response.in_progress")]

    def wait(self) -> list[Event]:
        return [self._state("response.in_progress")]

    def write(self, chunk: TextChunk, place: int = 0) -> list[Event]:
        events = self._written(self._blocks.read(chunk), "completed")
        if chunk.finish_reason is None:
            return events
        is_cut = chunk.finish_reason == "length"
        self._status = "incomplete" if is_cut else "completed"
        if not self._items:
            events += self._written(self._blocks.begin("text"), self._status)
        events += self._written(self._blocks.end(), self._status)
        self._head |= self._end() | {"completed_at": None if is_cut else int(time.time())}
        if is_cut:
            self._head["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._state(f"response.{self._status}")]

    def fail(self, error: ApiError) -> list[Event]:
        """End the response with an error and return the last events."""
        events = self._written(self._blocks.end(), "incomplete")
        self._status = "failed"
        self._head |= self._end() | {"error": {"code": "server_error", "message": error.plain_message}}
        return [*events, self._state("response.failed")]

    def whole(self, chunks: Sequence[Sequence[TextChunk]]) -> bytes:
        self.write(chunks[0][0])
        return to_json(self.response())

    def response(self) -> dict[str, Any]:
        """Return the response as it is now."""
        return self._head | {"status": self._status, "output": [dict(item) for item in self._items]}

    def _end(self) -> dict[str, Any]:
        """Return the fields of a response that are known at its end."""
        counts = usage_of([self._generation])
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0} | counts.get("completion_tokens_details", {}),
            "total_tokens": counts["total_tokens"],
        }
        return {"usage": usage, "metrics": metrics_of([self._generation])}

    def _state(self, kind: str) -> Event:
        return self._event(kind, response=self.response())

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, **fields, "sequence_number": next(self._numbers)}

    # -------------------------------------------------------------------------------------- items

    def _written(self, changes: Iterable[BlockEvent], status: str) -> list[Event]:
        """Return the events for changes of blocks; one that ends has this status."""
        events: list[Event] = []
        for change, block, text in changes:
            if change == "begin":
                events += self._begin(block)
            elif change == "grow":
                events += [self._of_text(one, "delta", delta=text) for one in self._texts_of(self._items[-1])]
            else:
                events += self._close(block.text, status)
        return events

    def _begin(self, block: Block) -> list[Event]:
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
        if block.kind == "thought":
            item = {"type": "reasoning", "summary": [], "content": []}
        elif block.call.name is not None:
            name = block.call.name
            fields = self._calls.get(name, {"type": "function_call", "name": name})
            item = {"call_id": block.call.id, **fields} | {"input" if "custom" in fields["type"] else "arguments": ""}
        item |= {"id": f"{_IDS[item['type']]}_{self._name}_{block.index}", "status": "in_progress"}
        self._items.append(item)
        events = [self._of_item("response.output_item.added", item=dict(item))]
        return events + [self._of_part(one, "added", "") for one in self._texts_of(item) if one.part]

    def _close(self, text: str, status: str) -> list[Event]:
        item, events = self._items[-1], []
        for one in self._texts_of(item):
            name = {"name": item["name"]} if one.field == "arguments" else {}
            events.append(self._of_text(one, "done", **name, **{"text" if one.part else one.field: text}))
            events += [self._of_part(one, "done", text)] if one.part else []
            item[one.field] = [one.made(text)] if one.part else text
        if item["type"] == "tool_search_call":
            item["arguments"] = read_generated(text) or {}
        elif item["type"] == "reasoning" and self._seals:
            item["encrypted_content"] = sealed(text)
        item["status"] = status
        return [*events, self._of_item("response.output_item.done", item=dict(item))]

    def _texts_of(self, item: dict[str, Any]) -> tuple[_Text, ...]:
        texts = _TEXTS[item["type"]]
        return texts if self._has_summaries else texts[:1]

    def _of_text(self, text: _Text, kind: str, /, **fields: Any) -> Event:
        place = {f"{text.field}_index": 0} if text.part else {}
        more: dict[str, Any] = {"logprobs": []} if text.part == "output_text" else {}
        return self._of_item(f"response.{text.events}.{kind}", **place, **fields, **more)

    def _of_part(self, text: _Text, kind: str, value: str) -> Event:
        name = "content_part" if text.field == "content" else "reasoning_summary_part"
        return self._of_item(f"response.{name}.{kind}", **{f"{text.field}_index": 0}, part=text.made(value))

    def _of_item(self, kind: str, **fields: Any) -> Event:
        place = {"output_index": len(self._items) - 1}
        of_item = place if "item" in fields else {"item_id": self._items[-1]["id"], **place}
        return self._event(kind, **of_item, **fields)
