"""Continuous batching: which requests run in this step, and which of their known tokens.

There is no prefill and no decode, only tokens to catch up with. A long prompt is read in chunks within
the step's token budget, beside requests that say tokens. If slots run out the newest running request is
put back and read again later. A request that begins like an earlier one starts with that one's keys and values.

Sources: iteration-level scheduling, Orca (OSDI 2022); chunked prefill, Sarathi-Serve (OSDI 2024).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from specinfer.engine.waiting import WaitingQueue
from specinfer.model.kv_cache import KVCache
from specinfer.request import FinishReason, Request, Span


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
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # oldest first

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def schedule(self) -> Schedule:
        """Spans whose known tokens fit into the slots to be had; trees must fit into what is left."""
        spans: list[Span] = []
        preempted: list[Request] = []
        tokens_left = self._max_num_batched_tokens
        slots_left = self._cache.num_available
        shares = self._shares()
        for request in list(self.running):
            if request in preempted:
                continue
            count = shares[request.request_id]
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
        for span in spans:
            self.waiting.charge(span.request, span.end - span.start)
        return Schedule(spans, preempted)

    def _shares(self) -> dict[str, int]:
        """How many known tokens each running request computes.

        One for those that speak. Of the rest of the budget half is for the one that has been reading longest, so that a
        long prompt gets on, and the other half goes to the shortest remainders, which then need not wait for it. Each
        gets a token at least.
        """
        unread = {request.request_id: len(request.token_ids) - request.num_computed for request in self.running}
        readers = [name for name, count in unread.items() if count > 1]  # oldest first
        shares = dict.fromkeys(unread, 1)
        tokens_left = self._max_num_batched_tokens - len(unread)
        for name in readers[:1]:
            shares[name] += max(0, min(unread[name] - 1, tokens_left // 2))
            tokens_left -= shares[name] - 1
        for name in sorted(readers, key=lambda name: unread[name]):
            more = max(0, min(unread[name] - shares[name], tokens_left))
            shares[name] += more
            tokens_left -= more
        return shares

    def _admit(self, tokens_left: int, slots_left: int) -> Iterator[Span]:
        for request in list(islice(self.waiting, MAX_LOOKED_AT)):
            if tokens_left <= 0 or len(self.running) >= self._max_num_seqs:
                return
            if self._is_being_read(request):
                continue
            available = self._cache.num_available
            known = self._attach(request)
            slots_left -= available - self._cache.num_available  # what it shares cannot be given up any more
            unread = len(request.token_ids) - known
            if unread > slots_left:  # reading half a prompt only to be put back helps nobody
                self._cache.free(request.request_id)
                request.num_computed = 0
                return
            self.waiting.take(request)
            self.running.append(request)
            count = min(unread, tokens_left)
            tokens_left -= count
            slots_left -= unread
            yield Span(request, known, known + count)

    def _attach(self, request: Request) -> int:
        """Begins with what is cached of its tokens; how many those are."""
        if request.params.prompt_logprobs is not None and not request.num_output:
            return 0  # what the model says at each token of the prompt is wanted
        # The last token is always computed, since its logits are wanted.
        known = self._cache.attach(request.request_id, request.cache_salt, request.token_ids[:-1])
        request.num_computed = known
        if not request.num_output:
            request.num_cached = known
        return known

    def _is_being_read(self, request: Request) -> bool:
        """Whether a request that runs is just computing a beginning that this one could share."""
        if not self._cache.keeps_prefixes or request.params.prompt_logprobs is not None:
            return False
        return any(
            other.cache_salt == request.cache_salt
            and other.num_computed < len(other.prompt_ids)
            and other.token_ids[: other.num_computed + WORTH_WAITING]
            == request.token_ids[: other.num_computed + WORTH_WAITING]
            and len(request.token_ids) > other.num_computed + WORTH_WAITING
            and len(other.token_ids) >= other.num_computed + WORTH_WAITING
            for other in self.running
        )

    def _put_back(self, request: Request) -> int:
        """Back to the head of the queue; the number of slots that can be had since."""
        self.running.remove(request)
        self.waiting.put_back(request)
        before = self._cache.num_available
        self._cache.release(request.request_id, request.cache_salt, request.token_ids)
        request.num_computed = 0
        return self._cache.num_available - before

    def remove(self, request: Request) -> None:
        """The request ended, wherever it stands; what it computed is kept for others unless it failed."""
        if request in self.running:
            self.running.remove(request)
        elif not self.waiting.take(request):
            return
        self.waiting.leave(request)
        if request.finish_reason is FinishReason.ERROR:
            self._cache.free(request.request_id)
        else:
            self._cache.release(request.request_id, request.cache_salt, request.token_ids)


MAX_LOOKED_AT = 64  # of those that wait, in one step
WORTH_WAITING = 32  # tokens: a request waits for others to compute so many that it shares
