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

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import Floats
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeArrays, TreeBudget
from specinfer.drafters.growth.calibration import MIDDLE, Calibration, places, source
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.growth.guesses import Guesses
from specinfer.drafters.growth.nodes import Bools, Ints, Nodes
from specinfer.drafters.growth.subtree_size import BIN_EDGES, NUM_BINS, bins_of, count_bins, floors, subtree_size_of
from specinfer.drafters.growth.wanted_nodes import Run, WantedNodes
from specinfer.kernels import library
from specinfer.kernels.growth import GrowthCall

BEST_FIRST_WIDTH = 8  # the largest number of children of a node, best first


@dataclass(slots=True)
class GrowingTree:
    """A tree of a batch while it grows. Nodes are numbered in the order they were added, from the root, 0."""

    request: Request
    budget: TreeBudget
    drafter: str
    tree_batch: "TreeBatch" = field(init=False, repr=False)
    index: int = field(init=False)  # index of this tree in the batch
    # Views of the batch's arrays, which cannot be written; those of nodes to come are not set yet.
    tokens: Ints = field(init=False)  # [nodes]
    parents: Ints = field(init=False)
    depths: Ints = field(init=False)
    path_prob: Floats = field(init=False)
    ancestry: Bools = field(init=False)  # [nodes, nodes] row a, column b: b is a, or an ancestor
    frontier: range = range(1)  # nodes whose candidates come next
    computed: list[int] = field(default_factory=list)  # nodes with keys and values in the cache, except the root
    width: int = field(init=False)  # candidates that a node of the frontier can use
    num_levels: int = 0  # grown so far
    size: int = 1  # nodes with the root

    def __post_init__(self) -> None:
        self.width = self._width()

    @property
    def num_left(self) -> int:
        return self.budget.max_nodes + 1 - self.size

    @property
    def levels_to_come(self) -> int:
        return self.budget.max_depth - self.num_levels

    def _width(self) -> int:
        widths = self.budget.widths
        return widths[self.num_levels] if widths else min(BEST_FIRST_WIDTH, self.num_left)

    def advance(self) -> None:
        """Finish a level: its nodes become the frontier, unless no node may be added below them."""
        first, end = self.frontier.stop, self.size  # the nodes of a level follow those of the one before
        self.num_levels += 1
        if end <= self.budget.max_nodes and self.num_levels < self.budget.max_depth:
            self.frontier, self.width = range(first, end), self._width()
        else:
            self.frontier = range(0)

    def wanted(self) -> Run:
        """Return the nodes of the frontier."""
        first, width = self.frontier.start, self.width
        group = width if self.budget.widths else 1
        depths = self.depths[first : self.frontier.stop].tolist()
        return Run(self.request, depths, lambda i: self.path(first + i), width, group, self.drafter)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the tokens from the root (left out) down to a node."""
        return tuple(self.tokens[1 : node + 1][self.ancestry[node, 1 : node + 1]].tolist())

    def children(self) -> dict[tuple[int, int], int]:
        """Return the child of each node and token, by (node, token)."""
        size = self.size
        edges = zip(self.parents[1:size].tolist(), self.tokens[1:size].tolist(), strict=True)
        return dict(zip(edges, range(1, size), strict=True))

    def tree(self) -> TokenTree:
        tokens, parents, depths = (column[: self.size] for column in (self.tokens, self.parents, self.depths))
        return TokenTree.of_arrays(TreeArrays(tokens, parents, depths, self.tree_batch.guesses.draws(self.index)))


class TreeBatch:
    """The trees of several requests, extended with candidates level by level."""

    def __init__(self, growing_trees: Sequence[GrowingTree], calibration: Calibration) -> None:
        self.growing_trees = growing_trees
        self._calibration = calibration
        self._native: GrowthCall | None = None  # made for the first level
        self._sources = [source(growing_tree.drafter, growing_tree.request) for growing_tree in growing_trees]
        by_rank = {name: calibration.by_rank(name) for name in set(self._sources)}
        self._best_prob = {name: float(probs[0]) for name, probs in by_rank.items()}
        self._subtree_sizes = {name: subtree_size_of(probs) for name, probs in by_rank.items()}
        self.guesses = Guesses([tree.drafter for tree in growing_trees], sum(map(_most_guesses, growing_trees)))
        self._min_path_prob = np.asarray([growing_tree.budget.min_path_prob for growing_tree in growing_trees])
        self.nodes = Nodes(
            [growing_tree.request.token_ids[-1] for growing_tree in growing_trees],
            [growing_tree.budget.max_nodes + 1 for growing_tree in growing_trees],
        )
        for i, tree in enumerate(growing_trees):
            tree.tree_batch, tree.index = self, i
            tree.tokens, tree.parents, tree.depths, tree.path_prob, tree.ancestry = self.nodes.of(i)

    def wanted(self) -> WantedNodes:
        """Return the nodes that need candidates next, tree by tree; none when all trees are grown."""
        return WantedNodes([tree.wanted() for tree in self.growing_trees if tree.frontier])

    def extend(self, candidates: Candidates) -> None:
        """Take guesses from these candidates, whose rows are the wanted nodes, and from those left from before."""
        growing = [tree for tree in self.growing_trees if tree.frontier]
        best_first = [tree for tree in growing if not tree.budget.widths]
        if not self.guesses.levels and not candidates.replaced and library() is not None:
            self._native = self._make_native()
        if self._native is None:
            self._offer(growing, candidates)
            # A fixed expansion takes all that it requested.
            wanted = self._above_floor(best_first) if best_first else np.ones(len(self.guesses.open), dtype=np.bool_)
            self._append(self._select(wanted))
        else:
            self._extend_natively(self._native, best_first, candidates)
        self._note_sizes()
        for tree in growing:
            tree.advance()
        if best_first:
            self._end(best_first)

    def _note_sizes(self) -> None:
        for tree, size in zip(self.growing_trees, self.nodes.sizes.tolist(), strict=True):
            tree.size = size

    def _make_native(self) -> GrowthCall:
        lines = [
            None if tree.budget.widths else self._calibration.lines(name)
            for tree, name in zip(self.growing_trees, self._sources, strict=True)
        ]
        return GrowthCall(
            self.nodes.arrays(), self.guesses.arrays(), BIN_EDGES, MIDDLE, lines, self._min_path_prob
        )  # fmt: skip

    def _extend_natively(self, native: GrowthCall, best_first: Sequence[GrowingTree], candidates: Candidates) -> None:
        """Do in one call what `_offer`, `_above_floor`, `_select` and `_append` do."""
        tables: list[Floats | None] = [None] * len(self.growing_trees)
        reaches: dict[tuple[str, int], Floats] = {}
        for tree in best_first:
            key = name, levels = self._sources[tree.index], tree.levels_to_come
            if key not in reaches:
                reaches[key] = self._subtree_sizes[name].reach(levels - 1)
            tables[tree.index] = reaches[key]
        frontiers, widths = list[int](), list[int]()
        for tree in self.growing_trees:
            frontier = tree.frontier
            frontiers += (frontier.start, frontier.stop)
            widths.append(tree.width if frontier else 0)
        level = len(self.guesses.levels)
        self.guesses.levels.append(candidates)
        self.guesses.note_taken(
            native.extend(level, frontiers, widths, tables, candidates.tokens, candidates.confidence)
        )

    def _offer(self, growing: Sequence[GrowingTree], candidates: Candidates) -> None:
        """Add the guesses that could be taken below the frontiers of these trees.

        The rows of the candidates belong to the nodes of these frontiers, in order.
        """
        counts, limits = [len(tree.frontier) for tree in growing], [tree.width for tree in growing]
        width = min(candidates.tokens.shape[1], max(limits))
        owners = np.repeat([tree.index for tree in growing], counts)
        nodes = np.concatenate([np.arange(tree.frontier.start, tree.frontier.stop) for tree in growing])
        tokens, confidence = candidates.tokens[:, :width], candidates.confidence[:, :width]
        # A later candidate of a node is never taken before an earlier one.
        path_prob = np.minimum.accumulate(self._acceptance_probs(owners, confidence), axis=1)
        path_prob *= self.nodes.path_prob(owners, nodes)[:, None]
        usable = (tokens >= 0) & (path_prob >= self._min_path_prob[owners][:, None])
        if min(limits) < width:
            usable &= np.arange(width) < np.repeat(limits, counts)[:, None]
        rows, ranks = usable.nonzero()
        path_prob = path_prob[rows, ranks]
        self.guesses.levels.append(candidates)
        self.guesses.add(
            owners[rows], node=nodes[rows], token=tokens[rows, ranks], row=rows, rank=ranks,
            confidence=confidence[rows, ranks], path_prob=path_prob, bin=bins_of(path_prob),
        )  # fmt: skip

    def _acceptance_probs(self, owners: Ints, confidence: npt.NDArray[np.float32]) -> Floats:
        """Return acceptance probabilities, [rows, width]; all are 1 in a fixed expansion."""
        probs, ranks = np.ones(confidence.shape), np.arange(confidence.shape[1])
        trees = list(zip(self.growing_trees, self._sources, strict=True))
        for name in self._subtree_sizes:
            rows = np.asarray([not tree.budget.widths and other == name for tree, other in trees])[owners]
            if rows.all():
                return self._calibration.acceptance_prob(name, ranks, confidence)
            if rows.any():
                probs[rows] = self._calibration.acceptance_prob(name, ranks, confidence[rows])
        return probs

    def _above_floor(self, best_first: Sequence[GrowingTree]) -> Bools:
        """Return whether each open guess is above the floor, that is, better than what is still expected, [open]."""
        bins, owners = self.guesses.bin[self.guesses.open], self.guesses.tree[self.guesses.open]
        counts = count_bins(owners, bins, len(self.growing_trees))
        limits = np.full(len(self.growing_trees), NUM_BINS)
        alike: dict[tuple[str, int], list[int]] = {}
        for tree in best_first:
            alike.setdefault((self._sources[tree.index], tree.levels_to_come), []).append(tree.index)
        for (name, levels), group in alike.items():
            table = self._subtree_sizes[name].table(levels - 1)
            limits[group] = floors(counts[group], table, self.nodes.num_left[group])
        return np.asarray(bins <= limits[owners])

    def _select(self, wanted: Bools) -> Bools:
        """Return which of these open guesses fit, [open]: all, or of too many for a tree only its best ones."""
        guesses, numbers, num_left = self.guesses, self.guesses.open[wanted], self.nodes.num_left
        owners = guesses.tree[numbers]
        if (np.bincount(owners, minlength=len(num_left)) <= num_left).all():
            return wanted
        # Sorting is slow, so first drop the guesses behind the bin in which the budget is used up.
        bins = guesses.bin[numbers]
        last = (count_bins(owners, bins, len(self.growing_trees)).cumsum(axis=1) < num_left[:, None]).sum(axis=1)
        chosen = wanted.nonzero()[0][bins <= last[owners]]
        numbers = guesses.open[chosen]
        owners = guesses.tree[numbers]
        order = np.lexsort((-guesses.path_prob[numbers], owners))
        fits = np.zeros_like(wanted)
        fits[chosen[order[places(owners[order]) < num_left[owners[order]]]]] = True
        return fits

    def _append(self, chosen: Bools) -> None:
        """Add these open guesses to the trees; a token drawn twice at a node is one child."""
        guesses, taken = self.guesses, self.guesses.take(chosen)
        owners = guesses.tree[taken]
        if any(level.replaced for level in guesses.levels):
            taken = taken[self._are_new(taken, owners.tolist())]
            owners = guesses.tree[taken]
        else:
            guesses.child[taken] = self.nodes.sizes[owners] + places(owners)
        self.nodes.append(
            owners, guesses.child[taken], guesses.node[taken], guesses.token[taken], guesses.path_prob[taken]
        )

    def _are_new(self, taken: Ints, owners: list[int]) -> Bools:
        """Set the child of each guess, which may exist already, and return which children are new, [taken]."""
        guesses, is_new = self.guesses, np.ones(len(taken), dtype=np.bool_)
        children = {tree: self.growing_trees[tree].children() for tree in set(owners)}
        edges = zip(owners, guesses.node[taken].tolist(), guesses.token[taken].tolist(), strict=True)
        for i, (tree, node, token) in enumerate(edges):
            known = children[tree]
            is_new[i] = (node, token) not in known
            guesses.child[taken[i]] = known.setdefault((node, token), len(known) + 1)
        return is_new

    def _end(self, best_first: Sequence[GrowingTree]) -> None:
        """Stop best-first trees where another level does not pay, and fill their budget from the open guesses."""
        # The minimum: a level that one tree continues with anyway costs the others little.
        min_gain = min(tree.budget.min_gain for tree in best_first)
        if min_gain > 0:
            # The accepted tokens expected of another level if each node got only its best guess.
            frontiers = [(tree, tree.path_prob[tree.frontier.start : tree.frontier.stop]) for tree in best_first]
            gain = sum(self._best_prob[self._sources[tree.index]] * float(probs.sum()) for tree, probs in frontiers)
            if gain < min_gain:
                for tree in best_first:
                    tree.frontier = range(0)
        ended = [tree.index for tree in best_first if not tree.frontier and tree.num_left > 0]
        if ended and self._native is not None:
            self.guesses.note_taken(self._native.fill(ended))
        elif ended:
            self._append(self._select(np.isin(self.guesses.tree[self.guesses.open], ended)))
        if ended:
            self._note_sizes()


def _most_guesses(tree: GrowingTree) -> int:
    """Return the largest number of guesses that a tree can be offered; a fixed expansion is offered what it takes."""
    nodes = tree.budget.max_nodes
    return nodes if tree.budget.widths else (nodes + 1) * BEST_FIRST_WIDTH
