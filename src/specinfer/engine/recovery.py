"""Recovery: a step whose pass failed is made up for, so that only a request that is its cause ends."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from specinfer.core.errors import EngineDeadError, WeightsError, first_line
from specinfer.core.request import Request, Span
from specinfer.engine.commit import Committer
from specinfer.engine.ending import Endings
from specinfer.engine.executor import Executor, StepResult
from specinfer.engine.host_executor import HostExecutor
from specinfer.model.graphs.capture import CaptureError

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # consecutive failures of all requests, after which the executor itself is at fault


class Recovery:
    """The commit of results, with recovery from those that are failures.

    Args:
        executors: The engine's executors; one that fails repeatedly on the device is removed.
    """

    def __init__(
        self, executors: list[Executor[Any]], host: HostExecutor, committer: Committer, endings: Endings
    ) -> None:
        self._executors, self._host = executors, host
        self._committer, self._endings = committer, endings
        self._num_failed = Counter[Executor[Any]]()  # steps in a row

    def commit(self, executor: Executor[Any], result: StepResult) -> list[Request]:
        """Commit the result of an executor's step, or recover from its failure.

        Returns:
            The requests that emitted tokens or ended.

        Raises:
            EngineDeadError: A part of the target is lost.
            RuntimeError: Steps fail repeatedly for all requests, so no single request is the cause.
        """
        try:
            requests = self._committer.commit(result)
        except EngineDeadError:
            raise
        except Exception as error:
            if executor is not self._host:
                self._leave(executor, error)
                return []
            return self._recover(result.spans, error)
        self._num_failed[executor] = 0
        return requests

    def _leave(self, executor: Executor[Any], error: Exception) -> None:
        """Let the requests of an executor continue on the host; after repeated failures it gets no more."""
        executor.abandon()
        self._num_failed[executor] += 1
        logger.error("a step on the device failed; its requests go on with host steps", exc_info=error)
        if isinstance(error, CaptureError) or self._num_failed[executor] >= MAX_FAILED_STEPS:
            logger.warning("no more steps are taken on the device: %s", first_line(error))
            self._executors.remove(executor)

    def _recover(self, spans: Sequence[Span], error: Exception) -> list[Request]:
        """Recover from a failed pass on the host; passes begun after it are finished first."""
        self._host.drop(spans)
        if isinstance(error, WeightsError):  # no request is the cause, and each would read the weights again
            for span in spans:
                self._endings.fail(span.request, error)
            return [span.request for span in spans]
        requests = []
        while self._host.num_in_flight:
            requests += self.commit(self._host, self._host.verify())
        return requests + self._step_apart(spans, error)

    def _step_apart(self, spans: Sequence[Span], error: Exception) -> list[Request]:
        """Run each request of a failed pass alone and without draft tokens, so that only the faulty one ends."""
        logger.error("a pass of %d requests failed; each is tried alone", len(spans), exc_info=error)
        num_failed = 0
        for span in spans:
            if span.request.is_finished or span.request.num_computed != span.start:
                continue  # it has received its tokens; the failure came later
            result = self._host.run_alone(span)
            try:
                if result.error is not None:
                    raise result.error
                self._committer.store(result.outcomes)
            except EngineDeadError:
                raise
            except Exception as alone:
                num_failed += 1
                self._host.drop([span])
                self._endings.fail(span.request, alone)
        self._num_failed[self._host] = self._num_failed[self._host] + 1 if num_failed == len(spans) else 0
        if self._num_failed[self._host] >= MAX_FAILED_STEPS:
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps in a row failed for every request") from error
        return [span.request for span in spans]
