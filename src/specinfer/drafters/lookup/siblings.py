"""Outputs of running requests with one prompt, which are a source for one another: samples of a prompt, rollouts."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from specinfer.core.request import Request
from specinfer.drafters.lookup.suffix_automaton import SuffixAutomaton
from specinfer.drafters.lookup.suffix_growth import Match

MAX_MATCH = 32  # length of the longest match; more tokens that agree do not make samples agree more
MAX_SEEDS = 1024  # of a group; further requests begin another one
_MAX_SHARE = 4  # a group that has this part of all tokens takes no further requests, and so goes when its last one ends


@dataclass(slots=True)
class _Member:
    """A request of a group, with the number of its output tokens that were read, and the state after them."""

    request: Request
    num_read: int = 0
    state: int = 0


@dataclass(slots=True, eq=False)
class _Group:
    """Requests with one prompt, and what they have generated.

    Attributes:
        key: Tenant, cache salt and prompt.
        members: Requests that run, by id.
        seeds: Seeds of sampled requests that are or were members, with their ids.
        text: All outputs, those of members that have ended too; nothing is read for a single member.
    """

    key: Hashable
    members: dict[str, _Member] = field(default_factory=dict)
    seeds: dict[int, str] = field(default_factory=dict)
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)


class Siblings:
    """The outputs of running requests, by tenant, cache salt and prompt; those of a group go when its last one ends.

    Args:
        name: Name of draft tokens from there.
        max_tokens: Largest number of tokens that are stored for all prompts together.
    """

    def __init__(self, name: str, max_tokens: int) -> None:
        self._name, self._max_tokens = name, max_tokens
        self._groups: list[_Group] = []
        self._open: dict[Hashable, _Group] = {}  # the newest of each key
        self._group_of: dict[str, _Group] = {}

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are stored."""
        return sum(group.text.num_tokens for group in self._groups)

    def join(self, request: Request) -> None:
        """Add a request that begins, unless it shares nothing or has the noise of another one.

        Rules that draw need draft tokens that do not depend on the request's own random numbers.
        """
        self.leave(request.request_id)
        if request.cache_salt is None:
            return
        prompt = len(request.prompt_ids), hash(tuple(request.prompt_ids))
        key = request.tenant, request.cache_salt, prompt
        group = self._group(key)
        name = request.request_id
        if not request.params.is_greedy and group.seeds.setdefault(request.seed, name) != name:
            return
        group.members[name] = _Member(request)
        self._group_of[name] = group

    def _group(self, key: Hashable) -> _Group:
        """Return the group that a request joins: the newest one, or another if that has had many requests or tokens."""
        group = self._open.get(key)
        is_open = group is not None and len(group.seeds) < MAX_SEEDS
        if group is None or not is_open or group.text.num_tokens * _MAX_SHARE >= self._max_tokens:
            group = self._open[key] = _Group(key)
            self._groups.append(group)
        return group

    def leave(self, request_id: str) -> None:
        """Remove a request that has ended, and what its group has generated with the last one."""
        group = self._group_of.pop(request_id, None)
        if group is None:
            return
        del group.members[request_id]
        if not group.members:
            self._groups.remove(group)
            if self._open[group.key] is group:
                del self._open[group.key]

    def read(self, num_left: int) -> int:
        """Read new tokens of all members, up to a number, and return the number of tokens read."""
        num_left = most = max(min(num_left, self._max_tokens - self.num_tokens), 0)
        for group in self._groups:
            for member in group.members.values() if len(group.members) > 1 else ():
                start = len(member.request.prompt_ids) + member.num_read
                new_tokens = member.request.token_ids[start : start + num_left]
                group.text.last = member.state
                group.text.extend(new_tokens)
                member.state = group.text.last
                member.num_read += len(new_tokens)
                num_left -= len(new_tokens)
        return most - num_left

    def match(self, request: Request) -> Match | None:
        """Return the end of a request's output in what its siblings have generated, or None if it is not there."""
        group = self._group_of.get(request.request_id)
        member = None if group is None else group.members[request.request_id]
        if group is None or member is None or not member.state or member.num_read < request.num_output:
            return None
        text = group.text
        return Match(text, member.state, min(text.lengths[member.state], MAX_MATCH), self._name)
