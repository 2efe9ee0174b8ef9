"""Continuous batching: which requests run in this step, and which of their known tokens.

There is no prefill and no decode, only tokens to catch up with. A long prompt is read in chunks within
the step's token budget, beside requests that say tokens. If slots run out the newest running request is
put back and read again later.

Sources: iteration-level scheduling, Orca (OSDI 2022); chunked prefill, Sarathi-Serve (OSDI 2024).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from specinfer.model.kv_cache import KVCache
from specinfer.request import Request, Span


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who runs in this step, and whose slots were taken back for it."""

    spans: list[Span]
    preempted: list[Request]


class Scheduler:
    """Decides; it holds no tensors and touches no model.

    Args:
        max_num_seqs: Requests running at once.
        max_num_batched_tokens: Known tokens computed in one step, over all requests; one for each running
            request even if that is more.
    """

    def __init__(self, cache: KVCache, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def schedule(self) -> Schedule:
        """Spans whose known tokens fit into free slots; trees must fit into what is left."""
        spans: list[Span] = []
        preempted: list[Request] = []
        tokens_left = self._max_num_batched_tokens
        slots_left = self._cache.num_free
        for request in list(self.running):
            if request in preempted:
                continue
            # Each that runs gets a token at least, or the newest would wait for ever.
            count = min(len(request.token_ids) - request.num_computed, max(tokens_left, 1))
            while count > slots_left:
                newest = self.running[-1]
                slots_left += self._put_back(newest)
                preempted.append(newest)
                if newest is request:
                    break
            else:
                spans.append(Span(request, request.num_computed, request.num_computed + count))
                tokens_left -= count
                slots_left -= count
        if not preempted:
            spans += self._admit(tokens_left, slots_left)
        return Schedule(spans, preempted)

    def _admit(self, tokens_left: int, slots_left: int) -> Iterator[Span]:
        while self.waiting and tokens_left > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            known = len(request.token_ids)
            if known > slots_left:  # reading half a prompt only to be put back helps nobody
                return
            self.running.append(self.waiting.popleft())
            count = min(known, tokens_left)
            tokens_left -= count
            slots_left -= known
            yield Span(request, 0, count)

    def _put_back(self, request: Request) -> int:
        """Back to the head of the queue; the number of slots given back."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        before = self._cache.num_free
        self._cache.free(request.request_id)
        request.num_computed = 0
        return self._cache.num_free - before

    def remove(self, request: Request) -> None:
        """The request ended, wherever it stands."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._cache.free(request.request_id)
