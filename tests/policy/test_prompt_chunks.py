"""Chunks of prompts beside other requests: decoding keeps a tenth of its speed, and short prompts do not wait."""

import pytest

from specinfer.core.limits import SLO
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from tests.policy.simulated_machines import (
    MACHINES,
    SIZES,
    SimulatedDrafting,
    make_costs,
    make_record,
    make_span,
    roofline_costs,
)
from tests.policy.simulated_server import MachineCosts, SimulatedServer
from tiny import make_request

# Passes over more than 8 rows take their share, and one row takes a second.
COSTS = [max(1.0, size / 8) for size in SIZES]


def _policy() -> AutoPolicy:
    return AutoPolicy(make_costs(COSTS), why_off="off")


def _reader(num_unread: int) -> Request:
    request: Request = make_request("b", range(num_unread))
    return request


def test_a_step_with_a_chunk_takes_at_most_ten_plain_ones() -> None:
    planner = _policy().planner
    one, long = make_span().request, _reader(6000)
    assert planner.max_tokens([one], {long: 6000}, 512) == 64  # 65 rows take 8.1 s
    many = [make_span().request for _ in range(16)]  # a plain step takes 2 s
    assert planner.max_tokens(many, {long: 6000}, 512) == 128  # 144 rows take 18 s


def test_chunks_are_large_while_nobody_waits_for_the_step() -> None:
    planner = _policy().planner
    assert planner.max_tokens([], {_reader(6000): 6000}, 512) == 512
    assert planner.max_tokens([], {_reader(6000): 6000, _reader(5000): 5000}, 512) == 512
    assert planner.max_tokens([], {_reader(80): 80}, 512) == 512


def test_the_first_token_of_a_short_prompt_does_not_wait_for_a_large_chunk() -> None:
    planner = _policy().planner
    assert planner.max_tokens([], {_reader(6000): 6000, _reader(80): 80}, 512) == 64


@pytest.mark.parametrize("most", [512, 511, 2048, 300, 20, 1, 0])
def test_chunks_stay_large_enough_to_be_worth_a_pass(most: int) -> None:
    """On this machine every row costs as much as a pass over one."""
    planner = AutoPolicy(make_costs([float(size) for size in SIZES]), why_off="off").planner
    least = planner.max_tokens([make_span().request], {_reader(6000): 6000}, most)
    assert least == min(32, most)


def test_chunks_are_smaller_where_passes_over_prompts_take_longer_than_their_size_tells() -> None:
    policy, long = _policy(), _reader(6000)
    one = make_span().request
    for _ in range(10):  # twice as long: attention to a long context, say
        policy.observe(make_record(num_requests=2, num_rows=65, target_time=2 * 65 / 8), [])
    assert policy.planner.max_tokens([one], {long: 6000}, 512) == 32
    assert policy.costs.target(1) == 1.0, "what is known of other passes does not change"
    for _ in range(10):
        policy.observe(make_record(num_requests=2, num_rows=33, target_time=33 / 8), [])
    assert policy.planner.max_tokens([one], {long: 6000}, 512) == 64


def test_a_target_decides_in_place_of_the_tenth() -> None:
    planner = _policy().planner
    planner.clock = lambda: 1000.0
    decoding = make_request("a", range(10), SamplingParams(temperature=0.0, max_tokens=6, slo=SLO(tpot=100_000.0)))
    decoding.token_ids += [1] * 5
    decoding.times.first_token = 1000.0 - 4 * 100.0
    long = _reader(6000)
    assert planner.max_tokens([decoding], {long: 6000}, 512) == 512
    assert planner.max_tokens([decoding, make_span().request], {long: 6000}, 512) == 64


def _beside_a_long_prompt(
    costs: CostModel, known: CostModel, *, speculates: bool = False
) -> tuple[list[StepRecord], float, float]:
    """Serve an output, a prompt of 6,000 tokens beside it, and then a short one.

    Args:
        costs: Costs of the machine.
        known: What the policy knows of them.

    Returns:
        The steps in which the long prompt was read, and the times to the first token of the long and the short one.
    """
    policy = AutoPolicy(known) if speculates else AutoPolicy(known, why_off="off")
    drafting = SimulatedDrafting(costs, 0.6, seed=0)
    server = SimulatedServer(MachineCosts(costs), drafting, policy, policy.planner)
    requests, plain = [], float(costs.target(1))
    for num_prompt, num_output, after in ((10, 1500, 0), (6000, 1, 100), (80, 5, 150)):
        params = SamplingParams(temperature=0.0, max_tokens=num_output)
        request = make_request(str(num_prompt), range(num_prompt), params, cache_salt=None)
        request.times.arrival = 1.0 + after * plain
        requests.append(request)
    server.run(requests)
    steps, now = list[StepRecord](), 1.0
    for step in server.steps:
        if requests[1].times.arrival <= now < (requests[1].times.first_token or 0.0):
            steps.append(step)
        now += step.time
    return steps, _ttft(requests[1]), _ttft(requests[2])


def _ttft(request: Request) -> float:
    assert request.times.first_token is not None
    return request.times.first_token - request.times.arrival


@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "trees"])
@pytest.mark.parametrize("name", MACHINES)
def test_decoding_keeps_a_tenth_of_its_speed_beside_a_long_prompt(name: str, speculates: bool) -> None:
    costs = roofline_costs(*MACHINES[name])
    known = CostModel.from_dict(costs.as_dict())
    steps, long, short = _beside_a_long_prompt(costs, known, speculates=speculates)
    plain, useful = float(costs.target(1)), float(costs.target(34))
    assert max(step.time for step in steps) <= 1.1 * max(10 * plain, useful)
    assert short < 60 * plain
    assert long < 1.6 * 6000 / 512 * float(costs.target(512)), "it is read nearly as fast as alone"


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_a_wrong_cost_of_prompts_is_corrected_by_the_first_chunks(factor: float) -> None:
    """Larger sizes may not have been measured, and a row costs more beyond."""
    costs = roofline_costs(*MACHINES["48 GB/s"])
    sizes, seconds = costs.target.sizes, costs.target.seconds.copy()
    small = sizes <= 32
    known = CostModel(Curve(sizes[small], seconds[small]), costs.draft_level)
    seconds[~small] = seconds[small][-1] + factor * (seconds[~small] - seconds[small][-1])
    true = CostModel(Curve(sizes, seconds), costs.draft_level)
    steps, *_ = _beside_a_long_prompt(true, known)
    late = [step for step in steps if step.time > 1.2 * max(10 * float(true.target(1)), float(true.target(34)))]
    assert len(late) <= 5
    assert len(late) < len(steps) / 10
