"""SizeChoice: what steps run in, and when it is captured."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from on_device import CPU
from specinfer.core.tree import TreeBudget
from specinfer.engine.device import draft_shape
from specinfer.engine.device.captured_sizes import CapturedSizes, SizeChoice
from specinfer.engine.device.draft_shape import shape_of
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.processing import Processing
from specinfer.model.graphs.capture import Graphs

CAPTURE = 0.1


def _size(rows: int, nodes: int, levels: int, processing: Processing = Processing.NONE) -> LaunchSize:
    return LaunchSize(rows, shape_of([TreeBudget(nodes, levels)], 63, 64), processing)


PLAIN, SMALL, LARGE = LaunchSize(1, draft_shape.PLAIN), _size(1, 8, 4), _size(1, 64, 8)


def _choose(choice: SizeChoice, wanted: LaunchSize, *ready: LaunchSize, most_nodes: int = 64) -> LaunchSize | None:
    return choice.choose(wanted, ready, most_nodes, CAPTURE)


def test_a_size_is_captured_once_larger_ones_have_cost_as_much_as_that() -> None:
    choice = SizeChoice()
    choice.observe(LARGE, 0.0201)
    choice.observe(LaunchSize(1, shape_of([TreeBudget(4, 2)], 63, 64)), 0.010)  # less than what is wanted takes
    ready = (LaunchSize(1, shape_of([TreeBudget(4, 2)], 63, 64)), LARGE)
    sizes = [_choose(choice, SMALL, *ready) for _ in range(12)]
    assert sizes == [LARGE] * 9 + [SMALL] * 3, "10 ms are lost in each step"
    assert _choose(choice, SMALL, *ready, SMALL) == SMALL
    choice.forget(SMALL)
    assert _choose(choice, SMALL, *ready) == LARGE


def test_nothing_is_captured_for_steps_that_would_not_be_shorter() -> None:
    choice = SizeChoice()
    choice.observe(LARGE, 0.010)
    choice.observe(_size(1, 4, 2), 0.010)
    assert {_choose(choice, SMALL, _size(1, 4, 2), LARGE) for _ in range(1000)} == {LARGE}


def test_the_smallest_that_holds_the_trees_and_has_slots_is_taken() -> None:
    middle = _size(2, 16, 4)
    assert _choose(SizeChoice(), SMALL, PLAIN, LARGE, middle) == middle
    assert _choose(SizeChoice(), SMALL, PLAIN, LARGE, middle, most_nodes=10) == SMALL


def test_other_processing_is_captured_with_trees_that_are_ready() -> None:
    """Then the steps that follow, whose trees differ, need no further captures."""
    wanted = _size(1, 8, 4, Processing.TRUNCATION)
    assert _choose(SizeChoice(), wanted, PLAIN, SMALL, LARGE) == wanted
    assert _choose(SizeChoice(), wanted, PLAIN, LARGE) == _size(1, 64, 8, Processing.TRUNCATION)
    assert _choose(SizeChoice(), wanted, PLAIN) == wanted


def test_trees_that_fit_no_size_are_cut_until_that_has_cost_as_much_as_a_capture() -> None:
    choice, wanted, many = SizeChoice(), _size(1, 64, 16), _size(4, 64, 8)
    choice.observe(LARGE, 0.101)
    ready = (PLAIN, SMALL, LARGE, many)
    sizes = [choice.choose(wanted, ready, 64, CAPTURE, may_cut=True) for _ in range(12)]
    assert sizes == [LARGE] * 9 + [wanted] * 3, "a tenth of each step is lost"
    assert _choose(SizeChoice(), wanted, *ready) == wanted, "fixed expansions are not cut"
    assert SizeChoice().choose(wanted, (PLAIN,), 64, CAPTURE, may_cut=True) == wanted


def test_sizes_without_memory_are_not_tried_again_until_weights_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "median_seconds", CAPTURE)
    runner: Any = SimpleNamespace(num_replaced=0)
    sizes, wide, deep = CapturedSizes[Any](Graphs(CPU), [runner], "steps"), _size(1, 32, 4), _size(1, 32, 16)

    def capture(size: LaunchSize) -> Any:
        if size.holds(wide):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(parts=())

    def choose(wanted: LaunchSize, *, may_cut: bool = False) -> LaunchSize | None:
        return sizes.choose(wanted, 64, num_captures=1, may_cut=may_cut)

    sizes.of(SMALL, capture)
    assert choose(wide) == wide
    with pytest.raises(torch.OutOfMemoryError):
        sizes.of(wide, capture)
    assert choose(wide) is choose(deep) is choose(_size(2, 32, 4)) is None
    assert choose(PLAIN) == PLAIN, "is captured now"
    for _ in range(100):
        assert choose(deep, may_cut=True) == SMALL, "whatever is lost"
        sizes.observe(SMALL, CAPTURE)
    assert choose(replace(deep, processing=Processing.TRUNCATION)) is None
    runner.num_replaced += 1
    assert choose(deep) == deep


def test_after_a_change_of_the_weights_the_size_that_is_wanted_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a larger one that was ready before."""
    monkeypatch.setattr(Graphs, "median_seconds", CAPTURE)
    runner: Any = SimpleNamespace(num_replaced=0)
    sizes, captured = CapturedSizes[Any](Graphs(CPU), [runner], "steps"), list[LaunchSize]()

    def capture(size: LaunchSize) -> Any:
        captured.append(size)
        return SimpleNamespace(parts=())

    sizes.of(LARGE, capture)
    assert sizes.choose(SMALL, 64, num_captures=1) == LARGE
    runner.num_replaced += 1
    assert sizes.choose(SMALL, 64, num_captures=1) == SMALL
    sizes.of(SMALL, capture)
    assert captured == [LARGE, SMALL]
