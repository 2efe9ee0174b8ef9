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
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import CHOSEN, POOL, Draws, Floats, Ints
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeArrays, TreeBudget
from specinfer.drafters.growth.calibration import MIDDLE, Calibration, source
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.growth.frontier import Frontier, Level
from specinfer.ops.cpu.growth import GrowthCall, TreeRules

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
        return self._part(self.tree_batch.growth.tokens)

    @property
    def parents(self) -> Ints:
        return self._part(self.tree_batch.growth.parents)

    @property
    def depths(self) -> Ints:
        return self._part(self.tree_batch.growth.depths)

    @property
    def path_prob(self) -> Floats:
        return self._part(self.tree_batch.growth.path_prob)

    @property
    def ancestry(self) -> npt.NDArray[np.bool_]:
        """Return whether a column's node is the row's, or an ancestor of it, [nodes, nodes]."""
        return self._part(self.tree_batch.growth.ancestry)

    def _part(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        starts = self.tree_batch.growth.starts
        view = column[starts[self.index] : starts[self.index + 1]]
        view.flags.writeable = False
        return view

    @property
    def frontier(self) -> range:
        """Return the nodes whose candidates come next."""
        first, end, _ = self.tree_batch.growth.frontiers[self.index]
        return range(first, end)

    @property
    def num_levels(self) -> int:
        """Return the number of levels grown so far."""
        return self.tree_batch.growth.num_levels(self.index)

    def path_from(self, first: int, i: int) -> tuple[int, ...]:
        """Return the tokens from the root (left out) down to the i-th node after the first one."""
        node = first + i
        return tuple(self.tokens[1 : node + 1][self.ancestry[node, 1 : node + 1]].tolist())

    def tree(self) -> TokenTree:
        return self.tree_batch.tree(self.index)


class TreeBatch:
    """The trees of several requests, extended with candidates level by level."""

    def __init__(self, growing_trees: Sequence[GrowingTree], calibration: Calibration) -> None:
        self.growing_trees = growing_trees
        sources = [source(tree.drafter, tree.request) for tree in growing_trees]
        known = {name: (calibration.lines(name), calibration.by_rank(name)) for name in set(sources)}
        rules = [
            TreeRules(
                tree.request.token_ids[-1], tree.budget.max_nodes, tree.budget.max_depth, tree.budget.widths,
                *known[name], tree.budget.min_path_prob, tree.budget.min_gain,
            )
            for tree, name in zip(growing_trees, sources, strict=True)
        ]  # fmt: skip
        self.growth = GrowthCall(rules, MIDDLE, BEST_FIRST_WIDTH)
        for i, tree in enumerate(growing_trees):
            tree.tree_batch, tree.index = self, i
        self._levels: list[Candidates] = []  # of each level so far

    def level(self) -> Level:
        """Return the nodes that need candidates next, tree by tree; none when all trees are grown."""
        starts, depths = self.growth.starts, self.growth.depths
        frontiers = []
        for tree, start, (first, end, width) in zip(self.growing_trees, starts, self.growth.frontiers, strict=False):
            if first < end:
                path_of = partial(tree.path_from, first)
                group = width if tree.budget.widths else 1
                at = depths[start + first : start + end].tolist()
                frontiers.append(Frontier(tree.request, at, path_of, width, group, tree.drafter))
        return Level(frontiers)

    def extend(self, candidates: Candidates) -> None:
        """Take guesses from these candidates, whose rows are the nodes of the level, and from those left from before.

        The nodes taken become the frontiers. Best-first trees stop where another level does not pay, and fill their
        budget from the guesses that are left.
        """
        self._levels.append(candidates)
        drawn = candidates.drawn_from
        self.growth.extend(candidates.tokens, candidates.confidence, replaced=drawn is not None and drawn.is_replaced)

    def tree(self, index: int) -> TokenTree:
        """Return a tree as far as it is grown."""
        growth = self.growth
        start, size = growth.starts[index], growth.size(index)
        nodes = slice(start, start + size)
        columns = growth.tokens[nodes], growth.parents[nodes], growth.depths[nodes]
        return TokenTree.from_arrays(TreeArrays(*columns, self._draws(index, start, start + size)))

    def _draws(self, index: int, start: int, end: int) -> Draws:
        """Return the draws of a tree: one of each node but the root, unless they were drawn with replacement."""
        name, several = self.growing_trees[index].drafter, self.growth.draws(index)
        draws = Draws.chosen(self.growth.confidence[start + 1 : end], name)
        sources = self.growth.sources[start + 1 : end]
        if several is not None:
            columns, confidence = several
            draws = Draws.chosen(confidence, name)._replace(nodes=np.ascontiguousarray(columns[:, 0]))
            sources = columns[:, 1:]
        pools = [level.drawn_from for level in self._levels]
        numbers = np.full(len(sources), CHOSEN)
        for i, pool in enumerate(pools):
            if pool is not None:
                of = sources[:, 0] == i
                _, rows, ranks = sources[of].T
                drawn = pool.places[rows, ranks] >= 0
                numbers[of] = np.where(drawn, i << POOL | pool.numbers(rows, ranks), CHOSEN)
        if (numbers == CHOSEN).all():
            return draws
        return draws._replace(numbers=numbers, pools=tuple(pool or () for pool in pools))
