"""Cost model: interpolation between measured sizes, and what a step teaches about each part."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import Draw, TokenTree
from specinfer.engine.timer import StageClock
from specinfer.model.pass_work import PassWork
from specinfer.policy import streamed_costs
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import MAX_RATIO, ContextCurve, Curve
from specinfer.policy.streamed_costs import StreamedCurve, measure_streamed
from tests.policy.simulated_machines import StreamedTarget

FEW = (1, 2, 4, 8, 16, 32, 64)


def flat(seconds: float, sizes: Sequence[int] = FEW) -> Curve:
    return Curve(sizes, [seconds] * len(sizes))


def record(rows: int, levels: int, target: float, draft: float = 0.0, rest: float = 0.0, read: int = 0) -> StepRecord:
    """A step of one request."""
    return StepRecord(1, rows, rows - 1, levels, 1, read, draft, target, rest)


# ---------------------------------------------------------------------------------------- curves


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


# ------------------------------------------------------------------------------------- contexts


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
        costs.observe(replace(record(rows, 0, float(true(rows))), num_context=9000))
    costs.follow(9000, 1)
    assert costs.step(1, [0, 7], 0).tolist() == pytest.approx(true([1, 8]).tolist(), rel=0.05)
    assert float(costs.step(1, 3, 0)) == pytest.approx(float(true(4)), rel=0.12)  # it was not seen
    assert not costs.is_doubtful


def test_attention_that_takes_longer_than_assumed_does_not_make_short_contexts_seem_slow() -> None:
    costs = CostModel(with_context(0), flat(0.1))
    for _ in range(60):
        costs.observe(replace(record(1, 0, 1.0 + 8.0), num_context=4000))
    assert float(costs.target(1)) == pytest.approx(9.0, rel=0.02)
    assert not costs.is_doubtful
    costs.observe(record(1, 0, 1.0))
    assert float(costs.target(1)) == pytest.approx(1.0, rel=0.1)


def test_with_short_contexts_the_time_of_attention_is_hardly_changed() -> None:
    passes = with_context(0)
    costs = CostModel(passes, flat(0.1))
    for _ in range(60):
        costs.observe(replace(record(1, 0, 1.2), num_context=10))
    assert passes.read_token + passes.attend_token == pytest.approx(0.001, rel=0.05)
    assert float(costs.target(1)) == pytest.approx(1.2, rel=0.02)


def test_a_pass_that_is_measured_again_counts_without_its_context() -> None:
    costs, step = CostModel(with_context(1000), flat(0.1)), replace(record(1, 0, 3.0), num_context=1000)
    assert costs.without_context(step).target_time == pytest.approx(1.5)
    costs.adopt(Curve([1, 8], [1.5, 1.8]))
    assert float(costs.target(1)) == pytest.approx(2.5)


# ----------------------------------------------------------------------------------------- steps


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
    tree = TokenTree.chain(0, range(1, 31), "suffix")
    draws = (*tree.draws, *(Draw(node, "draft") for node in (1, 2)))
    request = Request("a", [0], SamplingParams(temperature=0.0), seed=0)
    clock = StageClock()
    clock.seconds |= {"draft": 0.2, "target": 1.0}
    for made, levels in ((tree, 0), (TokenTree(tree.tokens, tree.parents, draws), 2), (TokenTree.root(0), 0)):
        step = StepRecord.from_step([Span(request, 0, 1)], [made], 1, 0, clock.seconds)
        assert step.num_model_levels == levels
        costs.observe(step)
        assert float(costs.draft_level(1)) == pytest.approx(0.1)
    costs.observe(replace(step, num_model_levels=None, num_levels=4, num_guessed=4))
    assert float(costs.draft_level(1)) < 0.1, "what is not told apart counts as before"


# ------------------------------------------------------------------------------------ stored costs


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


# --------------------------------------------------------------------------------- streamed targets


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
