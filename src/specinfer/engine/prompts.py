"""Prompts of a step: which waiting requests may begin, and how many of their tokens each request computes.

A prompt is long if a whole step cannot read it. Two long prompts are read at a time. Others wait, and short ones go
past them, as far as the step has tokens left: `token_shares` gives half of a step to the prompt that has been read
longest, and the rest to the shortest first. Each tenant has room of its own, and its part of a step (`fair_steps`).
A request waits for a running one whose computed prefix it can share (`is_being_computed`).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from specinfer.core.request import Request
from specinfer.policy.slo_planner import SLOPlanner

_MAX_LOOKED_UP = 4  # long prompts without room whose cached prefixes are looked up in a step, as the rest may be short


class PromptRooms:
    """The room of each tenant in one step. That others read long prompts keeps nobody waiting.

    Args:
        running: Requests that run, the oldest first.
        max_tokens: Token budget of the step.
    """

    def __init__(self, running: Iterable[Request], max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._running = defaultdict[str, list[Request]](list)
        for request in running:
            self._running[request.tenant].append(request)
        self._rooms: dict[str, PromptRoom] = {}

    def of_tenant(self, tenant: str) -> "PromptRoom":
        if tenant not in self._rooms:
            self._rooms[tenant] = PromptRoom(self._running[tenant], self._max_tokens)
        return self._rooms[tenant]


class PromptRoom:
    """Room of one step for the prompts of further requests of a tenant, considered in the order of the queue.

    Args:
        running: Requests of the tenant that run, the oldest first.
        max_tokens: Token budget of the step.
    """

    def __init__(self, running: Iterable[Request], max_tokens: int) -> None:
        counts = [request.num_unread for request in running]
        self._max_tokens = max_tokens
        self._unread = [count for count in counts if count > 1]
        self._num_free = max_tokens - len(counts) + len(self._unread)
        self._num_looked_up = 0
        self._passed: int | None = None  # the priority of the first prompt without room

    @property
    def is_empty(self) -> bool:
        """True if no tokens are left for a prompt of any length."""
        left = self._num_free - sum(count for count in self._unread[1:] if count <= self._max_tokens)
        left -= min(self._unread[0], left // 2) if self._unread else 0
        return left <= 0

    def may_look_up(self, request: Request) -> bool:
        """Return whether a request may have room: it goes past none with a better priority."""
        if self._passed is not None and request.priority > self._passed:
            return False
        return self._num_looked_up < _MAX_LOOKED_UP or self._has_room(request)

    def offer(self, request: Request) -> bool:
        """Return whether there is room for a request that has been given its cached prefix, and note if there is none.

        The caller has made sure that the room is not empty.
        """
        if self._has_room(request):
            return True
        self._num_looked_up += 1
        self._passed = request.priority if self._passed is None else self._passed
        return False

    def take(self, request: Request) -> None:
        """Use the room for a request."""
        self._unread.append(request.num_unread)

    def _has_room(self, request: Request) -> bool:
        is_long = request.num_unread > self._max_tokens
        return not is_long or all(count <= self._max_tokens for count in self._unread[1:])


def token_shares(
    group: Sequence[Request], max_tokens: int, max_prompt_logprobs: int, planner: SLOPlanner | None
) -> list[int]:
    """Return the number of known tokens that each request of a group computes in a step.

    Decoding requests compute one. Half of the remaining budget is for the request that has been prefilling longest,
    so that a long prompt makes progress. The other half goes to the shortest remainders, so that they need not wait
    for it. Each request gets at least one token, because it could starve otherwise.

    Args:
        group: Requests, the oldest first.
        max_tokens: Budget of the step; each request has one token even if that is more.
        max_prompt_logprobs: Tokens of prompts whose log-probabilities are returned.
        planner: Limit by latency targets, or None.
    """
    shares = [1] * len(group)
    tokens_left, logprobs_left = max(max_tokens - len(shares), 0), max_prompt_logprobs
    unread = [request.num_unread - 1 for request in group]
    readers = [i for i, count in enumerate(unread) if count]  # oldest first
    if readers and planner is not None:
        decoding = [request for request, count in zip(group, unread, strict=True) if not count]
        tokens_left = planner.max_tokens(decoding, {group[i]: unread[i] for i in readers}, tokens_left)
    firsts = [(i, tokens_left // 2) for i in readers[:1]]
    for i, most in [*firsts, *((i, tokens_left) for i in sorted(readers, key=lambda i: (group[i].due, unread[i])))]:
        count = min(unread[i], most, tokens_left)
        if group[i].params.prompt_logprobs is not None:
            count = min(count, logprobs_left)
            logprobs_left -= count
        shares[i] += count
        unread[i] -= count
        tokens_left -= count
    return shares


WORTH_WAITING = 32  # tokens: a request waits for another one to compute this many that it can share


def is_being_computed(request: Request, running: Iterable[Request], *, keeps_prefixes: bool) -> bool:
    """Return whether a running request is computing a prefix, or log-probabilities, that this one could share.

    Args:
        keeps_prefixes: Whether the cache lets requests share prefixes.
    """
    if request.lacks_prompt_logprobs:
        sharers = [other for other in running if other.prompt_logprobs is request.prompt_logprobs]
    else:
        sharers = list(running) if keeps_prefixes else []
    return any(_computes_beginning(other, request) for other in sharers)


def _computes_beginning(other: Request, request: Request) -> bool:
    """Return whether the first request is computing a part of its prompt that begins the second request too."""
    end = other.num_computed + WORTH_WAITING
    return (
        other.cache_salt == request.cache_salt
        and other.num_computed < len(other.prompt_ids)
        and len(other.token_ids) >= end < len(request.token_ids)
        and other.token_ids[:end] == request.token_ids[:end]
    )
