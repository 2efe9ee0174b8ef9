"""The acceptance model: the probability of each rank, and the expected tokens of best-first trees."""

import heapq
from collections.abc import Sequence

import numpy as np
import pytest

from specinfer.core.tree import TokenTree
from specinfer.policy.acceptance import AcceptanceModel, expected_tokens
from specinfer.policy.rank_choice import TreeSizes
from specinfer.verify import Acceptance
from tests.policy.simulated_machines import WRONG


def test_the_worked_example_of_the_module() -> None:
    model = AcceptanceModel.assumed((0.5, 0.25))
    nodes, levels = np.array([0, 1, 2, 3, 4]), np.array([0, 1, 1, 2, 2])
    assert model.expected_tokens(nodes, levels).tolist() == [1.0, 1.5, 1.75, 2.0, 2.125]


def _best_tree(by_rank: Sequence[float], num_nodes: int, max_depth: int) -> float:
    """Return the expected tokens of the best tree, found node by node."""
    total, heap = 1.0, [(-prob, 1) for prob in by_rank]
    heapq.heapify(heap)
    for _ in range(min(num_nodes, 10**6) if max_depth else 0):
        if not heap:
            break
        negated, depth = heapq.heappop(heap)
        total -= negated
        if depth < max_depth:
            for prob in by_rank:
                heapq.heappush(heap, (negated * prob, depth + 1))
    return total


@pytest.mark.parametrize("by_rank", [(0.6, 0.12, 0.06, 0.04), (0.3, 0.25, 0.2, 0.15), (0.95, 0.01, 0.0, 0.0)])
def test_expected_tokens_are_those_of_the_best_trees(by_rank: tuple[float, ...]) -> None:
    sizes = TreeSizes()
    expected = expected_tokens(np.array(by_rank), sizes.num_nodes, sizes.num_levels)
    assert (sizes.num_nodes[0], sizes.num_levels[0], expected[0]) == (0, 0, 1.0), "the first is off"
    for nodes, levels, tokens in zip(sizes.num_nodes, sizes.num_levels, expected, strict=True):
        assert levels <= nodes <= sizes.max_nodes
        assert levels <= sizes.max_depth
        assert tokens == pytest.approx(_best_tree(by_rank, int(nodes), int(levels)))


def test_the_acceptance_of_ranks_is_learned_from_accepted_paths() -> None:
    acceptance = AcceptanceModel()
    tree = TokenTree((0, 5, 6, 7), (-1, 0, 0, 2))  # the second draft token is right, then there is none
    for _ in range(2000):
        acceptance.observe(tree, Acceptance((2,), 9))
    # The first draft token was wrong at both nodes, the second right where there was one.
    by_rank = acceptance.by_rank()
    assert by_rank[0] < 0.01
    assert by_rank[1] == pytest.approx(0.89, abs=0.02), "some probability is left for ranks that were never seen"
    for _ in range(3000):
        acceptance.observe(*WRONG)
    assert acceptance.by_rank().sum() < 0.01, "old observations fade"


def test_the_probabilities_of_all_ranks_add_up_to_at_most_one() -> None:
    acceptance = AcceptanceModel()
    assert 0.5 < acceptance.by_rank().sum() <= 1
    for tree in (TokenTree((0, 5), (-1, 0)), TokenTree((0, 5, 6), (-1, 0, 0))):
        for _ in range(1000):
            acceptance.observe(tree, Acceptance((tree.num_guessed,), 9))
    assert acceptance.by_rank().sum() <= 0.98 + 1e-9


def test_the_share_that_came_true_corrects_what_is_expected_of_texts_of_two_kinds() -> None:
    """One chain in five is accepted whole and the others not at all: most counted tokens are right, in few trees."""
    model = AcceptanceModel()
    chain = TokenTree((0,) * 9, (-1, *range(8)))
    yields = []
    for number in range(600):
        path = tuple(range(1, 9)) if number % 5 == 0 else ()
        model.observe(chain, Acceptance(path, 1))
        yields.append(1 + len(path))
    expected = model.expected_tokens(np.asarray([8]), np.asarray([8]))[0]
    model.share = 1.0
    uncorrected = model.expected_tokens(np.asarray([8]), np.asarray([8]))[0]
    assert abs(expected - np.mean(yields)) < abs(uncorrected - np.mean(yields))


def test_a_text_begins_with_what_came_true_of_the_easiest_ones_before() -> None:
    model, pair = AcceptanceModel(), TokenTree((0, 5), (-1, 0))

    def read(share: float, num_trees: int = 4) -> float:
        """Return what is expected of a text of which this share comes true."""
        model.begin_text()
        expected = model.share
        for _ in range(num_trees):
            model.observe(pair, Acceptance((), 9))
        model.share = share
        return expected

    begun = [read(0.4) for _ in range(16)]
    assert begun[:3] == [1.0] * 3, "one of the first texts may be easy"
    assert begun == sorted(begun, reverse=True)
    assert begun[-1] == pytest.approx(0.4)
    for _ in range(5):
        read(0.9)
    assert read(0.1, num_trees=3) == pytest.approx(0.9)
    assert read(0.1) == pytest.approx(0.9), "a text with few drafts teaches nothing"


def test_assumed_acceptance_has_bounds() -> None:
    assert AcceptanceModel.assumed((0.5, 0.2)).by_rank().tolist() == [0.5, 0.2]
    assert AcceptanceModel.assumed((1.0,)).by_rank().tolist() == [0.98]
    assert AcceptanceModel.assumed((0.0,)).by_rank().tolist() == [0.0]
