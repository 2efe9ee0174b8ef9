"""Shapes of trees on a device: small, and large enough; and how many levels pay."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.core.tree import OFF, TreeBudget, expansion_nodes
from specinfer.drafters.kind import DraftKind
from specinfer.engine.device.budgets import LevelProbs
from specinfer.engine.device.draft_shape import LEVELS, NODES, PLAIN, holds, holds_expansion, shape_of

best_first = st.builds(
    lambda nodes, depth: TreeBudget(nodes, min(nodes, depth)), st.integers(1, 256), st.integers(1, 32)
)
expansions = (
    st.lists(st.integers(1, 4), min_size=1, max_size=5)
    .filter(lambda widths: expansion_nodes(widths) <= NODES[-1])
    .map(TreeBudget.expansion)
)


@given(st.lists(best_first | expansions | st.just(OFF), min_size=1, max_size=5))
def test_a_shape_holds_every_budget(budgets: list[TreeBudget]) -> None:
    assert all(map(holds, budgets))
    shape = shape_of(budgets, 10**6, 10**6)
    if not shape.num_nodes:
        assert not any(budget.max_nodes for budget in budgets)
        return
    for budget in budgets:
        assert shape.num_levels >= budget.max_depth
        width = 1
        for level, each in enumerate(budget.widths):
            assert shape.frontiers[level] >= width
            assert shape.children[level] >= each
            width *= each
        if budget.widths:
            assert shape.num_nodes >= budget.max_nodes
    if all(budget.widths for budget in budgets):
        assert shape.num_nodes == max(budget.max_nodes for budget in budgets)


@given(best_first | expansions, best_first | expansions)
def test_a_shape_that_holds_another_one_holds_its_trees(first: TreeBudget, second: TreeBudget) -> None:
    alone, both = shape_of([first], 10**6, 10**6), shape_of([first, second], 10**6, 10**6)
    assert both.holds(alone)
    assert alone.holds(both) == (alone == both)


def test_few_shapes_serve_all_sizes_of_trees() -> None:
    shapes = {shape_of([TreeBudget(nodes, depth)], 256, 256) for nodes in range(1, 257) for depth in range(1, 33)}
    assert len(shapes) <= len(NODES) * len(LEVELS)


@pytest.mark.parametrize("num_requests", [1, 2, 8, 32, 64, 128])
def test_trees_with_their_roots_fill_the_blocks_of_kernels(num_requests: int) -> None:
    """Kernels take 16, 32 or 64 rows together, so one more row may cost as much as a block."""
    most = 256 // num_requests
    for rows in (2, 4, 8, 16, 32, 64, 128, 256):
        shape = shape_of([TreeBudget(rows - 1, 8)], most - 1, most)
        assert 1 + shape.num_nodes == min(rows, most)


def test_an_expansion_has_its_own_shape() -> None:
    shape = shape_of([TreeBudget.expansion((3, 2, 1))], 100, 100)
    assert (shape.frontiers, shape.children, shape.num_nodes) == ((1, 3, 6), (3, 2, 1), 15)


@pytest.mark.parametrize(("guess_depth", "num_known"), [(0, 4), (7, 8)])
def test_a_drafter_that_reads_whole_paths_has_a_column_for_each_token(guess_depth: int, num_known: int) -> None:
    kinds = [DraftKind(), DraftKind(reads_paths=True)]
    shape = shape_of([TreeBudget.expansion((3, 2, 1))], 100, 100, guess_depth, kinds)
    assert shape.num_columns == num_known + 3 + 6
    own = shape.of_model(1)
    assert (own.num_known, own.num_columns) == (num_known, shape.num_columns)
    assert own.first_columns == (0, num_known, num_known + 3)
    assert shape.of_model(0).num_columns == 2 + 3 + 6, "a small model beside it reads two"


def test_a_block_has_columns_of_its_own_and_ends_the_levels() -> None:
    block = DraftKind(reads_paths=True, block=range(6), max_depth=2)
    shape = shape_of([TreeBudget.expansion((3, 2, 1))], 100, 100, kinds=[block])
    assert (shape.frontiers, shape.num_nodes, shape.num_candidates) == ((1, 3), 9, 9)
    assert (shape.num_known, shape.num_columns) == (3, 3 + 6)
    assert holds_expansion(shape, TreeBudget.expansion((3, 2, 1)))
    shape = shape_of([TreeBudget.expansion((3, 2, 1))], 100, 100, kinds=[block, DraftKind()])
    assert (shape.num_levels, shape.num_candidates) == (3, 9 + 15)
    first, second = shape.of_model(0), shape.of_model(1)
    assert (first.num_levels, first.num_nodes, first.num_known) == (2, 9, 4), "a path of the other is longer"
    assert (second.num_levels, second.num_guesses) == (3, 9)


@given(st.lists(best_first | expansions, min_size=1, max_size=3), st.integers(0, 40), st.integers(1, 20))
def test_shapes_keep_to_the_free_slots(budgets: list[TreeBudget], nodes: int, frontier: int) -> None:
    shape = shape_of(budgets, nodes, frontier)
    assert (shape == PLAIN) == (nodes == 0)
    if shape != PLAIN:
        assert shape.num_levels <= shape.num_nodes <= nodes
        assert max(shape.frontiers) <= frontier


@pytest.mark.parametrize("budget", [TreeBudget(257, 3), TreeBudget(20, 33)])
def test_what_is_too_large_has_no_shape(budget: TreeBudget) -> None:
    assert not holds(budget)


# -------------------------------------------------------------------------------------------- levels


def _depth(path_prob: LevelProbs, min_gain: float, *, requests: int = 1, chance: float = 0.5) -> int:
    return path_prob.cut([TreeBudget(64, 32, min_gain=min_gain)] * requests, chance)[0].max_depth


def test_levels_that_yield_less_than_they_cost_are_left_out() -> None:
    path_prob = LevelProbs()
    assert _depth(path_prob, 0.3) == 32, "nothing is known yet"
    path_prob.observe(np.array([[1.0, 0.8, 0.4, 0.1]], dtype=np.float32))
    # A level yields half of what its nodes are worth: 0.4, 0.2, 0.05
    assert [_depth(path_prob, gain) for gain in (0.41, 0.3, 0.1)] == [1, 2, 3]
    assert _depth(path_prob, 0.3, requests=2) == 3, "a level serves all requests"
    # Below the last one it is expected to fall as it fell: 0.0125, 0.003, ...
    assert _depth(path_prob, 0.01) == 5
    fixed, off = TreeBudget.expansion((1, 1, 1)), OFF
    assert path_prob.cut([fixed, off, TreeBudget(64, 32, min_gain=9.0)], 0.5)[:2] == [fixed, off]


def test_the_measured_gain_of_levels_is_followed() -> None:
    path_prob = LevelProbs()
    path_prob.observe(np.array([[1.0, 0.2]], dtype=np.float32))
    before = _depth(path_prob, 0.2)
    for _ in range(40):
        path_prob.observe(np.array([[1.0, 0.9, 0.8]], dtype=np.float32))
    assert before == 1
    assert _depth(path_prob, 0.2) > 3
    path_prob.observe(np.zeros((0, 5), dtype=np.float32))  # a step in which nobody guessed
    assert _depth(path_prob, 0.2) > 3


def test_levels_that_are_left_out_are_tried_again() -> None:
    """What was known of them once, as before anything was learned of the drafter, does not leave them out for ever."""
    path_prob = LevelProbs()
    path_prob.observe(np.array([[1.0, 0.9, 0.8, 0.01]], dtype=np.float32))
    before = _depth(path_prob, 0.1)
    for _ in range(60):
        path_prob.observe(np.array([[1.0, 0.9, 0.8]], dtype=np.float32))
    assert before == 3
    assert _depth(path_prob, 0.1) > 3
    for _ in range(20):
        path_prob.observe(np.array([[1.0, 0.9, 0.8, 0.01]], dtype=np.float32))
    assert _depth(path_prob, 0.1) == 3
