"""Cost model: what a step takes, what it teaches about each part, and costs in files."""

import math
from dataclasses import replace

import numpy as np
import pytest

from specinfer.core.step_record import StepRecord
from specinfer.policy import streamed_costs
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.streamed_costs import StreamedCurve
from tests.policy.simulated_machines import FEW, flat


def record(rows: int, levels: int, target: float, draft: float = 0.0, rest: float = 0.0, read: int = 0) -> StepRecord:
    """A step of one request."""
    return StepRecord(1, rows, rows - 1, levels, 1, read, draft, target, rest)


def test_the_worked_example_of_the_module() -> None:
    costs = CostModel(Curve([1, 5], [1.0, 1.4]), Curve([1, 5], [0.1, 0.1]))
    assert float(costs.step(1, 3, 2)) == pytest.approx(1.5)


def test_a_step_is_drafting_and_a_pass_and_the_rest() -> None:
    costs = CostModel(Curve([1, 64], [1.0, 64.0]), Curve([1, 64], [0.1, 6.4]))
    costs.rest = 0.5
    assert float(costs.step(1, 0, 0)) == pytest.approx(1.5)
    assert float(costs.step(2, 0, 0)) == pytest.approx(2.5)
    # Eight guesses of each request in four levels: two a level.
    assert float(costs.step(1, 8, 4)) == pytest.approx(4 * 0.2 + 9 + 0.5)
    assert float(costs.step(3, 24, 4)) == pytest.approx(4 * 0.6 + 27 + 0.5)
    assert costs.step(1, [0, 8], [0, 4]).tolist() == pytest.approx([1.5, 0.8 + 9.5])


def test_the_first_level_may_take_more_than_the_others() -> None:
    costs = CostModel(flat(1.0), flat(0.1), draft_start=0.3)
    assert costs.draft([0, 1, 4], [0, 1, 4]).tolist() == pytest.approx([0.0, 0.4, 0.7])
    assert float(costs.step(1, 4, 4)) == pytest.approx(1.7)
    assert float(costs.step(1, 0, 0)) == pytest.approx(1.0), "plain decoding drafts nothing"


def test_what_drafting_takes_before_its_levels_is_learned_apart_from_them() -> None:
    """After a pass of the target caches are cold: the first level is slower than it was when it was measured."""
    costs = CostModel(flat(1.0), flat(0.1))
    for step in range(4000):
        levels = 1 + step % 5
        costs.observe(record(1 + levels, levels, 1.0, draft=0.5 + 0.1 * levels))
    assert costs.draft_start == pytest.approx(0.5, rel=0.1)
    assert float(costs.draft_level(1)) == pytest.approx(0.1, rel=0.1)
    for _ in range(200):
        costs.observe(record(3, 2, 1.0, draft=0.0))
    assert costs.draft_start >= 0


@pytest.mark.parametrize("start", [0.0, 0.1, 0.6, 3.0])
def test_noise_of_drafting_times_moves_neither_the_start_nor_a_level_far_away(start: float) -> None:
    level, noise = 0.07, np.random.default_rng(0)
    costs = CostModel(flat(1.0), flat(level), draft_start=start)
    for _ in range(5000):
        levels = int(noise.integers(1, 4))
        costs.observe(record(1 + levels, levels, 1.0, (start + level * levels) * noise.lognormal(0.0, 0.3)))
    for levels in range(1, 6):
        assert float(costs.draft(levels, levels)) == pytest.approx(start + level * levels, rel=0.4)
    assert float(costs.draft_level(1)) > 0


def test_drafting_that_is_not_seen_follows_the_speed_of_passes() -> None:
    """Their ratio decides between drafting and plain decoding, and both were measured at the same time."""
    costs = CostModel(flat(2.0), flat(0.8), read_token=0.02, draft_start=0.2)
    for _ in range(50):
        costs.observe(record(1, 0, 1.0))
    assert float(costs.draft(2, 2)) == pytest.approx(0.9, rel=0.1)
    assert costs.read_token == pytest.approx(0.01, rel=0.1)
    for _ in range(50):  # what is seen counts more
        costs.observe(record(3, 2, 1.0, draft=1.8))
    assert float(costs.draft(2, 2)) == pytest.approx(1.8, rel=0.1)


def test_a_cost_that_grows_at_some_sizes_only_is_learned_there() -> None:
    costs = CostModel(flat(1.0), flat(0.01))
    for _ in range(200):
        costs.observe(record(1, 0, 1.0))
        costs.observe(record(32, 4, 4.0, draft=0.04))
    assert float(costs.step(1, 0, 0)) == pytest.approx(1.0, rel=0.1)
    assert float(costs.target(32)) == pytest.approx(4.0, rel=0.05)


def test_the_rest_is_learned() -> None:
    costs = CostModel(flat(1.0), flat(0.1))
    for _ in range(100):
        costs.observe(record(1, 0, 1.0, rest=0.25))
    assert costs.rest == pytest.approx(0.25, rel=0.01)
    assert costs.draft_level.seconds.tolist() == [0.1] * len(FEW), "nothing was drafted"


def test_the_time_of_reading_is_distinguished_from_that_of_levels() -> None:
    costs = CostModel(flat(1.0), flat(0.3))
    for _ in range(300):
        costs.observe(record(5, 4, 1.0, draft=0.4 + 100 * 0.02, read=100))
        costs.observe(record(5, 4, 1.0, draft=0.4))
    assert float(costs.draft_level(1)) == pytest.approx(0.1, rel=0.05)
    assert costs.read_token == pytest.approx(0.02, rel=0.05)


def test_reading_never_costs_less_than_nothing() -> None:
    costs = CostModel(flat(1.0), flat(0.3))
    costs.observe(record(5, 4, 1.0, draft=0.1, read=100))
    assert costs.read_token == 0.0


def test_a_lookups_long_chain_is_no_level_of_a_model() -> None:
    """Else a level would seem to cost nothing, and models would be asked for deep trees."""
    costs = CostModel(flat(1.0), Curve([1, 64], [0.1, 0.1]))
    step = record(31, 30, 1.0, draft=0.2)
    for levels in (0, 2, 0):
        costs.observe(replace(step, num_levels=30, num_model_levels=levels))
        assert float(costs.draft_level(1)) == pytest.approx(0.1)
    costs.observe(replace(step, num_model_levels=None, num_levels=4, num_guessed=4))
    assert float(costs.draft_level(1)) < 0.1, "what is not told apart counts as before"


@pytest.mark.parametrize(
    "target", [Curve(FEW, range(1, 8)), StreamedCurve([streamed_costs.Pass(1, 4.0, 3.5)])], ids=["held", "streamed"]
)
def test_costs_survive_a_file(target: Curve | StreamedCurve) -> None:
    costs = CostModel(target, flat(0.25), 0.125, 0.0625)
    again = CostModel.from_dict(costs.as_dict())
    assert again.as_dict() == costs.as_dict()
    assert float(again.step(3, 8, 4)) == float(costs.step(3, 8, 4))


GOOD = CostModel(flat(1.0), flat(0.1), 0.5).as_dict()


@pytest.mark.parametrize(
    "changes",
    [
        {"target": [[], []]},
        {"target": [[1, 2], [1.0]]},
        {"target": [[2, 1], [1.0, 1.0]]},
        {"target": [[0, 1], [1.0, 1.0]]},
        {"target": [[1, 2], [0.0, 1.0]]},
        {"target": [[1, 2], [1.0, math.nan]]},
        {"target": [[1, 2], [1.0, math.inf]]},
        {"target": {"passes": []}},
        {"target": {"passes": [[1, 1.0]]}},
        {"target": {"passes": [[1, 1.0, 2.0]]}},
        {"target": {"passes": [[0, 1.0, 0.0]]}},
        {"target": {"passes": [[1, math.nan, 0.0]]}},
        {"target": {"passes": [[1, 1.0, "long"]]}},
        {"target": {}},
        {"draft_level": [[1], ["fast"]]},
        {"draft_level": None},
        {"read_token": -1.0},
        {"read_token": math.nan},
        {"read_token": None},
        {"draft_start": -1.0},
        {"draft_start": math.inf},
    ],
    ids=repr,
)
def test_what_is_no_costs_is_not_taken_for_them(changes: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        CostModel.from_dict(GOOD | changes)
    with pytest.raises(KeyError):
        CostModel.from_dict({name: value for name, value in GOOD.items() if name not in changes})
