"""Continuous batching: which requests run in this step, and which of their known tokens.

There is no prefill and no decode, only tokens to catch up with. A long prompt is read in chunks within
the step's token budget, beside requests that say tokens. If slots run out the newest running request is
put back and read again later. A request that begins like an earlier one starts with that one's keys and values.

Where several passes are in flight at once, each has a group of the requests that run, and whoever is in one is left
alone until it has landed: not scheduled, not put back, and its slots are not given away even if it ends.

Sources: iteration-level scheduling, Orca (OSDI 2022); chunked prefill, Sarathi-Serve (OSDI 2024).
"""

from collections.abc import Iterator, Sequence
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
        max_num_prompt_logprobs: Prompt tokens in one step whose log-probabilities are returned, since each has logits;
            None for no limit.
    """

    def __init__(
        self, cache: KVCache, max_num_seqs: int, max_num_batched_tokens: int, max_num_prompt_logprobs: int | None = None
    ) -> None:
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_prompt_logprobs = (
            max_num_batched_tokens if max_num_prompt_logprobs is None else max_num_prompt_logprobs
        )
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # oldest first
        self._in_flight: set[Request] = set()  # some of them may have ended
        self._num_begun = 0
        self._turns: dict[str, int] = {}  # of those that run, when they departed last
        self.is_starved = False  # some could not run for want of slots that a pass in flight holds

    @property
    def max_num_seqs(self) -> int:
        """Requests running at once."""
        return self._max_num_seqs

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def schedule(self, num_groups: int = 1) -> Schedule:
        """Spans whose known tokens fit into the slots to be had; trees must fit into what is left.

        Args:
            num_groups: Passes that may be in flight at once; this one gets its part of the requests that run.
        """
        preempted = self._make_room(num_groups)
        if not preempted:
            self._admit()
        group = self._group(num_groups)
        shares = self._shares(group)
        self.is_starved = sum(shares) > self._cache.num_available
        if self.is_starved:  # what is in flight holds guesses, too, and gives them back soon
            return Schedule([], preempted)
        spans = []
        for request, count in zip(group, shares, strict=True):
            spans.append(Span(request, request.num_computed, request.num_computed + count))
            self.waiting.charge(request, count)
        return Schedule(spans, preempted)

    def room_for_guesses(self, spans: Sequence[Span], num_passes: int = 1) -> int:
        """Slots that guesses of a pass over these may take.

        Args:
            num_passes: With this one, that begin before it ends.
        """
        room = self._cache.num_available - sum(span.end - span.start for span in spans)
        if num_passes > 1 or len(spans) < len(self.running):  # guesses must not keep others out of the next pass
            own = {span.request for span in spans}
            room -= sum(self._shares([request for request in self._idle() if request not in own]))
            room -= len(self._in_flight)
            head = next(iter(self.waiting), None)
            if head is not None and len(self.running) < self._max_num_seqs:
                wanted = _num_unread(head) + len(spans)
                room -= wanted if wanted <= room else 0
        return max(room, 0) // num_passes

    def speaking(self) -> list[Request]:
        """Who runs, is in no pass, has said something, and has one token to compute: its last."""
        return [request for request in self._idle() if request.num_output and _num_unread(request) == 1]

    def charge(self, requests: Sequence[Request]) -> None:
        """Each of these, which are in passes that were not scheduled here, computes one more known token."""
        for request in requests:
            self.waiting.charge(request, 1)

    def mark_in_flight(self, spans: Sequence[Span]) -> None:
        """A pass of these begins."""
        self._num_begun += 1
        for span in spans:
            self._in_flight.add(span.request)
            self._turns[span.request.request_id] = self._num_begun

    def release(self, spans: Sequence[Span]) -> None:
        """Their pass has ended; who ended meanwhile gives its slots back. Again is no harm."""
        for request in [span.request for span in spans if span.request in self._in_flight]:
            self._in_flight.remove(request)
            if request.is_finished and request not in self.running:
                self._cache.commit(request.request_id, ())
                self._give_back(request)

    def _idle(self) -> list[Request]:
        """Who runs and is in no pass."""
        return [request for request in self.running if request not in self._in_flight]

    def _group(self, num_groups: int) -> list[Request]:
        """Who is in the next pass: an even part of those that run, first who has been in none for the longest time."""
        idle, most = self._idle(), -(-len(self.running) // num_groups)
        if len(idle) <= most:
            return idle
        chosen = set(sorted(idle, key=lambda request: self._turns.get(request.request_id, 0))[:most])
        return [request for request in idle if request in chosen]

    def _shares(self, group: Sequence[Request]) -> list[int]:
        """How many known tokens each request of a group computes.

        One for those that speak. Of the rest of the budget half is for the one that has been reading longest, so that a
        long prompt gets on, and the other half goes to the shortest remainders, which then need not wait for it. Each
        gets a token at least, or it might wait for ever.
        """
        shares = [1] * len(group)
        tokens_left, told_left = max(self._max_num_batched_tokens - len(shares), 0), self._max_num_prompt_logprobs
        unread = [_num_unread(request) - 1 for request in group]
        readers = [i for i, count in enumerate(unread) if count]  # oldest first
        firsts = [(i, tokens_left // 2) for i in readers[:1]]
        for i, most in [*firsts, *((i, tokens_left) for i in sorted(readers, key=lambda i: unread[i]))]:
            count = min(unread[i], most, tokens_left)
            if group[i].params.prompt_logprobs is not None:
                count = min(count, told_left)
                told_left -= count
            shares[i] += count
            unread[i] -= count
            tokens_left -= count
        return shares

    def _make_room(self, num_groups: int) -> list[Request]:
        """Puts the newest back until the tokens of the next pass fit; nobody as long as one is in flight."""
        preempted: list[Request] = []
        if self._in_flight:
            return preempted
        while sum(self._shares(self._group(num_groups))) > self._cache.num_available:
            preempted.append(self.running[-1])
            self._put_back(self.running[-1])
        return preempted

    def _admit(self) -> None:
        if not self.waiting:
            return
        idle = self._idle()
        slots_left = self._cache.num_available - sum(self._shares(idle)) - len(self._in_flight)
        unread = [_num_unread(request) for request in idle if _num_unread(request) > 1]
        tokens_left = self._max_num_batched_tokens - len(idle) + len(unread) - sum(unread[1:])
        tokens_left -= min(unread[0], tokens_left // 2) if unread else 0  # half is for the one that reads longest
        for request in list(islice(self.waiting, MAX_LOOKED_AT)):
            if tokens_left <= 0 or len(self.running) >= self._max_num_seqs:
                return
            if self._is_being_read(request) or self._is_leaving(request.request_id):
                continue
            available = self._cache.num_available
            self._attach(request)
            slots_left -= available - self._cache.num_available  # what it shares cannot be given up any more
            count = _num_unread(request)
            if count > slots_left:  # reading half a prompt only to be put back helps nobody
                self._cache.free(request.request_id)
                request.num_computed = 0
                return
            self.waiting.take(request)
            self.running.append(request)
            tokens_left -= count
            slots_left -= count

    def _attach(self, request: Request) -> None:
        """Begins a request with what is cached of its tokens."""
        if request.params.prompt_logprobs is not None and not request.num_output:
            return  # what the model says at each token of the prompt is wanted
        # The last token is always computed, since its logits are wanted.
        known = self._cache.attach(request.request_id, request.cache_salt, request.token_ids[:-1])
        request.num_computed = known
        if request.scheduled_time is None:  # else it meets what it computed itself
            request.num_cached = known

    def _is_being_read(self, request: Request) -> bool:
        """Whether a request that runs is just computing a beginning that this one could share."""
        if not self._cache.keeps_prefixes or request.params.prompt_logprobs is not None:
            return False
        return any(_computes_beginning(other, request) for other in self.running)

    def _is_leaving(self, request_id: str) -> bool:
        """Whether the slots of a request of this name that ended are still written to."""
        return any(other.request_id == request_id for other in self._in_flight)

    def _put_back(self, request: Request) -> None:
        """Back to the head of the queue; what it computed is kept as long as nobody needs the room."""
        self.running.remove(request)
        self._turns.pop(request.request_id, None)
        self.waiting.put_back(request)
        self._cache.release(request.request_id, request.cache_salt, request.token_ids)
        request.num_computed = 0

    def remove(self, request: Request) -> None:
        """The request ended, wherever it stands; what it computed is kept for others unless it failed."""
        if request in self.running:
            self.running.remove(request)
        elif not self.waiting.take(request):
            return
        self.waiting.leave(request)
        self._turns.pop(request.request_id, None)
        if request not in self._in_flight:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        if request.finish_reason is FinishReason.ERROR:
            self._cache.free(request.request_id)
        else:
            self._cache.release(request.request_id, request.cache_salt, request.token_ids)


MAX_LOOKED_AT = 64  # of those that wait, in one step
WORTH_WAITING = 32  # tokens: a request waits for others to compute so many that it shares


def _computes_beginning(other: Request, request: Request) -> bool:
    """Whether the first request is reading its prompt, and what it reads next begins the second one too."""
    end = other.num_computed + WORTH_WAITING
    return (
        other.cache_salt == request.cache_salt
        and other.num_computed < len(other.prompt_ids)
        and len(other.token_ids) >= end < len(request.token_ids)
        and other.token_ids[:end] == request.token_ids[:end]
    )


def _num_unread(request: Request) -> int:
    """Known tokens that are not computed yet; one for a request that speaks."""
    return len(request.token_ids) - request.num_computed
