"""A response that is being generated: its items, and the events that report them."""

import base64
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.inputs.formats.parser import OutputDelta
from specinfer.server.errors import ApiError
from specinfer.server.generations import metrics_of, usage_of
from specinfer.server.json_body import read_generated

Event = dict[str, Any]
_SEALED = "specinfer:"  # begins the encoding of a thought


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


def sealed(thought: str) -> str:
    """Return a thought in an encoding that clients send back as it is."""
    return _SEALED + base64.b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def unsealed(given: Any) -> str:
    """Return the thought in an encoding; none if it was not made here."""
    try:
        return base64.b64decode(given.removeprefix(_SEALED)).decode() if given.startswith(_SEALED) else ""
    except (AttributeError, ValueError):
        return ""


class ResponseItems:
    """The items of one response; takes the text in pieces and returns events for what is new.

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
        calls: Mapping[str, dict[str, Any]],
        *,
        has_summaries: bool,
        seals: bool,
    ) -> None:
        self._name, self._head, self._generation = name, head, generation
        self._calls, self._has_summaries, self._seals = calls, has_summaries, seals
        self._status = "in_progress"
        self._items: list[dict[str, Any]] = []
        self._open: int | str | None = None  # the index of the call that the open item is, or the item's type
        self._texts: list[str] = []  # the parts of the open item's text
        self._numbers = itertools.count()

    def begin(self) -> list[Event]:
        return [self._state("response.created"), self._state("response.in_progress")]

    def wait(self) -> list[Event]:
        return [self._state("response.in_progress")]

    def push(self, deltas: Sequence[OutputDelta], chunk: TextChunk) -> list[Event]:
        """Add more of the response and return its events."""
        events: list[Event] = []
        for delta in deltas:
            text = delta.reasoning or delta.content or delta.arguments
            kind = ("reasoning" if delta.reasoning else "message") if delta.index is None else delta.index
            if kind != self._open and (text or delta.index is not None):
                events += [*self._close("completed"), *self._begin(kind, delta)]
            if text:
                self._texts.append(text)
                events += [self._of_text(one, "delta", delta=text) for one in self._texts_of(self._items[-1])]
        return events

    def finish(self, chunk: TextChunk) -> list[Event]:
        """Complete the response and return its last events."""
        is_cut = chunk.finish_reason == "length"
        events = [] if self._items else self._begin("message", OutputDelta())
        self._status = "incomplete" if is_cut else "completed"
        events += self._close(self._status)
        self._head |= self._end() | {"completed_at": None if is_cut else int(time.time())}
        if is_cut:
            self._head["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._state(f"response.{self._status}")]

    def fail(self, error: ApiError) -> list[Event]:
        """End the response with an error and return the last events."""
        events = self._close("incomplete")
        self._status = "failed"
        self._head |= self._end() | {"error": {"code": "server_error", "message": error.plain_message}}
        return [*events, self._state("response.failed")]

    def whole(self) -> dict[str, Any]:
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
        return self._event(kind, response=self.whole())

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, **fields, "sequence_number": next(self._numbers)}

    # -------------------------------------------------------------------------------------- items

    def _begin(self, kind: int | str, delta: OutputDelta) -> list[Event]:
        self._open, self._texts = kind, []
        item: dict[str, Any] = {"type": kind, "role": "assistant", "content": []}
        if kind == "reasoning":
            item = {"type": kind, "summary": [], "content": []}
        elif delta.name is not None:
            fields = self._calls.get(delta.name, {"type": "function_call", "name": delta.name})
            item = {"call_id": delta.id, **fields} | {"input" if "custom" in fields["type"] else "arguments": ""}
        item |= {"id": f"{_IDS[item['type']]}_{self._name}_{len(self._items)}", "status": "in_progress"}
        self._items.append(item)
        events = [self._of_item("response.output_item.added", item=dict(item))]
        return events + [self._of_part(one, "added", "") for one in self._texts_of(item) if one.part]

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        item, text = self._items[-1], "".join(self._texts)
        events = []
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
