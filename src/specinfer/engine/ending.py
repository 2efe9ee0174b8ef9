"""Endings of requests: by their own tokens, by an abort, by a failure, or because no token may follow."""

import logging

from specinfer.core.clock import epoch_seconds
from specinfer.core.errors import WeightsError
from specinfer.core.request import Fault, FinishReason, Request
from specinfer.drafters.base import Drafter
from specinfer.engine.scheduler import Scheduler
from specinfer.verify import NAN, NO_VALID_TOKEN

logger = logging.getLogger(__name__)

_NO_TOKEN_REASONS = {
    NAN: "the model computed values that are not numbers for this request",
    NO_VALID_TOKEN: "no token may follow: the grammar, allowed_token_ids, bad_words and logit_bias together leave none",
}


class Endings:
    """The end of requests: in the scheduler, whose slots they leave, and in the drafter."""

    def __init__(self, scheduler: Scheduler, drafter: Drafter | None) -> None:
        self._scheduler, self._drafter = scheduler, drafter

    def end(self, request: Request, reason: FinishReason | None = None) -> None:
        """End a request in any state; without a reason it has ended by its own tokens."""
        if reason is not None:
            request.finish(reason)
        request.times.finished = epoch_seconds()
        self._scheduler.remove(request)
        self.forget(request)

    def abort(self, request: Request, error: str | None = None, fault: Fault = Fault.BROKEN) -> None:
        """End a request unless it has ended; with an error unless the caller asked for the end."""
        if not request.is_finished:
            request.error, request.fault = error, None if error is None else fault
            self.end(request, FinishReason.ABORT if error is None else FinishReason.ERROR)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request because of an internal error; the others continue."""
        logger.error("request %s failed", request.request_id, exc_info=error)
        why = str(error) if isinstance(error, WeightsError) else type(error).__name__
        self.abort(request, f"the engine failed on this request: {why}")

    def end_without_token(self, request: Request, reason: int) -> None:
        """End a request that no token may follow, for one of the negative token ids of `verify`."""
        error = _NO_TOKEN_REASONS[reason]
        if reason == NO_VALID_TOKEN and request.grammar is not None and request.grammar.is_lost:
            error = "structured_outputs: the grammar became too much work to follow; make it simpler"
        self.abort(request, error, Fault.NO_VALID_TOKEN if reason == NO_VALID_TOKEN else Fault.BROKEN)

    def forget(self, request: Request) -> None:
        """Free what the drafter keeps of a request."""
        request.drafting.is_read = False
        if self._drafter is not None:
            self._drafter.forget(request.request_id)
