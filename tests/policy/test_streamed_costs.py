"""Costs of passes whose weights are read each time: where the curve bends, and what steps show of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.policy import streamed_costs
from specinfer.policy.streamed_costs import StreamedCurve, measure_streamed
from tests.policy.simulated_machines import StreamedTarget


def measured(stream: StreamedTarget) -> StreamedCurve:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed_costs, "perf_counter", lambda: stream.now)
        return measure_streamed(streamed_costs.SIZES, stream.run, lambda: stream.seconds_waiting)


def observed(curve: StreamedCurve, stream: StreamedTarget, size: int) -> None:
    before, waited = stream.now, stream.seconds_waiting
    stream.run(size)
    curve.observe(size, stream.now - before, stream.seconds_waiting - waited)


@given(st.integers(30, 2000), st.floats(0.3, 300.0))
def test_a_streamed_targets_curve_bends_where_computing_takes_longer(bend: int, read: float) -> None:
    """Few passes tell it, however slow they are."""
    stream = StreamedTarget(read / bend, read)
    curve = measured(stream)
    assert 2 <= len(stream.sizes) <= 3
    assert len(stream.sizes) == 2 or stream.now < 2 * 30 + max(read, stream.true(256))
    for size in (1, 16, 64, 100, 200, 400, 511):
        assert float(curve(size)) == pytest.approx(stream.true(size), rel=0.12)
    assert curve.bend == pytest.approx(bend, rel=0.12)


def test_a_slow_moment_of_the_disk_is_no_bend() -> None:
    """A pass that took longer, but waited all the longer, says nothing of what rows cost."""
    stream = StreamedTarget(0.015)
    run = stream.run

    def disturbed(size: int) -> None:
        run(size)
        if size == 128:
            stream.now, stream.seconds_waiting = stream.now + 2.0, stream.seconds_waiting + 2.0

    stream.run = disturbed  # type: ignore[method-assign]
    curve = measured(stream)
    assert curve.bend > 240
    assert float(curve(200)) < 1.3 * float(curve(1))


def test_a_streamed_targets_curve_follows_what_steps_take() -> None:
    """Rows that cost more, since contexts are long, and a disk that became slower; and back."""
    curve = measured(StreamedTarget(0.01))
    assert curve.bend == pytest.approx(400, rel=0.05)
    for row, read in ((0.04, 8.0), (0.01, 2.0), (0.005, 4.0)):
        stream = StreamedTarget(row, read)
        for size in (17, 90, 130, 60) * 15:
            observed(curve, stream, size)
        for size in (1, 100, 200):
            assert float(curve(size)) == pytest.approx(stream.true(size), rel=0.15)


def test_where_the_bend_lies_shows_beyond_it_too() -> None:
    curve = measured(StreamedTarget(0.002, 1.0))
    assert curve.bend == pytest.approx(500, rel=0.1)
    slow = StreamedTarget(0.02, 1.0)
    for _ in range(60):
        observed(curve, slow, 200)
    assert float(curve(200)) == pytest.approx(4.0, rel=0.1)
    assert float(curve(50)) < 2.5, "fewer rows cost less again"


@given(
    st.lists(st.tuples(st.integers(1, 512), st.floats(1e-3, 1e3), st.floats(0, 1e3)), min_size=1, max_size=12),
    st.integers(1, 12),
)
def test_a_streamed_targets_curve_is_a_cost_whatever_is_seen(
    seen: list[tuple[int, float, float]], num_first: int
) -> None:
    passes = [streamed_costs.Pass(rows, seconds, min(waited, seconds)) for rows, seconds, waited in seen]
    curve = StreamedCurve(passes[:num_first])
    for rows, seconds, waited in seen[num_first:]:
        curve.observe(rows, seconds, waited)
    costs = curve([1, 2, 16, 300, 5000])
    assert np.isfinite(costs).all()
    assert (costs > 0).all()
    assert (np.diff(costs) >= 0).all()
    assert StreamedCurve.from_dict(curve.as_dict()).as_dict() == curve.as_dict()
