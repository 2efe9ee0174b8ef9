"""Siblings: what running requests with one prompt have generated is proposed to each other, and to nobody else."""

import tracemalloc
from collections.abc import Sequence

import pytest

from drafting import draft_within
from specinfer.core.request import FinishReason, Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.lookup.siblings import MAX_SEEDS, Siblings
from specinfer.drafters.lookup.suffix import EARLIER, SIBLING, SuffixDrafter

SAMPLED = SamplingParams(temperature=0.7, max_tokens=10**6)


def _request(name: str, output: Sequence[int] = (), seed: int = 0, **fields: object) -> Request:
    made = Request(**({"request_id": name, "prompt_ids": [1, 2], "params": SAMPLED, "seed": seed} | fields))  # type: ignore[arg-type]
    made.token_ids += output
    return made


def _draft(drafter: SuffixDrafter, requests: Sequence[Request]) -> list[TokenTree]:
    spans = [Span(request, len(request.token_ids) - 1, len(request.token_ids)) for request in requests]
    return drafter.draft(spans, [TreeBudget(4, 4)] * len(requests))


def _proposed(drafter: SuffixDrafter, first: Request, second: Request) -> list[int]:
    """Return what the second request is proposed once both have run for a step."""
    _draft(drafter, [first, second])
    tree = _draft(drafter, [first, second])[1]
    assert set(tree.drafters()) <= {None, SIBLING}
    return list(tree.tokens[1:])


def test_a_running_request_proposes_to_one_with_the_same_prompt() -> None:
    drafter, first, second = SuffixDrafter(), _request("a", range(10, 30)), _request("b", [50, 12, 13], 1)
    assert _proposed(drafter, first, second) == [14, 15, 16, 17]
    first.token_ids += [60, 61, 62]
    second.token_ids += [60, 61]
    assert 62 in _draft(drafter, [first, second])[1].tokens


@pytest.mark.parametrize(
    "fields", [{"prompt_ids": [1, 3]}, {"cache_salt": "other"}, {"cache_salt": None}, {"tenant": "other"}, {"seed": 0}]
)
def test_nothing_is_proposed_across_prompts_salts_and_tenants_or_with_the_same_noise(fields: dict) -> None:
    first, second = _request("a", range(10, 30)), _request("b", [50, 12, 13], **{"seed": 1} | fields)
    assert _proposed(SuffixDrafter(), first, second) == []


def test_requests_that_share_with_nobody_have_no_siblings() -> None:
    first, second = (_request(name, range(10, 30), seed, cache_salt=None) for seed, name in enumerate("ab"))
    assert _proposed(SuffixDrafter(), first, second) == []


def test_greedy_requests_may_have_one_seed() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=10**6)
    first, second = (_request(name, range(10, end), params=greedy) for name, end in (("a", 30), ("b", 13)))
    assert _proposed(SuffixDrafter(), first, second) == [13, 14, 15, 16]


def test_a_request_that_was_put_back_joins_again() -> None:
    drafter, first, second = SuffixDrafter(), _request("a", range(10, 30)), _request("b", [50, 12, 13], 1)
    assert _proposed(drafter, first, second) == [14, 15, 16, 17]
    drafter.forget("b")
    assert _proposed(drafter, first, second) == [14, 15, 16, 17]


def test_outputs_stay_until_the_last_of_a_group_ends_and_then_join_the_earlier_answers() -> None:
    drafter, first, second = SuffixDrafter(), _request("a", range(10, 30)), _request("b", [50, 12, 13], 1)
    _draft(drafter, [first, second])
    _draft(drafter, [first, second])
    assert drafter._siblings.num_tokens == 23
    first.finish(FinishReason.STOP)
    drafter.forget("a")
    third = _request("c", [51, 20], 2)
    _draft(drafter, [second, third])
    assert set(_draft(drafter, [second, third])[1].drafters()[1:]) <= {SIBLING, EARLIER}
    for request in (second, third):
        request.finish(FinishReason.STOP)
        drafter.forget(request.request_id)
        drafter.forget(request.request_id)
    assert drafter._siblings.num_tokens == 0
    assert not drafter._siblings._groups
    assert not drafter._siblings._group_of
    tree = draft_within(drafter, _request("d", [50, 20], 3), TreeBudget(4, 4))
    assert set(tree.drafters()[1:]) == {EARLIER}


def test_a_single_request_is_not_read_a_second_time() -> None:
    drafter, request = SuffixDrafter(), _request("a", range(10, 30))
    for _ in range(3):
        _draft(drafter, [request])
    assert drafter._siblings.num_tokens == 0


def test_a_prompt_that_is_always_asked_takes_neither_memory_nor_the_room_of_others() -> None:
    siblings = Siblings(SIBLING, 2000)
    for number in range(3000):
        request = _request(str(number), range(number % 20), number)
        siblings.join(request)
        siblings.read(100)
        siblings.leave(str(number - 1))
    assert siblings.num_tokens <= 1000
    assert all(len(group.seeds) <= MAX_SEEDS for group in siblings._groups)
    first, second = (_request(name, range(10, 30), ord(name), prompt_ids=[3]) for name in "ab")
    siblings.join(first)
    siblings.join(second)
    assert siblings.read(100) == 40
    assert siblings.match(second) is not None
    for request_id in ("2999", "a", "b"):
        siblings.leave(request_id)
    assert not siblings._groups
    assert not siblings._open
    assert not siblings._group_of


def test_siblings_stay_within_their_memory() -> None:
    drafter = SuffixDrafter(max_tokens=2000)
    requests = [_request(str(seed), range(seed * 1000, seed * 1000 + 900), seed) for seed in range(8)]
    for _ in range(8):
        trees = _draft(drafter, requests)
    assert drafter._siblings.num_tokens == 2000
    assert len(trees) == 8
    tracemalloc.start()
    try:
        for request in requests:
            request.token_ids += [5] * 100
        before, _ = tracemalloc.get_traced_memory()
        drafter._siblings.read(10_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1000
