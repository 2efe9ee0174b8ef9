"""A response that is being generated: its items, and the events that report them."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.inputs.formats.parser import OutputDelta
from specinfer.server.errors import ApiError
from specinfer.server.usage import metrics_of, usage_of

Event = dict[str, Any]


class ResponseItems:
    """The items of one response; takes the text in pieces and returns events for what is new.

    Args:
        name: The request's id, which is part of the items' ids.
        head: The fields of the response object, except its status and its output.
    """

    def __init__(self, name: str, head: dict[str, Any], generation: Generation) -> None:
        self._name, self._head, self._generation = name, head, generation
        self._status = "in_progress"
        self._items: list[dict[str, Any]] = []
        self._call: int | None = None  # the index of the call that the open item is, or None for a message
        self._is_open = False
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
            if not self._is_open or delta.index != self._call:
                events += self._close("completed") + self._open(delta)
            text = delta.content if delta.index is None else delta.arguments
            if text:
                self._texts.append(text)
                events.append(self._delta(text))
        return events

    def finish(self, chunk: TextChunk) -> list[Event]:
        """Complete the response and return its last events."""
        is_cut = chunk.finish_reason == "length"
        events: list[Event] = []
        if not self._items and not self._is_open:
            events += self._open(OutputDelta())
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

    def _open(self, delta: OutputDelta) -> list[Event]:
        place = len(self._items)
        self._call, self._is_open, self._texts = delta.index, True, []
        if delta.index is None:
            item: dict[str, Any] = {
                "id": f"msg_{self._name}_{place}",
                "type": "message",
                "role": "assistant",
                "content": [],
            }
        else:
            item = {"id": f"fc_{self._name}_{place}", "type": "function_call", "call_id": delta.id}
            item |= {"name": delta.name, "arguments": ""}
        item["status"] = "in_progress"
        self._items.append(item)
        events = [self._event("response.output_item.added", output_index=place, item=dict(item))]
        if delta.index is None:
            events.append(self._of_part("response.content_part.added", part=_part("")))
        return events

    def _delta(self, text: str) -> Event:
        if self._call is None:
            return self._of_part("response.output_text.delta", delta=text, logprobs=[])
        return self._of_item("response.function_call_arguments.delta", delta=text)

    def _close(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self._items[-1], "".join(self._texts)
        if self._call is None:
            events = [
                self._of_part("response.output_text.done", text=text, logprobs=[]),
                self._of_part("response.content_part.done", part=_part(text)),
            ]
            item |= {"content": [_part(text)], "status": status}
        else:
            name = item["name"]
            events = [self._of_item("response.function_call_arguments.done", name=name, arguments=text)]
            item |= {"arguments": text, "status": status}
        done = self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))
        return [*events, done]

    def _of_item(self, kind: str, **fields: Any) -> Event:
        place = len(self._items) - 1
        return self._event(kind, item_id=self._items[place]["id"], output_index=place, **fields)

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
