"""Responses of the endpoints, whole or as a stream of events: a writer formats them, this module decides when."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.server.auth import route_path
from specinfer.server.config import ServerConfig
from specinfer.server.dialect import Event, dialect_of
from specinfer.server.errors import ApiError, renamed
from specinfer.server.field_checks import with_ignored
from specinfer.server.generations import chunks_of, close_all, finish_all
from specinfer.server.protocol import SharedFields
from specinfer.server.state import state_of
from specinfer.server.stream import EventStream, until_disconnect

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
        names: Patterns of the names of fields in OpenAI's endpoints, and the names in this API.
        fail: Returns the events that end a stream with an error, if it is not the dialect's one event.
        is_slow: Whether a thread formats what may be large, such as log-probabilities and trees.
        returns_progress: Whether the writer's events report how far the prompts are read.
    """

    fields: SharedFields
    generations: Sequence[Generation]
    writer: Writer
    ignored: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
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
    headers = with_ignored(headers, [renamed(name, pending.names) for name in ignored])
    if pending.fields.stream:
        events, dialect = pending.events(state_of(request).config), dialect_of(route_path(request.scope))
        return EventStream(events, pending.close, headers, dialect, pending.fail)
    return Response(await until_disconnect(request, pending.whole()), headers=headers, media_type="application/json")
