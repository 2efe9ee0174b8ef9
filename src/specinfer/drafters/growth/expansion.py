"""Growth of token trees, level by level, for all requests together.

The budget selects one of two ways. A fixed expansion <k1, ..., km> gives every node of a level its k children
(SpecInfer, arXiv 2305.09781, section 3). Best first takes the most promising drafted tokens below any node, within a
number of nodes. It ranks a token by the product of the acceptance probabilities along its path (OPT-Tree, arXiv
2406.17276, with probabilities learned from verification).

One pass of the drafter serves a whole level, so each level must decide what to take now and how many nodes to save for
tokens whose parents are still to come. Their path probabilities are estimated from how often drafted tokens of each
rank were accepted. Above a floor, everything present and everything expected fills the budget.

An example: 2 nodes, depth 2, and the first and second tokens of a node have been accepted with 1/2 and 1/4 so far.

- Level 1: the root's candidates are a (0.6) and b (0.3). Below a, tokens of 0.3 and 0.15 are expected, and below b of
  0.15 and 0.075. A floor above 0.3 lets in a alone; a floor of 0.3 would let in a, b and a's first child, which are
  more than 2. So a is taken, one node is saved, and b stays open.
- Level 2: the candidates of a are c (0.9) and d (0.05), with path probabilities 0.54 and 0.03. The last level saves
  nothing: the best of b, c and d is c, and the tree is a, c. If c had 0.2, its path would have 0.12, and b be taken.

Whether a token is taken depends only on what is known before it is drawn, so drawn trees stay exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import Draws, Floats
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeArrays, TreeBudget
from specinfer.drafters.growth.calibration import MIDDLE, Calibration, source
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.growth.guesses import DrawnFrom
from specinfer.drafters.growth.nodes import Bools, Ints, Nodes
from specinfer.drafters.growth.plain_growth import PlainGrowth, most_guesses
from specinfer.drafters.growth.subtree_size import BIN_EDGES
from specinfer.drafters.growth.wanted_nodes import Run, WantedNodes
from specinfer.ops.cpu.growth import GrowthCall, TreeRules
from specinfer.ops.cpu.library import library

BEST_FIRST_WIDTH = 8  # the largest number of children of a node, best first


@dataclass(slots=True)
class GrowingTree:
    """A tree of a batch while it grows. Nodes are numbered in the order they were added, from the root, 0.

    Its arrays are views of the batch's, which cannot be written; those of nodes to come are not set yet.
    """

    request: Request
    budget: TreeBudget
    drafter: str
    tree_batch: "TreeBatch" = field(init=False, repr=False)
    index: int = field(init=False)  # index of this tree in the batch
    computed: list[int] = field(default_factory=list)  # nodes with keys and values in the cache, except the root

    @property
    def tokens(self) -> Ints:
        return self._part(self.tree_batch.nodes.arrays.tokens)

    @property
    def parents(self) -> Ints:
        return self._part(self.tree_batch.nodes.arrays.parents)

    @property
    def depths(self) -> Ints:
        return self._part(self.tree_batch.nodes.arrays.depths)

    @property
    def path_prob(self) -> Floats:
        return self._part(self.tree_batch.nodes.arrays.path_prob)

    @property
    def ancestry(self) -> Bools:
        """Return whether a column's node is the row's, or an ancestor of it, [nodes, nodes]."""
        return self._part(self.tree_batch.nodes.arrays.ancestry)

    def _part(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self.tree_batch.nodes.of(column, self.index)

    @property
    def frontier(self) -> range:
        """Return the nodes whose candidates come next."""
        first, end, _ = self.tree_batch.nodes.frontiers[self.index]
        return range(first, end)

    @property
    def num_levels(self) -> int:
        """Return the number of levels grown so far."""
        return self.tree_batch.nodes.num_levels(self.index)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the tokens from the root (left out) down to a node."""
        return tuple(self.tokens[1 : node + 1][self.ancestry[node, 1 : node + 1]].tolist())

    def path_from(self, first: int, i: int) -> tuple[int, ...]:
        """Return the path to the i-th node after the first one."""
        return self.path(first + i)

    def tree(self) -> TokenTree:
        return self.tree_batch.tree(self.index)


class TreeBatch:
    """The trees of several requests, extended with candidates level by level."""

    def __init__(self, growing_trees: Sequence[GrowingTree], calibration: Calibration) -> None:
        self.growing_trees = growing_trees
        self._calibration = calibration
        budgets = [tree.budget for tree in growing_trees]
        self.nodes = Nodes(
            [tree.request.token_ids[-1] for tree in growing_trees],
            budgets,
            [budget.widths[0] if budget.widths else min(BEST_FIRST_WIDTH, budget.max_nodes) for budget in budgets],
        )
        for i, tree in enumerate(growing_trees):
            tree.tree_batch, tree.index = self, i
        self._levels: list[Candidates] = []  # of each level so far
        self._native: GrowthCall | None = None
        self._plain: PlainGrowth | None = None

    def wanted(self) -> WantedNodes:
        """Return the nodes that need candidates next, tree by tree; none when all trees are grown."""
        starts, depths = self.nodes.starts, self.nodes.arrays.depths
        runs = []
        for tree, start, (first, end, width) in zip(self.growing_trees, starts, self.nodes.frontiers, strict=False):
            if first < end:
                path_of = partial(tree.path_from, first)
                group = width if tree.budget.widths else 1
                at = depths[start + first : start + end].tolist()
                runs.append(Run(tree.request, at, path_of, width, group, tree.drafter))
        return WantedNodes(runs)

    def extend(self, candidates: Candidates) -> None:
        """Take guesses from these candidates, whose rows are the wanted nodes, and from those left from before.

        The nodes of the level become the frontiers. Best-first trees stop where another level does not pay, and fill
        their budget from the guesses that are left.
        """
        self._levels.append(candidates)
        if len(self._levels) == 1:
            self._begin(is_native=not candidates.replaced and library() is not None)
        if self._plain is None:
            assert self._native is not None
            self._native.extend(candidates.tokens, candidates.confidence)
        else:
            self._plain.extend(candidates)

    def _begin(self, *, is_native: bool) -> None:
        trees = self.growing_trees
        sources = [source(tree.drafter, tree.request) for tree in trees]
        if not is_native:
            budgets, drafters = [tree.budget for tree in trees], [tree.drafter for tree in trees]
            self._plain = PlainGrowth(
                self.nodes, budgets, sources, drafters, self._levels, self._calibration, BEST_FIRST_WIDTH
            )
            return
        known = {name: (self._calibration.lines(name), self._calibration.by_rank(name)) for name in set(sources)}
        rules = [
            TreeRules(
                budget.widths,
                *known[name],
                budget.min_path_prob,
                budget.min_gain,
                most_guesses(budget, BEST_FIRST_WIDTH),
            )
            for budget, name in ((tree.budget, name) for tree, name in zip(trees, sources, strict=True))
        ]
        self._native = GrowthCall(self.nodes.trees, self.nodes.arrays, rules, BIN_EDGES, MIDDLE, BEST_FIRST_WIDTH)

    def tree(self, index: int) -> TokenTree:
        """Return a tree as far as it is grown."""
        start, size, arrays = self.nodes.starts[index], int(self.nodes.sizes[index]), self.nodes.arrays
        nodes = slice(start, start + size)
        columns = arrays.tokens[nodes], arrays.parents[nodes], arrays.depths[nodes]
        return TokenTree.from_arrays(TreeArrays(*columns, self._draws(index, start, start + size)))

    def _draws(self, index: int, start: int, end: int) -> Draws:
        if self._plain is not None:
            return self._plain.guesses.draws(index)
        draws = Draws.chosen(self.nodes.arrays.confidence[start + 1 : end], self.growing_trees[index].drafter)
        if self._drawn_from is None:
            return draws
        numbers = self._drawn_from.numbers(np.arange(start + 1, end))
        return draws if numbers is None else draws._replace(numbers=numbers, pools=(self._drawn_from,))

    @cached_property
    def _drawn_from(self) -> DrawnFrom | None:
        """The distributions of the nodes of all trees, or None if all were chosen."""
        if not any(level.has_distributions for level in self._levels):
            return None
        return DrawnFrom(self._levels, *self.nodes.arrays.sources.T)
