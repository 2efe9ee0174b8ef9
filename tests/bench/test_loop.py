"""The loop: arms take turns in rotating orders, warm-up is not kept, and outputs that differ are found."""

from dataclasses import replace

import pytest

from specinfer.bench.comparisons import Comparison
from specinfer.bench.loop import Turn, batches, check_equal, take_turns
from specinfer.bench.options import PLAIN, rotated
from specinfer.bench.results import Arm, Run
from specinfer.reporting.progress_bar import stage_bar

RUN = Run(0, (3,), 1.0, 2.0, 3.0, ((1, 2, 3),))


def test_batches_use_all_prompts_and_start_again_where_there_are_too_few() -> None:
    assert list(batches(5, 2, 5)) == [(0, 1), (2, 3), (4, 0)]
    assert list(batches(2, 4, 4)) == [(0, 1, 2, 3)]


def test_values_are_rotated() -> None:
    assert rotated("abc", 1) == ("b", "c", "a")
    assert rotated("abc", -1) == ("c", "a", "b")


def test_runs_are_kept_by_batch_size_and_arm_but_not_those_of_the_warm_up() -> None:
    turns = [Turn(-1, (3,), (PLAIN, "1")), Turn(0, (3,), (PLAIN, "1")), Turn(0, (3, 4), ("1", PLAIN))]
    order: list[tuple[int, str]] = []

    def measure(turn: Turn, name: str) -> Run:
        order.append((turn.repeat, name))
        return replace(RUN, repeat=turn.repeat, prompts=turn.prompts)

    with stage_bar(None) as progress:
        runs = take_turns(turns, progress, measure)
    assert order == [(-1, PLAIN), (-1, "1"), (0, PLAIN), (0, "1"), (0, "1"), (0, PLAIN)]
    assert {key: [run.repeat for run in kept] for key, kept in runs.items()} == {
        (1, PLAIN): [0], (1, "1"): [0], (2, PLAIN): [0], (2, "1"): [0],
    }  # fmt: skip


def test_an_output_that_differs_is_named() -> None:
    turn = Turn(0, (3,), (PLAIN, "1"))
    check_equal(turn, {PLAIN: RUN, "1": RUN})
    with pytest.raises(RuntimeError, match="prompt 3: with tree 1, output token 2 is another than without"):
        check_equal(turn, {PLAIN: RUN, "1": replace(RUN, outputs=((1, 2, 4),))})


def test_a_comparison_is_of_pairs() -> None:
    slow, fast = replace(RUN, time=4.0), replace(RUN, time=1.0)
    result = Comparison(Arm(PLAIN, (slow, fast)), (Arm("1", (fast, fast)), Arm("2", (slow, slow))))
    assert result.speedup_of(result.arm("1")).max == 4.0
    assert result.best.name == "1"
    assert result.partings(result.arm("1")) == []
    assert result.of({5}).plain.runs == ()
