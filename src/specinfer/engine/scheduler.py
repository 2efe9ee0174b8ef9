"""Continuous batching: which requests run in this step, and which of their known tokens.

There are no separate prefill and decode phases, only tokens that are not computed yet. A long prompt is computed in
chunks within the step's token budget, together with decoding requests, and short prompts need not wait for long ones
(`PromptRoom`). Tenants have even parts of the seconds of a step (`FairSteps`). If slots run out, the newest running
request of the tenant that runs most is preempted and recomputed later; also if a tenant with no running request waits.
A request that begins like an earlier one starts with that one's keys and values.

If several passes are in flight at once, each has a group of the running requests. A request in a pass in flight is
not scheduled or preempted until the pass has ended, and its slots are not freed even if it ends.

Sources: iteration-level scheduling, Orca (OSDI 2022); chunked prefill, Sarathi-Serve (OSDI 2024).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from specinfer.core.request import FinishReason, Request, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.engine.fair_steps import FairSteps, StepShares
from specinfer.engine.prompts import PromptRooms, is_being_computed
from specinfer.engine.tree_cuts import asked_nodes
from specinfer.engine.turns import GrammarTurns, PassTurns
from specinfer.engine.waiting import WaitingQueue
from specinfer.model.kv_cache import KVCache
from specinfer.policy.slo_planner import SLOPlanner


@dataclass(frozen=True, slots=True)
class Schedule:
    """The spans that run in this step, and the requests preempted for it."""

    spans: list[Span]
    preempted: list[Request]


class Scheduler:
    """The scheduler. It only decides; it has no tensors and no model.

    Args:
        cache: The target's KV cache.
        max_num_seqs: Maximum number of requests that run at once.
        max_num_batched_tokens: Known tokens computed in one step, over all requests; one for each running
            request even if that is more.
        max_num_prompt_logprobs: Maximum number of prompt tokens in one step whose log-probabilities are returned,
            because each needs logits, or None for at most 512.
        max_loras: Maximum number of adapters in a batch.
    """

    def __init__(
        self,
        cache: KVCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_prompt_logprobs: int | None = None,
        max_loras: int = 1,
    ) -> None:
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_prompt_logprobs = _PROMPT_LOGPROBS if max_num_prompt_logprobs is None else max_num_prompt_logprobs
        self._max_loras = max_loras
        self.planner: SLOPlanner | None = None  # limits by latency targets; None without measured costs
        self.waiting = WaitingQueue()
        self.grammar_turns = GrammarTurns()
        self.running: list[Request] = []  # oldest first
        self.turns = PassTurns()
        self.fair = FairSteps(self.waiting, self.turns)
        self.is_prioritized = False  # True if the step scheduled last has first tokens first, and no draft tokens
        self.is_starved = False  # True if requests wait for slots that a pass in flight uses

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of requests that run at once."""
        return self._max_num_seqs

    def plan_with(self, planner: SLOPlanner | None) -> None:
        """Take a planner, and what it knows of the seconds of passes."""
        self.planner = planner
        if planner is not None:
            self.fair.seconds.expect(planner.pass_seconds)

    def add(self, request: Request) -> None:
        request.drafting.num_wanted = asked_nodes(request)
        self.grammar_turns.add(request)
        self.waiting.add(request)

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def schedule(self, num_groups: int = 1) -> Schedule:
        """Return spans whose known tokens fit into the available slots; trees use what is left.

        Args:
            num_groups: Passes that may be in flight at once; this pass gets its part of the running requests.
        """
        self.is_starved = False
        preempted = self._preempt(num_groups)
        if not preempted:
            preempted = self._admit()
        group = self.grammar_turns.choose(self.turns.group(self.running, num_groups))
        shares = self._shares(group)
        self.is_prioritized = shares.is_prioritized
        for request in group:
            request.is_prioritized = request.tenant in shares.firsts
        self.is_starved = self.is_starved or sum(shares.counts) > self._cache.num_available
        if self.is_starved:  # passes in flight have slots for draft tokens too, and free them soon
            return Schedule([], preempted)
        return Schedule([_span(*pair) for pair in zip(group, shares.counts, strict=True) if pair[1]], preempted)

    def schedule_arrivals(self, spans: Sequence[Span], num_guessed: int) -> list[Span]:
        """Return spans of requests that arrived since a pass was scheduled and that it takes too.

        Args:
            spans: The spans of the pass.
            num_guessed: Nodes of its trees.
        """
        num_running = len(self.running)
        self._admit(num_guessed, may_preempt=False)
        if len(self.running) == num_running:
            return []
        arrived = self.grammar_turns.choose(self.running[num_running:])
        group, num_known = [span.request for span in spans], sum(span.end - span.start for span in spans)
        shares = self._shares([*group, *arrived]).counts[len(group) :]
        tokens_left = self._max_num_batched_tokens - num_known
        joined = []
        for request, share in zip(arrived, shares, strict=True):
            count = min(share, tokens_left)
            if count > 0:
                joined.append(_span(request, count))
                tokens_left -= count
        return joined

    def cut(
        self,
        spans: Sequence[Span],
        budgets: Sequence[TreeBudget],
        reading: Sequence[Span] = (),
        num_to_read: Callable[[Request], int] = lambda request: 0,
    ) -> list[TreeBudget]:
        """Return the budgets of these spans' trees, cut to the room of a step, as `FairSteps.cut`."""
        return self.fair.cut(spans, budgets, reading, self.running, num_to_read)

    def charge(self, step: StepRecord, parts: Sequence[tuple[Span, TokenTree | None]]) -> None:
        """Charge the seconds of a step that has ended to tenants, as `FairSteps.charge`."""
        self.fair.charge(step, parts)

    def num_draft_slots(self, spans: Sequence[Span], num_passes: int = 1) -> int:
        """Return the number of slots that draft tokens of a pass over these spans may take.

        Args:
            spans: The spans of the pass.
            num_passes: Passes that begin before this one ends, this one included.
        """
        free = self._cache.num_available - sum(span.end - span.start for span in spans)
        if num_passes > 1 or len(spans) < len(self.running):  # leave slots for other requests in the next pass
            requests = {span.request for span in spans}
            others = [request for request in self.turns.idle(self.running) if request not in requests]
            free -= sum(self._shares(others).counts)
            free -= len(self.turns.in_flight)
            head = next(iter(self.waiting), None)
            if head is not None and len(self.running) < self._max_num_seqs and not self.waiting.is_full(head.tenant):
                wanted = head.num_unread + len(spans)
                free -= wanted if wanted <= free else 0
        return max(free, 0) // num_passes

    def decoding(self) -> list[Request]:
        """Return the decoding requests in no pass: they have output, and only the last token is not computed."""
        return [request for request in self.turns.idle(self.running) if request.num_output and request.num_unread == 1]

    def mark_in_flight(self, spans: Sequence[Span]) -> None:
        """Mark the requests of a pass that begins."""
        self.turns.begin([span.request for span in spans])

    def release(self, spans: Sequence[Span]) -> None:
        """Unmark the requests of a pass that ended, and free the slots of those that ended meanwhile.

        Repeated calls do nothing.
        """
        for request in self.turns.end([span.request for span in spans]):
            if request.is_finished and request not in self.running:
                self._cache.commit(request.request_id, ())
                self._give_back(request)

    def _shares(self, group: Sequence[Request]) -> StepShares:
        """Return the number of known tokens that each request of a group computes."""
        limits = self._max_num_batched_tokens, self._max_num_prompt_logprobs
        return self.fair.shares(group, self.running, *limits, self.planner)

    def _preempt(self, num_groups: int) -> list[Request]:
        """Preempt requests until the tokens of the next pass fit; none while a pass is in flight."""
        preempted: list[Request] = []
        if self.turns.in_flight:
            return preempted
        while sum(self._shares(self.turns.group(self.running, num_groups)).counts) > self._cache.num_available:
            preempted.append(self._newest_of_most(self.running))
            self._put_back(preempted[-1])
        return preempted

    def _newest_of_most(self, requests: Sequence[Request]) -> Request:
        """Return the newest of these running requests whose tenant runs most."""
        return max(reversed(requests), key=lambda request: self.waiting.num_running(request.tenant))

    def _make_way(self, request: Request) -> list[Request]:
        """Preempt one request for a waiting one whose tenant has none running; its victim's tenant keeps one."""
        running = self.waiting.num_running
        rivals = [other for other in self.running if running(other.tenant) > 1]
        if running(request.tenant) or not rivals:
            return []
        idle = [other for other in rivals if other not in self.turns.in_flight]
        if not idle:
            self.is_starved = True  # a pass in flight ends soon
            return []
        victim = self._newest_of_most(idle)
        self._put_back(victim)
        return [victim]

    def _admit(self, num_guessed: int = 0, *, may_preempt: bool = True) -> list[Request]:
        """Admit waiting requests as far as they fit with this many nodes; return those preempted for it."""
        preempted: list[Request] = []
        if not self.waiting:
            return preempted
        if may_preempt and len(self.running) >= self._max_num_seqs:
            head = next(iter(self.waiting))
            if not (self.waiting.is_full(head.tenant) or self._is_leaving(head.request_id)):
                preempted = self._make_way(head)
        idle = self.turns.idle(self.running)
        slots_left = self._cache.num_available - sum(request.num_unread for request in idle)
        slots_left -= len(self.turns.in_flight) + num_guessed
        kept_out = set[str]()
        rooms, blocks_left = PromptRooms(idle, self._max_num_batched_tokens), RESTORED_AT_ONCE
        for request in list(islice(self.waiting, MAX_LOOKED_AT)):
            if len(self.running) >= self._max_num_seqs:
                break
            room = rooms.of_tenant(request.tenant)
            if (
                room.is_empty
                or self.waiting.is_full(request.tenant)
                or request in preempted
                or self._lacks_adapter(request)
            ):
                continue
            if self._is_leaving(request.request_id) or not room.may_look_up(request):
                continue
            if is_being_computed(request, self.running, keeps_prefixes=self._cache.keeps_prefixes):
                continue
            if not self._may_admit(request, kept_out):
                continue
            most = blocks_left if self.running else None  # running requests wait for what is read
            num_read, is_whole = self._cache.restore(request.cache_salt, _reusable(request), most)
            blocks_left = max(blocks_left - num_read, 0)
            if not is_whole:
                continue
            available = self._cache.num_available
            self._attach(request)
            # Cached slots that it shares can no longer be evicted.
            count = request.num_unread + available - self._cache.num_available
            has_room = room.offer(request)
            if not has_room or count > slots_left:  # a prompt that does not fit would be preempted halfway
                self._cache.free(request.request_id)
                request.num_computed = 0
                if has_room:
                    return preempted or (self._make_way(request) if may_preempt else [])
                continue
            self.waiting.take(request)
            self.running.append(request)
            room.take(request)
            slots_left -= count
        return preempted

    def _may_admit(self, request: Request, kept_out: set[str]) -> bool:
        """Return whether no running request would miss its target because of this one; note its tenant otherwise.

        Only targets count of its own tenant, and of tenants that run no more than it would: targets that are spread
        over many outputs of a tenant keep no other one out.
        """
        if self.planner is None:
            return True
        if request.tenant not in kept_out:
            most, running = self.waiting.num_running(request.tenant) + 1, self.waiting.num_running
            rivals = [one for one in self.running if one.tenant == request.tenant or running(one.tenant) <= most]
            if self.planner.may_admit(rivals):
                return True
        kept_out.add(request.tenant)
        return False

    def _lacks_adapter(self, request: Request) -> bool:
        """Return whether a request must wait because the running ones have as many other adapters as a batch may."""
        if request.adapter is None:
            return False
        active = {other.adapter for other in self.running if other.adapter is not None}
        return request.adapter not in active and len(active) >= self._max_loras

    def _attach(self, request: Request) -> None:
        """Start a request with the part of its tokens that is cached."""
        known = self._cache.attach(request.request_id, request.cache_salt, _reusable(request))
        request.num_computed = known
        if request.times.scheduled is None:  # otherwise it finds what it computed itself
            request.num_cached = known

    def _is_leaving(self, request_id: str) -> bool:
        """Return whether an ended request with this id is still in a pass, which writes to its slots."""
        return any(other.request_id == request_id for other in self.turns.in_flight)

    def _put_back(self, request: Request) -> None:
        """Requeue a request at the head; what it computed stays cached until the slots are needed."""
        self.running.remove(request)
        self.turns.forget(request)
        self.waiting.put_back(request)
        self._cache.release(request.request_id, request.cache_salt, request.token_ids)
        request.num_computed = 0

    def keep(self, request: Request, kept: Sequence[int], of: int | None = None) -> None:
        """Commit these of the slots reserved for a request, and free the others, as `KVCache.commit` does."""
        self._cache.commit(request.request_id, kept, of)
        request.num_computed = len(self._cache.slots(request.request_id))
        self._cache.save(request.request_id, request.cache_salt, request.token_ids)

    def share(self, request: Request) -> None:
        """Share the computed tokens of a request as a prefix."""
        self._cache.share(request.request_id, request.cache_salt, request.token_ids)

    def remove(self, request: Request) -> None:
        """Remove an ended request in any state; what it computed stays cached for others unless it failed."""
        if request in self.running:
            self.running.remove(request)
        elif not self.waiting.take(request):
            return
        self.waiting.leave(request)
        self.turns.forget(request)
        if request not in self.turns.in_flight:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        if request.finish_reason is FinishReason.ERROR:
            self._cache.free(request.request_id)
        else:
            self._cache.release(request.request_id, request.cache_salt, request.token_ids)


def _span(request: Request, count: int) -> Span:
    """Return the span of a request's next known tokens."""
    return Span(request, request.num_computed, request.num_computed + count)


def _reusable(request: Request) -> list[int]:
    """Return the tokens of a request that need not be computed if they are cached.

    The last token is always computed, because its logits are needed, and so is what has no log-probabilities yet.
    """
    end = len(request.prompt_logprobs) - 1 if request.lacks_prompt_logprobs else len(request.token_ids) - 1
    return request.token_ids[: max(end, 0)]


RESTORED_AT_ONCE = 4  # blocks of a prefix that are read from the disk while other requests wait for a step
MAX_LOOKED_AT = 64  # waiting requests examined in one step
_PROMPT_LOGPROBS = 512  # prompt tokens with logits in one step: with a large vocabulary a row takes over a megabyte
