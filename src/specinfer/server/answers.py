"""What endpoints answer with, whole or as a stream of events; choices and usage of the two that complete.

These say how a choice looks; when something is told, and what stands around it, is decided here.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

import specinfer
from specinfer.generation import Generation
from specinfer.outputs import TextChunk
from specinfer.server.config import ServerConfig
from specinfer.server.disconnect import until_disconnect
from specinfer.server.generations import chunks_of, close_all, finish_all
from specinfer.server.logprobs import TokenTexts
from specinfer.server.protocol import SharedFields
from specinfer.server.state import state_of
from specinfer.server.stream import EventStream, to_json
from specinfer.server.trace import step_record
from specinfer.server.usage import metrics_of, usage_of

# For /openapi.json.
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer as OpenAI's clients expect it; with `stream` as events.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    },
}
_FINGERPRINT = f"specinfer-{specinfer.__version__}"


class Output(Protocol):
    """One output on its way to the client; takes its chunks in order."""

    def piece(self, chunk: TextChunk) -> dict[str, Any] | None:
        """The choice of an event; None: there is nothing to tell yet."""
        ...

    def whole(self, chunk: TextChunk) -> dict[str, Any]:
        """The choice of an answer, from all there is."""
        ...


class Answer(Protocol):
    """A request that runs, and how it is told of."""

    @property
    def fields(self) -> SharedFields: ...

    async def whole(self) -> bytes:
        """The answer as JSON, once it is complete.

        Raises:
            ApiError: It failed.
        """
        ...

    def events(self, config: ServerConfig) -> AsyncGenerator[dict[str, Any] | None]:
        """The answer in pieces, as they come; None: nothing came for a while."""
        ...

    def close(self) -> None:
        """Ends what still runs of it."""
        ...


@dataclass(frozen=True, slots=True)
class Choices:
    """An answer of choices, one for each output.

    Attributes:
        name: The request's; `prefix` stands before it.
        kinds: What "object" says: of a whole answer, and of an event.
        outputs: By generation.
        texts: What tokens stand for, if that is to be told.
        once: What is said beside the choices, in a whole answer or in the first event.
        hides_output: The output is no part of the answer: only the prompt was asked about.
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
    created: int = field(default_factory=lambda: int(time.time()))

    def close(self) -> None:
        close_all(self.generations)

    async def whole(self) -> bytes:
        """All outputs as JSON, once they have ended.

        Raises:
            ApiError: One of them failed.
        """
        chunks = await finish_all(self.generations)
        # Log-probabilities and trees can be many, and the event loop must not wait for them.
        return self._tell(chunks) if self.texts is None else await asyncio.to_thread(self._tell, chunks)

    def _tell(self, chunks: Sequence[Sequence[TextChunk]]) -> bytes:
        choices = []
        for outputs, last in zip(self.outputs, chunks, strict=True):
            for output, chunk in zip(outputs, last, strict=True):
                choices.append(output.whole(chunk) | self._trace(chunk))
        end = {"usage": self._usage(), "metrics": metrics_of(self.generations)}
        return to_json(self._head(self.kinds[0]) | {"choices": choices} | end | self.once())

    async def events(self, config: ServerConfig) -> AsyncGenerator[dict[str, Any] | None]:
        """The answer in pieces, as they come; None: nothing came for a while."""
        fields, is_first = self.fields, True
        interval = fields.stream_interval or config.stream_interval
        async for found in chunks_of(self.generations, config.ping_seconds, interval):
            if found is None:
                yield None
                continue
            place, chunk = found
            output = self.outputs[place][chunk.index]
            # The first may tell of a long prompt.
            choice = await asyncio.to_thread(output.piece, chunk) if is_first and self.texts else output.piece(chunk)
            if choice is None:
                continue
            event = self._head(self.kinds[1]) | {"choices": [choice]} | self._trace(chunk)
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

    def _usage(self) -> dict[str, Any]:
        return usage_of(self.generations, hides_output=self.hides_output)

    def _trace(self, chunk: TextChunk) -> dict[str, Any]:
        """The trees behind a chunk, and who guessed each of its tokens."""
        if not self.fields.trace:
            return {}
        name = str if self.texts is None else self.texts.name
        return {"specinfer": {"steps": [step_record(step, name) for step in chunk.steps], "origins": chunk.origins}}


async def respond(
    request: Request,
    work: Coroutine[Any, Any, Answer],
    headers: Mapping[str, str],
) -> Response:
    """Begins an answer and tells it; a client that goes away ends it.

    Args:
        work: Reads and queues the request: what is wrong with it is told with a status of its own.
    """
    answer = await until_disconnect(request, work)
    if answer.fields.stream:
        return EventStream(answer.events(state_of(request).config), answer.close, headers)
    return Response(await until_disconnect(request, answer.whole()), headers=headers, media_type="application/json")
