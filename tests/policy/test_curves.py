"""Curves of costs: interpolation between measured sizes, what is learned of them, and attention to contexts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.model.pass_work import PassWork
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import MAX_RATIO, ContextCurve, Curve
from tests.policy.simulated_machines import FEW, flat, make_record


def test_between_measured_sizes_lines_are_straight() -> None:
    curve = Curve([1, 3, 7], [1.0, 2.0, 4.0])
    assert curve([1, 2, 3, 5, 7]).tolist() == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert float(curve(0)) == 1.0
    assert curve(np.array([[1, 7]])).shape == (1, 2)


def test_beyond_what_was_measured_every_token_costs_its_share() -> None:
    curve = flat(1.0)
    assert curve([64, 640, 65]).tolist() == pytest.approx([1.0, 10.0, 65 / 64])


def test_more_never_costs_less() -> None:
    """A larger size that was measured as cheaper was a stroke of luck."""
    assert Curve([1, 2, 4], [3.0, 1.0, 5.0])([1, 2, 4]).tolist() == [3.0, 3.0, 5.0]


@given(
    st.lists(st.floats(1e-5, 10), min_size=len(FEW), max_size=len(FEW)),
    st.lists(st.tuples(st.integers(1, 200), st.floats(1e-6, 100)), max_size=20),
)
def test_whatever_is_observed_more_never_costs_less(seconds: list[float], observed: list[tuple[int, float]]) -> None:
    curve = Curve(FEW, seconds)
    for num_tokens, time in observed:
        before = curve(range(1, 300))
        curve.observe(num_tokens, time)
        after = curve(range(1, 300))
        assert (np.diff(after) >= -1e-12 * after[1:]).all()
        assert (after > 0).all()
        assert (after <= before * MAX_RATIO).all()


@pytest.mark.parametrize("size", [1, 5, 64, 200])
def test_a_cost_that_stays_is_learned(size: int) -> None:
    curve = flat(1.0)
    for _ in range(300):
        curve.observe(size, 2.5)
    assert float(curve(size)) == pytest.approx(2.5, rel=0.02)


def test_one_slow_step_does_not_count_much() -> None:
    curve = flat(1.0)
    curve.observe(8, 1000.0)
    assert float(curve(8)) < 1.3
    assert float(curve(1)) < 1.3


def test_a_slow_while_does_not_make_other_sizes_seem_cheap() -> None:
    curve = Curve([1, 8, 12, 16], [1.0, 1.1, 1.2, 1.5])
    for _ in range(50):
        curve.observe(9, 2.0 * 1.125)  # twice what it takes in quiet
    assert 1.9 < float(curve(8)) / 1.1 < 2.1
    assert float(curve(1)) > 1.7
    assert float(curve(16)) / float(curve(8)) > 1.25  # 1.36 in quiet
    for _ in range(50):
        curve.observe(9, 1.125)
    assert [round(float(curve(size)), 1) for size in (1, 8, 12, 16)] == [1.0, 1.1, 1.2, 1.5]


def test_both_neighbours_of_an_observed_size_learn_most() -> None:
    """A pass over 3 tokens took twice as long as expected: 2 and 4 learn at the full rate, the others at 0.9 of it."""
    curve = Curve([1, 2, 4, 8], [1.0, 1.0, 1.0, 1.2])
    curve.observe(3, 2.0)
    assert curve.seconds.tolist() == pytest.approx([1.09, 1.1, 1.1, 1.2 * 1.09])


def test_a_cost_measured_under_load_is_soon_forgotten() -> None:
    curve = flat(20.0)
    for _ in range(6):
        curve.observe(8, 1.0)
    assert float(curve(8)) < 2.0


def with_context(num_tokens: int, num_requests: int = 1) -> ContextCurve:
    """Passes over 1 and 8 rows in 1.0 and 1.2 s, which read a token in 0.0009 s, and attend to it in 0.0001 s a row."""
    curve = ContextCurve([1, 8], [1.0, 1.2], 0.0009, 0.0001)
    curve.follow(num_tokens, num_requests)
    return curve


def test_passes_also_attend_to_their_contexts() -> None:
    assert with_context(0)([1, 8]).tolist() == [1.0, 1.2]
    assert with_context(1000)([1, 8]).tolist() == pytest.approx([2.0, 2.9])
    assert float(with_context(1000, num_requests=8)(8)) == pytest.approx(2.2)  # each request has one row


def test_attention_is_assumed_to_read_and_compute_as_passes_do() -> None:
    """A pass reads 10 bytes a second, and computes an operation in 0.01 s, attention one in 0.02 s."""
    work = PassWork(weight_bytes=10, token_bytes=2, row_flops=5.0, pair_flops=3.0)
    curve = ContextCurve.assumed(Curve([1, 8, 10], [1.0, 1.0, 1.1]), work)
    assert (curve.read_token, curve.attend_token) == pytest.approx((0.2, 0.06))


@pytest.mark.parametrize(("read", "attend"), [(0.5, 2.0), (2.0, 0.5), (2.0, 2.0), (0.5, 0.5)])
def test_passes_of_two_sizes_show_what_reading_and_what_computing_takes(read: float, attend: float) -> None:
    costs, true = (
        CostModel(with_context(0), flat(0.1)),
        ContextCurve([1, 8], [1.0, 1.2], 0.0009 * read, 0.0001 * attend),
    )
    true.follow(9000, 1)
    for rows in 60 * [1, 8]:
        seconds = float(true(rows))
        costs.observe(make_record(num_rows=rows, num_guessed=rows - 1, target_time=seconds, num_context=9000))
    costs.follow(9000, 1)
    assert costs.step(1, [0, 7], 0).tolist() == pytest.approx(true([1, 8]).tolist(), rel=0.05)
    assert float(costs.step(1, 3, 0)) == pytest.approx(float(true(4)), rel=0.12)  # it was not seen
    assert not costs.is_doubtful


def test_attention_that_takes_longer_than_assumed_does_not_make_short_contexts_seem_slow() -> None:
    costs = CostModel(with_context(0), flat(0.1))
    for _ in range(60):
        costs.observe(make_record(target_time=1.0 + 8.0, num_context=4000))
    assert float(costs.target(1)) == pytest.approx(9.0, rel=0.02)
    assert not costs.is_doubtful
    costs.observe(make_record())
    assert float(costs.target(1)) == pytest.approx(1.0, rel=0.1)


def test_with_short_contexts_the_time_of_attention_is_hardly_changed() -> None:
    passes = with_context(0)
    costs = CostModel(passes, flat(0.1))
    for _ in range(60):
        costs.observe(make_record(target_time=1.2, num_context=10))
    assert passes.read_token + passes.attend_token == pytest.approx(0.001, rel=0.05)
    assert float(costs.target(1)) == pytest.approx(1.2, rel=0.02)


def test_a_pass_that_is_measured_again_counts_without_its_context() -> None:
    costs, step = CostModel(with_context(1000), flat(0.1)), make_record(target_time=3.0, num_context=1000)
    assert costs.without_context(step).target_time == pytest.approx(1.5)
    costs.adopt(Curve([1, 8], [1.5, 1.8]))
    assert float(costs.target(1)) == pytest.approx(2.5)
