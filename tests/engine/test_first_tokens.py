"""Passes that give priority to first tokens."""

from collections.abc import Sequence
from typing import Any

import pytest

from specinfer.core.request import Request
from specinfer.engine.first_tokens import PASSES_PER_TURN, FirstTokens
from tiny import make_request


class _Costs:
    """Passes that take as long as their tokens, and what reading the weights takes beside."""

    def __init__(self, reading: float) -> None:
        self._reading = reading

    def pass_seconds(self, num_tokens: int) -> float:
        return self._reading + num_tokens


COMPUTING, READING = _Costs(0.0), _Costs(1000.0)


def _request(tenant: str, num_unread: int = 1, *, num_output: int = 1) -> Request:
    request: Request = make_request(tenant, range(num_unread), tenant=tenant)
    request.token_ids += [1] * num_output
    request.num_computed = len(request.token_ids) - num_unread
    return request


BUSY = [_request(name) for name in "abc"]


def _chosen(first_tokens: FirstTokens, group: Sequence[Request], costs: Any = COMPUTING) -> list[Request]:
    return first_tokens.choose(list(group), sum(request.num_unread for request in group), costs)


def test_a_first_token_is_computed_alone_where_that_is_much_shorter() -> None:
    first = _request("new", num_output=0)
    first_tokens = FirstTokens()
    assert _chosen(first_tokens, [*BUSY, first]) == [first]
    assert first_tokens.is_prioritized


@pytest.mark.parametrize("costs", [READING, None], ids=["weights decide", "unknown"])
def test_where_a_pass_costs_the_same_anyway_all_run_without_draft_tokens(costs: Any) -> None:
    group = [*BUSY, _request("new", num_output=0)]
    first_tokens = FirstTokens()
    assert _chosen(first_tokens, group, costs) == group
    assert first_tokens.is_prioritized


def test_a_long_prompt_has_no_priority_and_short_ones_do_not_wait_for_it() -> None:
    long, short = _request("long", 400, num_output=0), _request("short", 3, num_output=0)
    assert _chosen(FirstTokens(), [*BUSY, long]) == [*BUSY, long]
    assert _chosen(FirstTokens(), [*BUSY, long, short]) == [short]


def test_a_first_token_is_not_computed_alone_if_the_pass_of_all_is_as_short() -> None:
    """A step reads a small part of a long prompt beside decoding requests."""
    long, short = _request("long", 400, num_output=0), _request("short", 30, num_output=0)
    group = [*BUSY, long, short]
    assert FirstTokens().choose(group, 35, COMPUTING) == group  # type: ignore[arg-type]
    assert FirstTokens().choose(group, 350, COMPUTING) == [short]  # type: ignore[arg-type]


@pytest.mark.parametrize("others", [[], [_request("new")]], ids=["alone", "own"])
def test_a_tenant_has_no_priority_over_its_own_requests(others: list[Request]) -> None:
    group = [*others, _request("new", num_output=0)]
    first_tokens = FirstTokens()
    assert _chosen(first_tokens, group) == group
    assert not first_tokens.is_prioritized


def test_a_tenant_that_always_begins_has_priority_in_its_turn_only_and_takes_it_from_nobody() -> None:
    first_tokens, group = FirstTokens(), [*BUSY, _request("greedy", num_output=0)]
    prioritized = []
    for _ in range(100):
        _chosen(first_tokens, group)
        prioritized.append(first_tokens.is_prioritized)
    assert sum(prioritized) == 100 // (PASSES_PER_TURN * len(group)) + 1
    _chosen(first_tokens, group)
    other = _request("other", num_output=0)
    assert _chosen(first_tokens, [*group, other]) == [other]
