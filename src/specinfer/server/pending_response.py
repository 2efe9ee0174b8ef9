"""Responses of the endpoints, whole or as a stream of events, and the common parts of the two completion endpoints.

An `Output` formats its own choice, and `Items` one output of an API without choices. This module decides when they are
sent, and what surrounds choices.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

import specinfer
from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.inputs.formats.parser import OutputDelta
from specinfer.server.auth import route_path
from specinfer.server.config import ServerConfig
from specinfer.server.custom_tools import Parser
from specinfer.server.dialect import Event, dialect_of, to_json
from specinfer.server.errors import ApiError, as_api_error, renamed
from specinfer.server.field_checks import with_ignored
from specinfer.server.generations import chunks_of, close_all, finish_all, metrics_of, usage_of
from specinfer.server.logprobs import TokenTexts
from specinfer.server.protocol import SharedFields
from specinfer.server.state import state_of
from specinfer.server.stream import EventStream, until_disconnect
from specinfer.server.trace import step_record

logger = logging.getLogger(__name__)

# The description for /openapi.json.
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The response as OpenAI's clients expect it; with `stream` as events.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    },
}
_SILENCE = 30.0  # seconds without an event after which a client may need more than a ping
_PROGRESS_SECONDS = 1.0  # between reports of how far prompts are read
_FINGERPRINT = f"specinfer-{specinfer.__version__}"


class Output(Protocol):
    """A formatter of one output for the client; it takes the output's chunks in order."""

    def pieces(self, chunk: TextChunk) -> list[dict[str, Any]]:
        """Return the choices for events, each of which is one; none if there is nothing to send yet."""

    def whole(self, chunk: TextChunk) -> dict[str, Any]:
        """Return the choice for a whole response, from the complete output."""


class PendingResponse(Protocol):
    """A running request that can be answered whole or as events."""

    @property
    def fields(self) -> SharedFields: ...

    @property
    def ignored(self) -> Sequence[str]:
        """Names of what was ignored when the prompt was read; the header of ignored fields has them, too."""

    @property
    def names(self) -> Mapping[str, str]:
        """Patterns of the names of fields in OpenAI's endpoints, and the names in this API."""

    @property
    def generations(self) -> Sequence[Generation]: ...

    async def whole(self) -> bytes:
        """Return the response as JSON, once it is complete.

        Raises:
            ApiError: The request failed.
        """

    def events(self, config: ServerConfig) -> AsyncGenerator[Event | None]:
        """Yield the response in pieces as they come, or None when nothing has come for a while."""

    def close(self) -> None:
        """End what still runs for this request."""


@dataclass(frozen=True, slots=True)
class ChoicesResponse:
    """A response that consists of choices, one for each output.

    Attributes:
        name: The request's id; `prefix` is put before it.
        kinds: Values of the "object" field: of a whole response, and of an event.
        outputs: The outputs of each generation.
        texts: The texts of tokens, if the response includes them.
        once: Returns the fields that appear once next to the choices, in a whole response or in the first event.
        hides_output: True if the output is not part of the response because only the prompt was asked about.
        returns_progress: Whether events report how far the prompts are read.
    """

    fields: SharedFields
    name: str
    model: str
    prefix: str
    kinds: tuple[str, str]
    generations: Sequence[Generation]
    outputs: Sequence[Sequence[Output]]
    texts: TokenTexts | None = None
    once: Callable[[], dict[str, Any]] = dict
    hides_output: bool = False
    returns_progress: bool = False
    ignored: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def close(self) -> None:
        close_all(self.generations)

    async def whole(self) -> bytes:
        chunks = await finish_all(self.generations)
        # Log-probabilities and trees can be large, so a thread formats them and the event loop does not wait.
        return self._to_json(chunks) if self.texts is None else await asyncio.to_thread(self._to_json, chunks)

    def _to_json(self, chunks: Sequence[Sequence[TextChunk]]) -> bytes:
        choices = []
        for outputs, last in zip(self.outputs, chunks, strict=True):
            for output, chunk in zip(outputs, last, strict=True):
                choices.append(output.whole(chunk) | self._trace(chunk))
        end = {"usage": self._usage(), "metrics": metrics_of(self.generations)} | self.once()
        # One by one: encoding many large ones in a single call would keep Python's lock for seconds.
        encoded = b",".join(map(to_json, choices))
        return to_json(self._head(self.kinds[0]))[:-1] + b',"choices":[' + encoded + b"]," + to_json(end)[1:]

    async def events(self, config: ServerConfig) -> AsyncGenerator[Event | None]:
        fields, is_first, is_reading = self.fields, True, self.returns_progress
        interval = fields.stream_interval or config.stream_interval
        ping_seconds = _PROGRESS_SECONDS if self.returns_progress else config.ping_seconds
        async for found in chunks_of(self.generations, ping_seconds, interval):
            if is_reading and (found is None or self._is_read):
                is_reading = not self._is_read
                yield self._progress()
            elif found is None and config.ping_seconds:
                yield None
            if found is None:
                continue
            place, chunk = found
            output = self.outputs[place][chunk.index]
            # The first event may hold the log-probabilities of a long prompt.
            choices = await asyncio.to_thread(output.pieces, chunk) if is_first and self.texts else output.pieces(chunk)
            for choice in choices:
                event = self._head(self.kinds[1]) | {"choices": [choice]}
                event |= self._trace(chunk) if choice is choices[-1] else {}
                if fields.wants_usage:
                    event["usage"] = self._usage() if fields.wants_usage_always else None
                yield event | self.once() if is_first else event
                is_first = False
        if fields.wants_usage:
            end: dict[str, Any] = {"choices": [], "usage": self._usage(), "metrics": metrics_of(self.generations)}
            yield self._head(self.kinds[1]) | end

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.name}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": _FINGERPRINT,
        }

    @property
    def _is_read(self) -> bool:
        """True if all prompts are computed."""
        return all(one.num_prompt_computed == len(one.requests[0].prompt_ids) for one in self.generations)

    def _progress(self) -> Event:
        """Return an event that reports how far the prompts are read, as llama.cpp's server does."""
        firsts, now = [generation.requests[0] for generation in self.generations], time.time()
        started = min(now if one.scheduled_time is None else one.scheduled_time for one in firsts)
        progress = {
            "total": sum(len(one.prompt_ids) for one in firsts),
            "cache": sum(one.num_cached for one in firsts),
            "processed": sum(generation.num_prompt_computed for generation in self.generations),
            "time_ms": round(1000 * (now - started)),
        }
        kind = self.kinds[1]
        empty = {"text": ""} if kind == "text_completion" else {"delta": {"role": "assistant", "content": None}}
        choice = {"index": 0, **empty, "logprobs": None, "finish_reason": None}
        return self._head(kind) | {"choices": [choice], "prompt_progress": progress}

    def _usage(self) -> dict[str, Any]:
        return usage_of(self.generations, hides_output=self.hides_output)

    def _trace(self, chunk: TextChunk) -> dict[str, Any]:
        """Return the steps' token trees and the drafter that proposed each token of a chunk."""
        if not self.fields.trace:
            return {}
        name = str if self.texts is None else self.texts.name
        return {"specinfer": {"steps": [step_record(step, name) for step in chunk.steps], "origins": chunk.origins}}


class Items(Protocol):
    """A formatter of one output for an API without choices; it takes pieces and returns events for what is new."""

    def begin(self) -> Sequence[Event]: ...

    def wait(self) -> Sequence[Event]:
        """Return an event without content, for clients that give up on streams without events."""

    def push(self, deltas: Sequence[OutputDelta], chunk: TextChunk) -> Sequence[Event]:
        """Add a chunk, which was parsed into these pieces of thoughts, text and calls."""

    def finish(self, chunk: TextChunk) -> Sequence[Event]:
        """Complete the response after its last chunk."""

    def fail(self, error: ApiError) -> Sequence[Event]:
        """End the response with an error."""

    def whole(self) -> Event:
        """Return the complete response."""


@dataclass(frozen=True, slots=True)
class ItemsResponse:
    """A response of one output that `Items` format."""

    fields: SharedFields
    generation: Generation
    items: Items
    parser: Parser
    ignored: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def generations(self) -> Sequence[Generation]:
        return (self.generation,)

    def close(self) -> None:
        self.generation.close()

    async def whole(self) -> bytes:
        ((chunk,),) = await finish_all([self.generation])
        self.items.push(deltas_of(self.parser, chunk), chunk)
        self.items.finish(chunk)
        return to_json(self.items.whole())

    async def events(self, config: ServerConfig) -> AsyncGenerator[Event | None]:
        for event in self.items.begin():
            yield event
        interval, last = self.fields.stream_interval or config.stream_interval, time.monotonic()
        try:
            async for found in chunks_of([self.generation], config.ping_seconds, interval):
                if found is None and time.monotonic() - last < _SILENCE:
                    yield None
                    continue
                last = time.monotonic()
                for event in self.items.wait() if found is None else self._events_of(found[1]):
                    yield event
        except Exception as error:  # the status code has been sent by now
            api_error = as_api_error(error)
            if api_error.status == 500:
                logger.error("a stream ended with an error", exc_info=error)
            for event in self.items.fail(api_error):
                yield event

    def _events_of(self, chunk: TextChunk) -> list[Event]:
        events = list(self.items.push(deltas_of(self.parser, chunk), chunk))
        return events if chunk.finish_reason is None else events + list(self.items.finish(chunk))


def deltas_of(parser: Parser, chunk: TextChunk) -> list[OutputDelta]:
    """Return what a chunk adds to a response."""
    deltas = parser.push(chunk.text)
    return deltas if chunk.finish_reason is None else deltas + parser.finish()


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
    ignored = [name for generation in pending.generations for name in generation.ignored]
    headers = with_ignored(headers, [renamed(name, pending.names) for name in [*pending.ignored, *ignored]])
    if pending.fields.stream:
        dialect = dialect_of(route_path(request.scope))
        return EventStream(pending.events(state_of(request).config), pending.close, headers, dialect)
    return Response(await until_disconnect(request, pending.whole()), headers=headers, media_type="application/json")
