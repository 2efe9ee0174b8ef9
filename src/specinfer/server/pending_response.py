"""Responses of the endpoints, whole or as a stream of events: a writer formats them, this module decides when.

`Choices` is the writer of the two completion endpoints, whose responses have a choice for each output.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

import specinfer
from specinfer.core.clock import epoch_seconds
from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.server.auth import route_path
from specinfer.server.call import Call
from specinfer.server.config import ServerConfig
from specinfer.server.dialects import Event, dialect_of, to_json
from specinfer.server.errors import ApiError
from specinfer.server.field_checks import with_ignored
from specinfer.server.generations import chunks_of, close_all, finish_all, metrics_of, usage_of
from specinfer.server.logprobs import TokenTexts
from specinfer.server.protocol import SharedFields
from specinfer.server.state import state_of
from specinfer.server.stream import EventStream, until_disconnect
from specinfer.server.trace import step_record

# The description for /openapi.json.
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The response as OpenAI's clients expect it; with `stream` as events.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    },
}
_SILENCE = 30.0  # seconds without an event after which a client may need more than a ping
_PROGRESS_SECONDS = 1.0  # between reports of how far prompts are read


class Writer(Protocol):
    """A writer of one response in the format of an API."""

    def begin(self) -> Sequence[Event]:
        """Return the events before the first chunk."""

    def wait(self) -> Sequence[Event]:
        """Return an event without content, for clients that give up on streams without events."""

    def write(self, chunk: TextChunk, place: int = 0) -> Sequence[Event]:
        """Return the events for a chunk of the generation at this place."""

    def whole(self, chunks: Sequence[Sequence[TextChunk]]) -> bytes:
        """Return the response as JSON, from the complete outputs of each generation."""


@dataclass(frozen=True, slots=True)
class PendingResponse:
    """A running request that can be answered whole or as events.

    Attributes:
        ignored: Names of what was ignored when the prompt was read; the header of ignored fields has them, too.
        fail: Returns the events that end a stream with an error, if it is not the dialect's one event.
        is_slow: Whether a thread formats what may be large, such as log-probabilities and trees.
        returns_progress: Whether the writer's events report how far the prompts are read.
    """

    fields: SharedFields
    generations: Sequence[Generation]
    writer: Writer
    ignored: Sequence[str] = ()
    fail: Callable[[ApiError], Sequence[Event]] | None = None
    is_slow: bool = False
    returns_progress: bool = False

    async def whole(self) -> bytes:
        """Return the response as JSON, once it is complete.

        Raises:
            ApiError: The request failed.
        """
        chunks = await finish_all(self.generations)
        return await asyncio.to_thread(self.writer.whole, chunks) if self.is_slow else self.writer.whole(chunks)

    async def events(self, config: ServerConfig) -> AsyncGenerator[Event | None]:
        """Yield the response in pieces as they come, or None when nothing has come for a while."""
        writer, is_begun, last = self.writer, False, time.monotonic()
        for event in writer.begin():
            yield event
        interval = self.fields.stream_interval or config.stream_interval
        pause = _PROGRESS_SECONDS if self.returns_progress else config.ping_seconds
        patience = 0.0 if self.returns_progress else _SILENCE
        async for arrived in chunks_of(self.generations, pause, interval):
            if arrived is not None:
                place, chunk = arrived
                # The first events may hold the log-probabilities of a long prompt.
                is_slow = self.is_slow and not is_begun
                events = await asyncio.to_thread(writer.write, chunk, place) if is_slow else writer.write(chunk, place)
                is_begun, last = is_begun or bool(events), time.monotonic()
            else:
                events = writer.wait() if time.monotonic() - last >= patience else ()
                last = time.monotonic() if events else last
            for event in events:
                yield event
            if arrived is None and not events and config.ping_seconds:
                yield None

    def close(self) -> None:
        """End what still runs for this request."""
        close_all(self.generations)


async def respond(
    request: Request,
    work: Coroutine[Any, Any, PendingResponse],
    headers: Mapping[str, str],
) -> Response:
    """Run a request and return its response; the request ends early if the client disconnects.

    Args:
        work: Reads and queues the request. It runs before the response starts, so its errors get their own status code.
    """
    pending = await until_disconnect(request, work)
    ignored = [*pending.ignored, *(name for generation in pending.generations for name in generation.ignored)]
    dialect = dialect_of(route_path(request.scope))
    headers = with_ignored(headers, map(dialect.renamed, ignored))
    if pending.fields.stream:
        events = pending.events(state_of(request).config)
        return EventStream(events, pending.close, headers, dialect, pending.fail)
    return Response(await until_disconnect(request, pending.whole()), headers=headers, media_type="application/json")


_FINGERPRINT = f"specinfer-{specinfer.__version__}"


class Output(Protocol):
    """A formatter of one output for the client; it takes the output's chunks in order."""

    def pieces(self, chunk: TextChunk) -> list[dict[str, Any]]:
        """Return the choices for events, each of which is one; none if there is nothing to send yet."""

    def whole(self, chunk: TextChunk) -> dict[str, Any]:
        """Return the choice for a whole response, from the complete output."""


class Choices:
    """The writer of a response with choices.

    Args:
        prefix: Put before the request's id.
        kinds: Values of the "object" field: of a whole response, and of an event.
        outputs: The outputs of each generation.
        texts: The texts of tokens, if the response includes them.
        once: Returns the fields that appear once next to the choices, in a whole response or in the first event.
        hides_output: True if the output is not part of the response because only the prompt was asked about.
        returns_progress: Whether events report how far the prompts are read.
    """

    def __init__(
        self,
        call: Call,
        prefix: str,
        kinds: tuple[str, str],
        generations: Sequence[Generation],
        outputs: Sequence[Sequence[Output]],
        texts: TokenTexts | None,
        *,
        once: Callable[[], dict[str, Any]] = dict,
        hides_output: bool = False,
        returns_progress: bool = False,
    ) -> None:
        self._fields, self._kind_of_whole, self._kind = call.fields, *kinds
        self._generations, self._outputs, self._texts = generations, outputs, texts
        self._once, self._hides_output = once, hides_output
        self._is_first, self._is_reading = True, returns_progress
        self._returns_progress = returns_progress
        self._num_open = sum(map(len, outputs))
        self._head = {
            "id": f"{prefix}-{call.name}",
            "object": self._kind,
            "created": int(time.time()),
            "model": call.model,
            "system_fingerprint": _FINGERPRINT,
        }

    def response(self, ignored: Sequence[str] = ()) -> PendingResponse:
        """Return the response that this writer formats."""
        return PendingResponse(
            self._fields,
            self._generations,
            self,
            ignored,
            is_slow=self._texts is not None,
            returns_progress=self._returns_progress,
        )

    def begin(self) -> list[Event]:
        return []

    def wait(self) -> list[Event]:
        return self._progress()

    def write(self, chunk: TextChunk, place: int = 0) -> list[Event]:
        events = self._progress() if self._is_read else []
        choices, fields = self._outputs[place][chunk.index].pieces(chunk), self._fields
        for choice in choices:
            event = self._head | {"choices": [choice]}
            event |= self._trace(chunk) if choice is choices[-1] else {}
            if fields.wants_usage:
                event["usage"] = self._usage() if fields.wants_usage_always else None
            events.append(event | self._once() if self._is_first else event)
            self._is_first = False
        self._num_open -= chunk.finish_reason is not None
        if fields.wants_usage and not self._num_open:
            end: dict[str, Any] = {"choices": [], "usage": self._usage(), "metrics": metrics_of(self._generations)}
            events.append(self._head | end)
        return events

    def whole(self, chunks: Sequence[Sequence[TextChunk]]) -> bytes:
        choices = []
        for outputs, ended in zip(self._outputs, chunks, strict=True):
            for output, chunk in zip(outputs, ended, strict=True):
                choices.append(output.whole(chunk) | self._trace(chunk))
        end = {"usage": self._usage(), "metrics": metrics_of(self._generations)} | self._once()
        # One by one: encoding many large ones in a single call would keep Python's lock for seconds.
        encoded = b",".join(map(to_json, choices))
        head = to_json(self._head | {"object": self._kind_of_whole})
        return head[:-1] + b',"choices":[' + encoded + b"]," + to_json(end)[1:]

    @property
    def _is_read(self) -> bool:
        """True if all prompts are computed."""
        return all(
            generation.num_prompt_computed == len(generation.requests[0].prompt_ids) for generation in self._generations
        )

    def _progress(self) -> list[Event]:
        """Return an event that reports how far the prompts are read, as llama.cpp's server does; none afterwards."""
        if not self._is_reading:
            return []
        self._is_reading = not self._is_read
        firsts, now = [generation.requests[0] for generation in self._generations], epoch_seconds()
        started = min(now if first.times.scheduled is None else first.times.scheduled for first in firsts)
        progress = {
            "total": sum(len(first.prompt_ids) for first in firsts),
            "cache": sum(first.num_cached for first in firsts),
            "processed": sum(generation.num_prompt_computed for generation in self._generations),
            "time_ms": round(1000 * (now - started)),
        }
        is_text = self._kind == "text_completion"
        empty = {"text": ""} if is_text else {"delta": {"role": "assistant", "content": None}}
        choice = {"index": 0, **empty, "logprobs": None, "finish_reason": None}
        return [self._head | {"choices": [choice], "prompt_progress": progress}]

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._generations, hides_output=self._hides_output)

    def _trace(self, chunk: TextChunk) -> dict[str, Any]:
        """Return the steps' token trees and the drafter that proposed each token of a chunk."""
        if not self._fields.trace:
            return {}
        name = str if self._texts is None else self._texts.name
        return {"specinfer": {"steps": [step_record(step, name) for step in chunk.steps], "origins": chunk.origins}}
