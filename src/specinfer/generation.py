"""Generation: an `AsyncLLM` caller's handle on one prompt while its outputs grow."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace

from specinfer.core.outputs import CompletionOutput, OutputCursor, RequestOutput, TextChunk
from specinfer.core.request import Request
from specinfer.core.sampling import RequestOutputKind
from specinfer.inputs.jobs import Job


class Generation:
    """The growing outputs of one prompt. Iterate over it for `TextChunk`s; leaving early ends its requests."""

    def __init__(self, job: Job, end: "Callable[[Generation], None]") -> None:
        self.job = job
        self._end = end
        self._cursors = {request.request_id: OutputCursor(request, i) for i, request in enumerate(job.requests)}
        self._chunks: dict[int, list[TextChunk]] = {}  # by output; chunks that the reader has not taken yet are joined
        self._arrived = asyncio.Event()
        self._num_open = len(job.requests)

    @property
    def request_id(self) -> str:
        return self.job.request_id

    @property
    def requests(self) -> Sequence[Request]:
        return self.job.requests

    @property
    def ignored(self) -> Sequence[str]:
        """Fields of the constraint on its outputs that no grammar can enforce, and that are left to the model."""
        grammar = self.requests[0].grammar
        return () if grammar is None else grammar.ignored

    @property
    def has_ended(self) -> bool:
        """True if every output has delivered its last chunk."""
        return self._num_open == 0

    @property
    def failed(self) -> Request | None:
        """One of its requests that ended with an error, if there is one."""
        return next((request for request in self.requests if request.error is not None), None)

    @property
    def num_prompt_computed(self) -> int:
        """Number of prompt tokens that are computed so far, with cached ones."""
        return max(request.num_prompt_computed for request in self.requests)

    def output(self) -> RequestOutput:
        """Return all outputs, once they have ended."""
        return self.job.output()

    def advance(self, request: Request) -> TextChunk:
        """Return the chunk of tokens that a request emitted since the last call. Called in the engine's thread."""
        return self._cursors[request.request_id].advance()

    def put(self, chunk: TextChunk) -> None:
        """Pass a chunk to the reader. Called in the event loop."""
        self._chunks.setdefault(chunk.index, []).append(chunk)
        self._num_open -= chunk.finish_reason is not None
        self._arrived.set()

    def announce(self, arrived: asyncio.Event) -> None:
        """Set this event, which other generations may share, whenever there is something to take."""
        self._arrived = arrived
        if self._chunks:
            arrived.set()

    @property
    def has_more(self) -> bool:
        """True until the last chunk of every output has been taken."""
        return bool(self._num_open or self._chunks)

    def take(self) -> list[TextChunk]:
        """Return what has arrived, one chunk for each output that has some."""
        chunks = [TextChunk.joined(each) for each in self._chunks.values()]
        self._chunks.clear()
        return chunks

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self._read()

    async def _read(self) -> AsyncIterator[TextChunk]:
        try:
            while self.has_more:
                for chunk in await self._next():
                    yield chunk
        finally:
            self.close()

    async def _next(self) -> list[TextChunk]:
        """Wait for something to take, and return it."""
        await self._arrived.wait()
        self._arrived.clear()
        return self.take()

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of `SamplingParams.output_kind` as they grow. Leaving early ends the requests."""
        first, grown = self.requests[0], dict[int, TextChunk]()
        kind = first.params.output_kind
        try:
            while self.has_more:
                new = {chunk.index: chunk for chunk in await self._next()}
                if kind is RequestOutputKind.FINAL_ONLY and self.has_more:
                    continue
                grown |= {i: TextChunk.joined([grown[i], chunk]) if i in grown else chunk for i, chunk in new.items()}
                shown = new if kind is RequestOutputKind.DELTA else grown
                parts = [CompletionOutput.from_chunk(shown[i], grown[i].logprob) for i in sorted(shown)]
                if not self.has_more:
                    yield self._last(parts if kind is RequestOutputKind.DELTA else None)
                elif parts:
                    yield RequestOutput.growing(self.request_id, self.job.prompt, first, parts)
        finally:
            self.close()

    def _last(self, parts: list[CompletionOutput] | None) -> RequestOutput:
        """Return the finished output, with only these parts of it if there are any."""
        output = self.output()
        output.warn_of_error(stacklevel=3)
        return output if parts is None or output.error is not None else replace(output, outputs=parts)

    async def finish(self) -> RequestOutput:
        """Wait for the end and return all outputs; failures are reported as by `LLM.generate`."""
        async for _ in self:
            pass
        output = self.output()
        output.warn_of_error(stacklevel=2)
        return output

    def close(self) -> None:
        """End the unfinished requests, which have no reader any more."""
        self._end(self)
