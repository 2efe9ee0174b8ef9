"""Steps on the device under rules with random numbers: for fixed expansions the tokens of host steps."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from on_device import (
    Pair,
    add_rejecting_rule,
    check_left,
    executor_of,
    load_plain,
    make_device_engine,
    plain_tokens,
    run_on_device,
)
from specinfer import SamplingParams
from specinfer.core.request import DRAWS_EACH, Request, Span
from specinfer.core.rules import random_rules
from specinfer.core.tree import OFF, TreeBudget
from specinfer.drafters.growth.calibration import Calibration, source_of
from specinfer.engine.device.budgets import DeviceBudgets
from specinfer.engine.device.served_requests import DrawnRequests
from specinfer.engine.engine import Engine
from specinfer.ops.cpu import transfers
from specinfer.ops.trees import DRAWN, GREEDY, SAMPLED
from specinfer.policy.base import FixedPolicy
from specinfer.policy.request_policy import RequestPolicy
from specinfer.verify import batch
from tiny import make_request, random_prompts, run

PROMPTS = random_prompts([3, 26, 12, 40, 7, 9], seed=4)
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(max_tokens=17, temperature=0.6, top_p=0.8),
    SamplingParams(max_tokens=9, temperature=1.4, min_p=0.05, logprobs=2),
    SamplingParams(max_tokens=15, tree="off"),
    SamplingParams(max_tokens=18, presence_penalty=0.8, logit_bias={3: 1.0}, top_k=9),
]
WIDTHS = [(1, 1, 1), (2, 2, 1), (3, 1, 2)]
RULES = pytest.mark.parametrize("rule", random_rules())


def _requests(seed: int = 0) -> list[Request]:
    return [
        make_request(str(i), prompt, params, seed=seed + i)
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]


def _outcome(request: Request) -> tuple[Any, ...]:
    """Tokens, trees and the state of random numbers."""
    return request.output_ids, request.speculation.as_dict(), request.uniforms.state


@pytest.fixture(scope="module")
def pair(model_folder: Callable[..., Path]) -> Pair:
    return load_plain(model_folder("llama")), load_plain(model_folder("llama", 0, 0.1))


def _engine(pair: Pair, rule: str, tree: TreeBudget, **options: Any) -> Engine:
    policy = RequestPolicy(FixedPolicy(tree), lambda: FixedPolicy())
    return make_device_engine(*pair, policy, verification=rule, **options)


def _ordinary(pair: Pair, rule: str, widths: Sequence[int], seed: int = 0) -> list[tuple[Any, ...]]:
    requests = _requests(seed)
    run(_engine(pair, rule, TreeBudget.expansion(widths), has_device_executor=False), requests)
    return list(map(_outcome, requests))


@pytest.mark.covering(2)
@RULES
@pytest.mark.parametrize("seed", [0, 10])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_steps_on_the_device_are_ordinary_ones(widths: Sequence[int], seed: int, rule: str, pair: Pair) -> None:
    """With the same trees: greedy requests, truncated ones, some with penalties or without trees, in one batch."""
    engine, requests = _engine(pair, rule, TreeBudget.expansion(widths)), _requests(seed)
    assert run_on_device(engine, requests) == set(requests)
    assert executor_of(engine).num_launched > 4
    assert list(map(_outcome, requests)) == _ordinary(pair, rule, widths, seed)
    assert sum(request.speculation.num_accepted_draft_tokens for request in requests[2:4]) > 4


@pytest.mark.covering(1)
@RULES
@pytest.mark.parametrize("every", [2, 3, 5])
def test_requests_go_on_with_host_steps_and_come_back(every: int, rule: str, pair: Pair) -> None:
    """No random number is used twice, and steps in flight that are dropped used none."""
    engine, requests = _engine(pair, rule, TreeBudget.expansion((2, 2, 1))), _requests()
    for request in requests:
        engine.add(request)
    num_dropped = 0
    for number in count():
        if not engine.has_work:
            break
        if number % every == every - 1:
            num_dropped += executor_of(engine).num_in_flight
            executor_of(engine).abandon()
        engine.step()
    assert num_dropped >= 2
    assert list(map(_outcome, requests)) == _ordinary(pair, rule, (2, 2, 1))


BEST_FIRST = TreeBudget(max_nodes=12, max_depth=4)


@RULES
@pytest.mark.parametrize("tree", [BEST_FIRST, TreeBudget(7, 3, min_path_prob=0.05), TreeBudget(30, 6)], ids=str)
def test_best_first_trees_are_drawn_on_the_device(tree: TreeBudget, rule: str, pair: Pair) -> None:
    """Greedy requests have the tokens of plain decoding next to them."""
    engine, requests = _engine(pair, rule, tree), _requests()
    assert run_on_device(engine, requests) == set(requests)
    assert executor_of(engine).num_launched > 4
    assert all(request.is_finished and not request.error for request in requests)
    assert sum(request.speculation.num_accepted_draft_tokens for request in requests[2:4]) > 4
    assert requests[1].output_ids == _ordinary(pair, rule, (2, 1))[1][0]
    check_left(engine)


@pytest.mark.covering(1)
@RULES
@pytest.mark.parametrize("every", [2, 3, 5])
def test_best_first_trees_use_no_random_number_twice(every: int, rule: str, pair: Pair) -> None:
    """Requests change between steps on the device and ordinary ones; those in flight are dropped."""
    engine, requests = _engine(pair, rule, BEST_FIRST), _requests()
    for request in requests:
        engine.add(request)
    sampled, states = [requests[i] for i in (0, 2, 3, 5)], defaultdict[Request, list[int]](list)
    for number in count():
        if not engine.has_work:
            break
        if number % every == every - 1:
            executor_of(engine).abandon()
        before = {request: request.num_output for request in sampled}
        engine.step()
        for request in sampled:
            if request.num_output > before[request]:
                states[request].append(request.uniforms.state)
    for request in sampled:
        assert request.drafting.num_draws["small"] // DRAWS_EACH >= request.speculation.num_spec_steps > 1
        assert len(set(states[request])) == len(states[request])
    assert sum(request.speculation.num_accepted_draft_tokens for request in sampled) > 4


@RULES
@pytest.mark.parametrize("num_slots", [150, 190])
def test_best_first_trees_are_cut_where_slots_are_few(num_slots: int, rule: str, pair: Pair) -> None:
    engine, requests = _engine(pair, rule, TreeBudget(30, 4), num_slots=num_slots), _requests()
    assert run_on_device(engine, requests) == set(requests)
    assert all(request.is_finished and not request.error for request in requests)
    sizes = {size.shape.num_nodes for size in executor_of(engine)._device.sizes.found if size.shape}
    assert min(sizes) < 30, "trees are smaller than wanted"
    assert sum(request.speculation.num_accepted_draft_tokens for request in requests) > 4
    check_left(engine)


@RULES
def test_few_slots_change_no_distribution_of_draws(rule: str, pair: Pair) -> None:
    """Where an expansion does not fit whole, the step is an ordinary one: no drawn token is left out."""
    engine, requests = _engine(pair, rule, TreeBudget.expansion((3, 2, 2)), num_slots=150), _requests()
    run(engine, requests)
    assert all(request.is_finished and not request.error for request in requests)
    ordinary = _requests()
    run(_engine(pair, rule, TreeBudget.expansion((3, 2, 2)), num_slots=150, has_device_executor=False), ordinary)
    assert [len(one.output_ids) for one in requests] == [len(one.output_ids) for one in ordinary]
    assert engine.target.cache.is_balanced()


class Pausing(FixedPolicy):
    """Wants no tree in every third step of a request."""

    def __init__(self, budget: TreeBudget) -> None:
        super().__init__(budget)
        self._num_steps = Counter[str]()

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        self._num_steps.update(span.request.request_id for span in spans)
        budgets = zip(spans, super().budgets(spans), strict=True)
        return [OFF if self._num_steps[span.request.request_id] % 3 == 0 else budget for span, budget in budgets]


@RULES
def test_steps_without_trees_use_the_same_random_numbers(rule: str, pair: Pair) -> None:
    told = []
    for has_device_executor in (False, True):
        requests = _requests()
        policy = RequestPolicy(Pausing(TreeBudget.expansion((2, 2, 1))), lambda: FixedPolicy())
        run(make_device_engine(*pair, policy, verification=rule, has_device_executor=has_device_executor), requests)
        told.append(list(map(_outcome, requests)))
    assert told[1] == told[0]
    assert all(one[1]["num_accepted_draft_tokens"] for one in told[0][2:4])


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 1)], ids=str)
def test_requests_of_both_rules_share_steps(widths: Sequence[int], pair: Pair) -> None:
    """Under the rule "auto" each sampled request has a rule of its own."""
    told = []
    for has_device_executor in (False, True):
        requests, tree = _requests(), TreeBudget.expansion(widths)
        for number, rule in ((0, "traversal"), (2, "coupled"), (3, "traversal"), (5, "coupled")):
            requests[number].verification = rule
        engine = _engine(pair, "auto", tree, has_device_executor=has_device_executor)
        if has_device_executor:
            assert run_on_device(engine, requests) == set(requests)
        else:
            run(engine, requests)
        told.append(list(map(_outcome, requests)))
    assert told[1] == told[0]
    assert all(one[1]["num_accepted_draft_tokens"] for one in told[0][2:4])


def test_best_first_requests_of_both_rules_share_steps(pair: Pair) -> None:
    """Those under the coupled rule, and greedy ones, have the tokens of plain decoding."""
    plain, requests = _requests(), _requests()
    plain_tokens(pair[0], plain)
    rules = {0: "traversal", 2: "coupled", 3: "traversal", 5: "coupled"}
    for number, rule in rules.items():
        requests[number].verification = rule
    engine = _engine(pair, "auto", BEST_FIRST)
    assert run_on_device(engine, requests) == set(requests)
    for i, (request, wanted) in enumerate(zip(requests, plain, strict=True)):
        if rules.get(i) != "traversal":
            assert request.output_ids == wanted.output_ids
    assert all(request.speculation.num_accepted_draft_tokens for request in requests[2:4])


@pytest.mark.parametrize("rule", ["traversal", "auto"])
def test_drawn_tokens_have_the_acceptance_probabilities_of_their_rule(rule: str) -> None:
    rules = ("coupled", "traversal") if rule == "auto" else (None, None)
    calibration, names = Calibration(), ["small", *(source_of("small", is_greedy=False, rule=one) for one in rules)]
    for i, name in enumerate(dict.fromkeys(names)):
        for _ in range(20):
            calibration.count(name, i, 0.5, kept=True)
    (tables,) = DeviceBudgets(["small"], calibration, rule=rule).chances()
    assert len(tables) == DRAWN + 1
    for number, name in ((GREEDY, names[0]), (SAMPLED, names[1]), (DRAWN, names[2])):
        assert all(np.array_equal(*each) for each in zip(tables[number], calibration.lines(name), strict=True))
    assert np.array_equal(tables[DRAWN][0], tables[SAMPLED][0]) == (rules[0] == rules[1])


@pytest.mark.parametrize("rule", [None, "traversal"])
def test_the_reason_of_host_steps_is_that_of_the_drafters(rule: str | None) -> None:
    request, drawn = make_request("a", PROMPTS[0], PARAMS[0]), DrawnRequests(rule, "traversal")
    assert (drawn.why_not_drawn(request, 0) is None) == (rule is not None)
    assert drawn.why_not_drawn(make_request("b", PROMPTS[0], PARAMS[1]), 0) is None, "greedy"


def test_a_rule_without_a_walk_on_a_device_is_walked_by_its_algorithm(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sampled requests take host steps, also where logits are on a device; greedy ones take steps there."""
    caplog.set_level("INFO")
    calls = add_rejecting_rule(monkeypatch)
    expected = _ordinary(pair, "reject-all", (2, 1))
    assert len(calls) > 20
    calls.clear()
    engine, requests = _engine(pair, "reject-all", TreeBudget.expansion((2, 1))), _requests()
    assert run_on_device(engine, requests) == {requests[1]}
    assert list(map(_outcome, requests)) == expected
    assert "have this verification rule" in caplog.text
    calls.clear()
    monkeypatch.setattr(transfers, "is_apart", lambda _: True)
    monkeypatch.setattr(batch, "runs_on", lambda _: True)
    assert _ordinary(pair, "reject-all", (2, 1)) == expected
    assert len(calls) > 20
