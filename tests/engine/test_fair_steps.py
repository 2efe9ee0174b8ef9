"""Attacks of some tenants: the first tokens and the gaps of another one, in seconds of a simulated engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from specinfer.core.limits import SLO
from specinfer.core.request import Request, ScoringTime, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.engine.fair_steps import FairSteps
from specinfer.engine.parts import even_parts
from specinfer.engine.step_seconds import StepSeconds
from specinfer.engine.turns import PassTurns
from specinfer.engine.waiting import WaitingQueue
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.base import FixedPolicy, SpeculationPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.request_policy import RequestPolicy
from tests.policy.simulated_machines import SimulatedDrafting, make_record
from tests.policy.simulated_server import MachineCosts, SimulatedServer
from tiny import make_request

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def _small() -> CostModel:
    """Return the costs of a model of 135 M parameters on two cores, and of its drafter."""
    passes = [0.0064, 0.0083, 0.0101, 0.0186, 0.0288, 0.0546, 0.1114, 0.25, 0.507, 1.061]
    return CostModel(Curve(SIZES, passes), Curve((1, 4, 16, 64), (0.0006, 0.0011, 0.0031, 0.0104)), 0.00016, 0.0022)


def _large() -> CostModel:
    """Return the costs of a model of 1.5 B parameters on two cores, and of a drafter a third as large."""
    passes = [0.066, 0.073, 0.113, 0.204, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8]
    return CostModel(Curve(SIZES, passes), Curve((1, 4, 16, 64), (0.039, 0.062, 0.19, 0.9)), 0.0065, 0.01)


@dataclass
class Attack:
    """Requests of other tenants, each of which is sent again when it has ended.

    Attributes:
        tenants: Who sends them.
        num_each: How many each of them sends.
        num_prompt: Tokens of a prompt.
        params: Sampling parameters.
    """

    tenants: Sequence[str] = ("hostile",)
    num_each: int = 16
    num_prompt: int = 20
    params: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def _usual_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.engine.fair_steps.ALONE", 0.5)  # other tests have longer ones


TREES = {"max_tokens": 600, "tree": "best-first:64"}
SCORES = {"max_tokens": 200, "logprobs": 20, "logprob_token_ids": [*range(100, 228)]}
TARGETS = {"max_tokens": 200, "slo": SLO(tpot=1.0)}


def _auto(costs: CostModel) -> RequestPolicy:
    auto = AutoPolicy(CostModel.from_dict(costs.as_dict()))
    return RequestPolicy(auto, lambda: auto, is_auto=True)


def _explicit(costs: CostModel) -> RequestPolicy:
    """Return a policy that measures nothing: what requests ask for, or plain decoding."""
    return RequestPolicy(FixedPolicy(), lambda: pytest.fail("nothing asks for auto"))


@dataclass
class Served:
    """What an honest tenant saw: seconds to first tokens, and between further ones."""

    firsts: list[float]
    gaps: list[float]
    longest: float
    honest: list[Request]
    server: SimulatedServer

    @property
    def first(self) -> float:
        return float(np.quantile(self.firsts, 0.95))

    @property
    def gap(self) -> float:
        return float(np.quantile(self.gaps, 0.95))

    @property
    def pace(self) -> float:
        """Seconds of each token after the first one, in the slowest answer."""
        return max(
            ((request.times.finished or 0.0) - (request.times.first_token or 0.0)) / (request.num_output - 1)
            for request in self.honest
        )


def _served(
    costs: CostModel,
    attacks: Sequence[Attack] = (),
    *,
    make_policy: Callable[[CostModel], RequestPolicy] = _auto,
    num_prompt: int = 40,
    num_output: int = 60,
    num_requests: int = 12,
    params: dict[str, Any] | None = None,
) -> Served:
    """Serve some requests of an honest tenant one after the other, beside attacks that began before."""
    policy: SpeculationPolicy = make_policy(costs)
    drafting, random = SimulatedDrafting(costs, 0.6, seed=1), np.random.default_rng(1)
    server = SimulatedServer(MachineCosts(costs), drafting, policy, policy.planner, max_num_seqs=32, score=2e-5)
    numbers, honest = iter(range(10**6)), list[Request]()

    def make(tenant: str, num_prompt: int, given: dict[str, Any]) -> Request:
        number = next(numbers)
        asked = SamplingParams(**{"temperature": 0.0, **given})
        request: Request = make_request(f"{tenant} {number}", range(num_prompt), asked, tenant=tenant, cache_salt=None)
        request.times.arrival = server.now
        return request

    def make_honest(after: float) -> Request:
        honest.append(make("honest", num_prompt, {"max_tokens": num_output, **(params or {})}))
        honest[-1].times.arrival = server.now + after
        return honest[-1]

    def follow(ended: Request) -> Request | None:
        if ended.tenant == "honest":
            return make_honest(0.4 * random.random()) if len(honest) < num_requests else None
        attack = next(attack for attack in attacks if ended.tenant in attack.tenants)
        is_over = len(honest) == num_requests and honest[-1].is_finished
        return None if is_over else make(ended.tenant, attack.num_prompt, attack.params)

    coming = [
        make(tenant, attack.num_prompt, attack.params)
        for attack in attacks
        for tenant in attack.tenants
        for _ in range(attack.num_each)
    ]
    server.run([make("honest", 40, {"max_tokens": 8})], lambda ended: None)  # it shows what steps cost
    for request in coming:
        request.times.arrival = server.now
    server.run([*coming, make_honest(3.0)], follow)
    times = [[request.times.arrival, *server.emitted[request.request_id]] for request in honest]
    gaps = [later - earlier for each in times for earlier, later in pairwise(each[1:])]
    longest = max(each[-1] - each[0] for each in times)
    return Served([each[1] - each[0] for each in times], gaps, longest, honest, server)


BEGINNINGS = {"max_tokens": 1}
ATTACKS = {
    "trees": [Attack(num_each=32, params=TREES)],
    "a prompt": [Attack(num_each=1, num_prompt=18_000, params={"max_tokens": 1})],
    "log-probabilities": [Attack(num_each=32, params=SCORES)],
    "log-probabilities of prompts": [Attack(("a", "b"), 16, 60, {"max_tokens": 1, "prompt_logprobs": 20})],
    "targets": [Attack(num_each=32, params=TARGETS)],
    "first tokens": [Attack(num_each=32, num_prompt=100, params=BEGINNINGS)],
    "trees and prompts of two": [Attack(("a",), 32, params=TREES), Attack(("b",), 4, 4000, {"max_tokens": 1})],
}
MACHINES = {"small": _small(), "large": _large()}


@pytest.mark.parametrize("make_policy", [_auto, _explicit], ids=["auto", "without costs"])
@pytest.mark.parametrize("name", ATTACKS)
def test_first_tokens_and_gaps_stay_short_beside_any_attack(
    name: str, make_policy: Callable[[CostModel], RequestPolicy]
) -> None:
    quiet = _served(MACHINES["small"], make_policy=make_policy, num_requests=40)  # "auto" has learned what pays
    attacked = _served(MACHINES["small"], ATTACKS[name], make_policy=make_policy, num_requests=5)
    assert attacked.first <= max(3 * quiet.first, quiet.first + 0.5)
    assert attacked.pace <= 3 * quiet.pace
    assert attacked.gap <= 3 * quiet.gap


@pytest.mark.parametrize("name", ["a prompt", "log-probabilities", "targets"])
def test_a_large_model_on_a_slow_machine_answers_beside_an_attack(name: str) -> None:
    attacked = _served(MACHINES["large"], ATTACKS[name], num_prompt=10, num_output=80, num_requests=4)
    assert max(attacked.firsts) < 2.0
    assert attacked.longest < 20.0


@pytest.mark.parametrize("costs", MACHINES.values(), ids=MACHINES)
def test_a_prompt_alone_is_read_as_fast_as_by_the_longest_steps(costs: CostModel) -> None:
    alone = _served(costs, num_prompt=4000, num_output=2, num_requests=1)
    assert alone.first < 1.03 * 4000 / 512 * float(costs.target(512))


def test_a_tenant_alone_keeps_the_shapes_of_its_trees_and_beside_others_the_cut_is_named() -> None:
    params = {"tree": "best-first:64"}
    found = {}
    for name, attacks in (("alone", []), ("beside", ATTACKS["a prompt"])):
        served = _served(MACHINES["small"], attacks, num_requests=1, params=params)
        found[name] = served.honest[0].speculation.num_cut_steps, max(step.num_guessed for step in served.server.steps)
    assert found["alone"] == (0, 64)
    assert found["beside"][0] > 10
    assert 0 < found["beside"][1] < 64


def test_outputs_of_a_tenant_alone_take_turns_so_that_steps_stay_short() -> None:
    served = _served(MACHINES["small"], ATTACKS["trees"], num_requests=1)
    alone = [step.time for step in served.server.steps if step.num_guessed >= 64]
    assert alone
    assert max(alone) < 0.8


# ---------------------------------------------------------------------------------------------- parts


def _running(tenant: str, name: str, *, num_unread: int = 1, num_output: int = 1, **params: Any) -> Request:
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": 100, **params})
    request: Request = make_request(name, range(num_unread), asked, tenant=tenant)
    request.token_ids += [1] * num_output
    request.num_computed = len(request.token_ids) - num_unread
    return request


def _fair(*requests: Request) -> FairSteps:
    """Return the division of steps among the tenants of these requests; rows take 10 ms, and 2 ms each beyond one."""
    waiting = WaitingQueue()
    for request in requests:
        waiting.add(request)
        waiting.take(request)
    fair = FairSteps(waiting, PassTurns())
    fair.seconds.expect(lambda num_rows: 0.008 + 0.002 * num_rows)
    return fair


def _counts(fair: FairSteps, requests: Sequence[Request], max_tokens: int = 512) -> list[int]:
    return fair.shares(requests, requests, max_tokens, 512, None).counts


def test_outputs_that_do_not_fit_take_turns() -> None:
    quiet = _running("a", "quiet")
    many = [_running("b", f"b{i}") for i in range(16)]
    fair = _fair(quiet, *many)
    first = _counts(fair, [quiet, *many])  # 20 ms: 6 rows
    assert first[0] == 1
    assert sum(first[1:]) == 5
    fair._turns.begin([request for request, count in zip([quiet, *many], first, strict=True) if count])
    second = _counts(fair, [quiet, *many])
    assert second[0] == 1
    assert not any(one and other for one, other in zip(first[1:], second[1:], strict=True))


def test_a_tenant_alone_is_not_limited_as_long_as_its_steps_are_short() -> None:
    many = [_running("b", f"b{i}") for i in range(64)]
    assert _counts(_fair(*many), many) == [1] * 64
    assert _counts(_fair(*many), [*many, _running("b", "prompt", num_unread=500, num_output=0)])[-1] > 100


def test_trees_with_prices_of_rows_count_by_what_they_had() -> None:
    """Such a tree may have 16 draft tokens and mostly has none; outputs would take turns for nothing."""
    many = [_running("b", f"b{i}") for i in range(32)]
    fair, budget = _fair(*many), TreeBudget(16, 16, row_prices=(0.2, 0.4))
    fair.seconds.observe(make_record(num_rows=256, target_time=1.0), ScoringTime())  # longer than a step may take
    fair.cut([Span(request, 1, 2) for request in many], [budget] * 32, [], many, lambda _: 0)
    assert _counts(fair, many) == [1] * 32


def test_nothing_is_limited_before_a_step_was_seen() -> None:
    requests = [_running("a", "quiet"), _running("b", "prompt", num_unread=400, num_output=0)]
    fair = _fair(*requests)
    fair.seconds = StepSeconds()
    assert _counts(fair, requests) == [1, 400]


def test_first_tokens_come_first_until_a_tenant_has_used_its_time_for_them() -> None:
    decoding, begins = _running("a", "a"), _running("b", "b", num_unread=8, num_output=0)
    fair = _fair(decoding, begins)
    shares = fair.shares([decoding, begins], [decoding, begins], 512, 512, None)
    assert (shares.counts, shares.is_prioritized) == ([1, 5], True)
    for _ in range(60):
        fair.charge(make_record(num_requests=1, num_rows=5, target_time=0.018), [(Span(begins, 0, 5), None)])
    shares = fair.shares([decoding, begins], [decoding, begins], 512, 512, None)
    assert not shares.is_prioritized
    for _ in range(60):
        fair.charge(make_record(target_time=0.1), [(Span(decoding, 1, 2), None)])
    assert fair.shares([decoding, begins], [decoding, begins], 512, 512, None).is_prioritized


def test_short_first_tokens_take_the_draft_tokens_of_others_in_a_quarter_of_the_time_at_most() -> None:
    """A prompt of one token takes a small part of a step, which has no draft tokens for its sake."""
    many = [_running("a", f"a{i}") for i in range(16)]
    waiting = [_running("b", f"b{i}", num_output=0) for i in range(400)]
    fair, num_prioritized = _fair(*many, *waiting), 0
    for request in waiting:
        group = [*many, request]
        shares = fair.shares(group, group, 512, 512, None)
        request.is_prioritized = shares.is_prioritized
        num_prioritized += shares.is_prioritized
        spans = [Span(one, one.num_computed, one.num_computed + 1) for one in group]
        fair.charge(make_record(num_requests=17, num_rows=17, target_time=0.04), [(span, None) for span in spans])
    assert 20 <= num_prioritized < 0.25 * len(waiting)


def test_reading_counts_only_where_a_model_has_read() -> None:
    """Lookups may find enough for many steps; what no model read must not use up the time of a tenant."""
    quiet, other = _running("a", "a"), _running("b", "b")
    fair = _fair(quiet, other)

    def budget() -> TreeBudget:
        (allowed,) = fair.cut([Span(quiet, 1, 2)], [TreeBudget(4, 4)], [], [quiet, other], lambda _: 50)
        return allowed

    for _ in range(50):
        assert budget().max_nodes == 4
        fair.charge(make_record(num_requests=1, num_rows=1, target_time=0.01), [(Span(quiet, 1, 2), None)])
    assert fair._firsts.left("a") == pytest.approx(0.5)
    assert budget().max_nodes == 4
    quiet.drafting.note_read()
    quiet.drafting.is_read = False  # as when the request has ended in the same step
    fair.charge(make_record(num_requests=1, num_rows=1, target_time=0.01), [(Span(quiet, 1, 2), None)])
    assert fair._firsts.left("a") < 0.45


def test_steps_are_as_long_as_the_targets_of_all_allow() -> None:
    slow = SLO(tpot=100.0)
    decoding = _running("a", "a", slo=slow)
    reading = _running("b", "b", num_unread=400, num_output=0, slo=slow)
    for other, count in ((reading, 45), (_running("b", "b", num_unread=400, num_output=0), 5)):
        fair = _fair(decoding, other)
        assert _counts(fair, [decoding, other]) == [1, count]


def _budgets(fair: FairSteps, requests: Sequence[Request], num_to_read: int = 0) -> list[int]:
    """Return the draft tokens that each of these requests may have, of four that it asks for."""
    spans, wanted = [Span(request, 1, 2) for request in requests], [TreeBudget(4, 4)] * len(requests)
    fair.cut(spans, wanted, [], requests, lambda _: 0)  # now it is known what they want
    allowed = fair.cut(spans, wanted, [], requests, lambda _: num_to_read)
    return [budget.max_nodes for budget in allowed]


def test_a_target_shortens_steps_only_by_the_part_of_the_tenant_that_has_it() -> None:
    """A key that asks for a token in a millisecond must not take the draft tokens of all others."""
    usual = [_running("a", "a"), _running("b", "b")]
    assert _budgets(_fair(*usual), usual) == [4, 4]
    hasty = [_running("a", "a"), _running("b", "b", slo=SLO(tpot=1.0))]
    fair = _fair(*hasty)
    quiet, own = _budgets(fair, hasty)
    assert quiet == 4
    assert own < 3
    assert fair._length(hasty) < fair._length(usual)
    all_hasty = [_running(name, name, slo=SLO(tpot=1.0)) for name in "ab"]
    fair = _fair(*all_hasty)
    assert max(_budgets(fair, all_hasty)) < 3
    assert fair._length(all_hasty) == pytest.approx(0.02)  # a plain pass for each


def test_a_target_gives_others_no_more_rows_than_a_step_has_room_for() -> None:
    """A pass over 64 rows takes hardly longer than one over 8, so that a little less time has far fewer rows."""
    requests = [*(_running("a", f"a{i}") for i in range(4)), _running("b", "b", slo=SLO(tpot=1.0))]
    fair = _fair(*requests)
    seconds = {1: 0.01, 2: 0.04, 4: 0.05, 8: 0.079, 16: 0.0795, 32: 0.0798}
    fair.seconds = StepSeconds()
    fair.seconds.expect(lambda num_rows: seconds.get(num_rows, 0.00125 * num_rows))
    num_rows = len(requests) + sum(_budgets(fair, requests))
    assert fair.seconds.of_pass(num_rows) <= fair._length(requests)


def test_a_request_that_has_no_time_to_be_read_by_a_drafter_says_so() -> None:
    requests = [_running("a", "a"), _running("b", "b")]
    fair = _fair(*requests)
    assert _budgets(fair, requests, num_to_read=4000) == [0, 0]
    assert [request.drafting.num_unread_steps for request in requests] == [1, 1]


def test_a_tenant_is_charged_the_seconds_that_its_rows_and_log_probabilities_take() -> None:
    quiet, many = _running("a", "a"), [_running("b", f"b{i}", logprobs=20) for i in range(3)]
    fair = _fair(quiet, *many)
    for request in many:
        request.scoring.seconds, request.scoring.count = 0.1, 21
    trees = [TokenTree.chain(1, [2] * 4) for _ in many]
    spans = [Span(request, 1, 2) for request in (quiet, *many)]
    record = make_record(num_requests=4, num_rows=16, num_guessed=12, target_time=1.6, rest_time=0.3, draft_time=0.6)
    fair.charge(record, list(zip(spans, [None, *trees], strict=True)))
    assert fair._waiting._served == pytest.approx({"a": 0.1, "b": 1.5 + 0.6 + 0.3})
    assert fair.seconds.on_host(many[0]) == pytest.approx(0.1)
    assert many[0].scoring.count == 0


def test_even_parts_leave_what_is_not_needed_to_others() -> None:
    assert even_parts({"a": 2.0, "b": 50.0, "c": 9.0}, 20.0) == {"a": 2.0, "b": 9.0, "c": 9.0}
    assert even_parts({"a": 2.0, "b": 50.0}, 1000.0) == {"a": 2.0, "b": 50.0}
    assert even_parts({}, 5.0) == {}
