"""Prompts that are read in small parts beside decoding requests: the same outputs, and what is counted meanwhile."""

from collections.abc import Callable

import pytest

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.drafters.lookup.ngram import NGramDrafter
from specinfer.drafters.merge.merged import MergedDrafter
from specinfer.engine.engine import Engine
from specinfer.engine.tally import Tally
from specinfer.model.runner import ModelRunner
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from tiny import make_engine, make_request, random_prompts, resized, run

Runners = Callable[..., ModelRunner]
SHORT, LONG = random_prompts([5, 200])
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
# A row costs a sixteenth of a pass over one, so that a step reads at most 128 tokens beside another request.
COSTS = CostModel(Curve([1, 16, 512], [1.0, 1.0, 32.0]), Curve([1], [1.0]))


def _engine(runner_of: Runners, *, speculates: bool = False, num_slots: int = 600) -> tuple[Engine, Tally]:
    target = resized(runner_of("llama"), num_slots)
    drafter = MergedDrafter([NGramDrafter()]) if speculates else None
    engine = make_engine(target, drafter, (1, 1) if speculates else ())
    engine.scheduler.planner = AutoPolicy(COSTS, why_off="off").planner
    engine.observers.append(tally := Tally())
    return engine, tally


def _long(name: str = "long", params: SamplingParams = GREEDY) -> Request:
    request: Request = make_request(name, LONG, params, cache_salt="")
    return request


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=0.8, max_tokens=20, seed=3)], ids=["greedy", "sampled"]
)
def test_outputs_are_those_of_prompts_read_at_once(
    params: SamplingParams, speculates: bool, runner_of: Runners
) -> None:
    alone, _ = _engine(runner_of)
    expected = run(alone, [_long(params=params)])
    engine, _ = _engine(runner_of, speculates=speculates)
    first, long = make_request("first", SHORT, GREEDY), _long(params=params)
    engine.add(first)
    engine.step()
    engine.add(long)
    engine.step()
    assert long.num_computed == 129, "one token, and those that the step has time for"
    while engine.has_work:
        engine.step()
    assert [long.output_ids] == expected


def test_tokens_of_prompts_are_counted_as_they_are_computed(runner_of: Runners) -> None:
    engine, tally = _engine(runner_of)
    first, long = make_request("first", SHORT, GREEDY), _long()
    engine.add(first)
    engine.step()
    engine.add(long)
    seen = []
    for _ in range(3):
        engine.step()
        seen.append((tally.totals.num_prompt_tokens, long.num_prompt_computed))
    assert seen == [(5 + 129, 129), (5 + 200, 200), (5 + 200, 200)]
    assert tally.totals.num_begun_tokens == 205


def test_cached_tokens_are_counted_when_a_prompt_begins_and_repeated_ones_once(runner_of: Runners) -> None:
    target = resized(runner_of("llama"), 600)
    target.cache.keeps_prefixes = True
    engine = make_engine(target, max_num_batched_tokens=64)
    engine.observers.append(tally := Tally())
    run(engine, [_long("before")])
    before = tally.copy()
    run(engine, [again := _long("again")])
    spent = tally.copy().since(before)
    assert again.num_cached == 199
    assert (spent.num_prompt_tokens, spent.num_begun_tokens, spent.num_cached_tokens) == (200, 200, 199)


def test_a_preempted_prompt_is_counted_once(runner_of: Runners) -> None:
    engine, tally = _engine(runner_of, num_slots=230)
    requests = [
        make_request(str(i), prompt, GREEDY, tenant=str(i)) for i, prompt in enumerate(random_prompts([110] * 3))
    ]
    run(engine, requests)
    assert engine.metrics.num_preempted
    assert tally.totals.num_prompt_tokens == tally.totals.num_begun_tokens == 330
    assert [request.num_prompt_computed for request in requests] == [110] * 3
