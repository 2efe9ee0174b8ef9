"""Generation: what a caller of `AsyncLLM` holds of one prompt while its outputs grow."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from specinfer.outputs import OutputCursor, RequestOutput, TextChunk
from specinfer.prompts import Job
from specinfer.request import Request


class Generation:
    """One prompt's outputs as they grow: iterate over it for `TextChunk`s; leaving early ends its requests."""

    def __init__(self, job: Job, end: "Callable[[Generation], None]") -> None:
        self.job = job
        self._end = end
        self._cursors = {request.request_id: OutputCursor(request, i) for i, request in enumerate(job.requests)}
        self._chunks: dict[int, list[TextChunk]] = {}  # by output; what its reader has not taken yet is joined
        self._arrived = asyncio.Event()
        self._num_open = len(job.requests)

    @property
    def request_id(self) -> str:
        return self.job.request_id

    @property
    def requests(self) -> Sequence[Request]:
        return self.job.requests

    @property
    def has_ended(self) -> bool:
        """Whether every output has said its last."""
        return self._num_open == 0

    @property
    def failed(self) -> Request | None:
        """One of its requests that ended with an error."""
        return next((request for request in self.requests if request.error is not None), None)

    def output(self) -> RequestOutput:
        """All outputs, once they have ended."""
        return self.job.output()

    def advance(self, request: Request) -> TextChunk:
        """What a request said since the last call; in the engine's thread."""
        return self._cursors[request.request_id].advance()

    def put(self, chunk: TextChunk) -> None:
        """Hands a chunk to the reader; in the event loop."""
        self._chunks.setdefault(chunk.index, []).append(chunk)
        self._num_open -= chunk.finish_reason is not None
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self._read()

    async def _read(self) -> AsyncIterator[TextChunk]:
        try:
            while self._num_open or self._chunks:
                await self._arrived.wait()
                self._arrived.clear()
                while self._chunks:
                    yield TextChunk.joined(self._chunks.pop(next(iter(self._chunks))))
        finally:
            self.close()

    async def finish(self) -> RequestOutput:
        """Waits for the end; all outputs."""
        async for _ in self:
            pass
        return self.output()

    def close(self) -> None:
        """Ends what is not finished: nobody reads it any more."""
        self._end(self)
