"""Delivery: what a step has emitted, from the engine's thread to the readers in the event loop, in one call."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from specinfer.admission import Admission
from specinfer.core.outputs import TextChunk
from specinfer.core.request import Request
from specinfer.generation import Generation

logger = logging.getLogger(__name__)


class Delivery:
    """Delivers the tokens of the generations that are admitted.

    Attributes:
        loop: The event loop of the readers, set before the engine's thread starts.
        on_end: Functions that are called in the event loop when a generation has ended.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.on_end: list[Callable[[Generation], None]] = []

    def deliver(self, requests: Sequence[Request]) -> None:
        """Deliver what these requests have emitted. Called in the engine's thread."""
        chunks = []
        for request in requests:
            generation = self._admission.generation_of(request)
            if generation is not None:
                chunks.append((request, generation, generation.advance(request)))
        if chunks:
            with suppress(RuntimeError):  # the loop is closed: a hung step ends after all, or nobody awaited the end
                self.loop.call_soon_threadsafe(self._hand_out, chunks)

    def deliver_ends(self) -> None:
        """Deliver the ends of all requests, which have ended with the engine. Called in the engine's thread."""
        # The ends of those that ended in the failed step have not been reported yet.
        self.deliver([request for generation in self._admission.generations for request in generation.requests])

    def _hand_out(self, chunks: Sequence[tuple[Request, Generation, TextChunk]]) -> None:
        for request, generation, chunk in chunks:
            if self._admission.generation_of(request) is None:
                continue  # its end was reported before, or it has no reader
            self._admission.quotas.charge(request.tenant, num_generated_tokens=len(chunk.token_ids))
            if chunk.finish_reason is not None:
                self._admission.remove([request])
            if chunk.text or chunk.token_ids or chunk.steps or chunk.finish_reason is not None:
                generation.put(chunk)
            if generation.has_ended:
                self._note_end(generation)

    def _note_end(self, generation: Generation) -> None:
        for note in self.on_end:
            try:
                note(generation)
            except Exception:  # a failing observer must not stop the delivery of the step's other tokens
                logger.exception("the end of %s could not be noted", generation.request_id)
