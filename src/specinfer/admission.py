"""Places for outputs: which are being read, wait or run, and whether there may be more of them."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager

from specinfer.core.errors import QueueFullError
from specinfer.core.limits import QueueLimits
from specinfer.core.request import Request
from specinfer.core.text import counted
from specinfer.generation import Generation
from specinfer.inputs.jobs import Job
from specinfer.quotas import Quotas


class Admission:
    """The live outputs of all tenants, and the limits on their number.

    All methods belong to one event loop; the engine's thread only looks up generations.

    Args:
        max_num_seqs: Number of outputs that the engine runs at once.
        limits: Limits on those that wait.

    Attributes:
        quotas: Limits of tenants. Each one that is known keeps a share of the queue.
        idle: Set while there are no live outputs.
    """

    def __init__(self, max_num_seqs: int, limits: QueueLimits) -> None:
        self._max_num_seqs, self._limits = max_num_seqs, limits
        self._generations: dict[str, Generation] = {}  # by the ids of their requests
        self._num_reading: Counter[str] = Counter()  # outputs of prompts that are still being read, by tenant
        self.quotas = Quotas()
        self.idle = asyncio.Event()
        self.idle.set()

    # ------------------------------------------------------------------------- live outputs

    @contextmanager
    def reading(self, count: int, tenant: str) -> Iterator[None]:
        """Keep places for outputs whose prompt is being read."""
        self._num_reading[tenant] += count
        self._note_idleness()
        try:
            yield
        finally:
            self._num_reading[tenant] -= count
            self._note_idleness()

    def add(self, generation: Generation) -> None:
        """Add the outputs of a generation that the engine gets."""
        self._generations |= {request.request_id: generation for request in generation.requests}
        self._note_idleness()

    def remove(self, requests: Iterable[Request]) -> None:
        """Remove outputs that have ended, or whose end no engine will report."""
        for request in requests:
            self._generations.pop(request.request_id, None)
        self._note_idleness()

    def generation_of(self, request: Request) -> Generation | None:
        """Return the generation of a request, or None after its end."""
        return self._generations.get(request.request_id)

    @property
    def generations(self) -> Set[Generation]:
        """Generations with live outputs."""
        return set(self._generations.values())

    @property
    def num_live(self) -> int:
        """Number of outputs that are being read, waiting or running."""
        return self._num_reading.total() + len(self._generations)

    def num_live_by_tenant(self) -> Counter[str]:
        """Return the number of outputs of each tenant that are being read, waiting or running."""
        live = self._num_reading.copy()
        live.update(generation.requests[0].tenant for generation in self._generations.values())
        return live

    def _note_idleness(self) -> None:
        if self.num_live:
            self.idle.clear()
        else:
            self.idle.set()

    # ------------------------------------------------------------------------------- limits

    @property
    def capacity(self) -> int:
        """Largest number of outputs that may be read, wait or run at once."""
        return self._max_num_seqs + self._limits.max_num_queued_reqs

    def capacity_of(self, tenant: str) -> int:
        """Return the largest number of outputs that one tenant may have at once."""
        limits = self.quotas.limits_of(tenant)
        num_running = min(limits.max_num_seqs or self._max_num_seqs, self._max_num_seqs)
        if limits.max_num_queued_reqs is None:
            return self.capacity
        return min(num_running + limits.max_num_queued_reqs, self.capacity)

    def check(self, count: int, tenant: str, num_waiting: int) -> None:
        """Check that a tenant may have this many outputs more; `num_waiting` is for the message.

        Raises:
            QuotaError: The tenant has reached one of its own limits.
            QueueFullError: The queue is full. A tenant without any output gets one all the same.
        """
        live = self.num_live_by_tenant()
        self.quotas.check_tokens(tenant)
        self.quotas.check_outputs(tenant, live[tenant], count, self.capacity_of(tenant))
        if count > self.capacity and not live[tenant]:
            count = 1  # more than may ever wait: they are taken from a tenant that has no others
        is_first = tenant in self.quotas.limits and not live[tenant] and count == 1
        if not is_first and live.total() + self._num_kept_from(tenant, live) + count > self.capacity:
            raise QueueFullError(f"the queue is full ({counted(num_waiting, 'request')}); try again later")

    def check_tokens(self, job: Job) -> None:
        """Check that the tokens of a prompt may wait, too.

        Raises:
            QueueFullError: They are too many with those of others.
        """
        limit, waiting = self._limits.max_num_queued_tokens, self._num_waiting_tokens
        added = sum(len(request.prompt_ids) for request in job.requests)
        if limit is not None and waiting and waiting + added > limit:
            raise QueueFullError(f"the queue is full (prompts of {counted(waiting, 'token')}); try again later")

    def _num_kept_from(self, tenant: str, live: Counter[str]) -> int:
        """Return the number of free places kept for other tenants, who share a quarter of the queue."""
        others = [name for name in self.quotas.limits if name != tenant]
        share = self.capacity // (4 * len(self.quotas.limits)) if others else 0
        return sum(max(0, share - live[name]) for name in others)

    @property
    def _num_waiting_tokens(self) -> int:
        return sum(
            len(request.prompt_ids)
            for generation in self.generations
            for request in generation.requests
            if request.num_computed == 0 and not request.is_finished
        )
