"""Growth of token trees, level by level, for all requests together.

The budget selects one of two ways. A fixed expansion <k1, ..., km> gives every node of a level its k children
(SpecInfer, arXiv 2305.09781, section 3). Best first takes the most promising drafted tokens below any node, within a
number of nodes. It ranks a token by the product of the acceptance probabilities along its path (OPT-Tree, arXiv
2406.17276, with probabilities learned from verification).

One pass of the drafter serves a whole level, so each level must decide what to take now and how many nodes to save for
tokens whose parents are still to come. Their path probabilities are estimated from how often drafted tokens of each
rank were accepted. The floor is the path probability above which everything present and everything expected fills the
budget.

Whether a token is taken depends only on what is known before it is drawn, so drawn trees stay exact.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat

import numpy as np
import numpy.typing as npt

from specinfer.core.request import Request
from specinfer.core.tree import Distribution, Draw, TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import Calibration, source
from specinfer.drafters.growth.draft_sampling import Candidates, Node
from specinfer.drafters.growth.guesses import Guesses, places
from specinfer.drafters.growth.subtree_size import NUM_BINS, bins_of, subtree_size_of

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BEST_FIRST_WIDTH = 8  # the largest number of children of a node, best first


@dataclass(slots=True)
class GrowingTree:
    """A tree of a batch while it grows. Nodes are numbered in the order they were added, from the root, 0."""

    request: Request
    budget: TreeBudget
    drafter: str
    tree_batch: "TreeBatch" = field(init=False, repr=False)
    index: int = field(init=False)  # index of this tree in the batch
    # Views of the batch's arrays, with room for all nodes to come:
    tokens: Ints = field(init=False)  # [nodes]
    parents: Ints = field(init=False)
    depths: Ints = field(init=False)
    path_prob: Floats = field(init=False)
    ancestry: npt.NDArray[np.bool_] = field(init=False)  # [nodes, nodes] row a, column b: b is a, or an ancestor
    paths: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    frontier: range = range(1)  # nodes whose candidates come next
    computed: list[int] = field(default_factory=list)  # nodes whose keys and values are in the cache, except the root
    num_levels: int = 0  # grown so far

    @property
    def size(self) -> int:
        return int(self.tree_batch.sizes[self.index])

    @property
    def num_left(self) -> int:
        return self.budget.max_nodes + 1 - self.size

    @property
    def levels_to_come(self) -> int:
        return self.budget.max_depth - self.num_levels

    @property
    def width(self) -> int:
        """The number of candidates that a node of the frontier can use."""
        widths = self.budget.widths
        return widths[self.num_levels] if widths else min(BEST_FIRST_WIDTH, self.num_left)

    def advance(self) -> None:
        """Finish a level: its nodes become the frontier, unless no node may be added below them."""
        first, end = len(self.paths), self.size
        self.num_levels += 1
        growing = end <= self.budget.max_nodes and self.levels_to_come > 0
        self.frontier = range(first, end) if growing else range(0)
        parents, tokens = self.parents[first:end].tolist(), self.tokens[first:end].tolist()
        self.paths += [(*self.paths[node], token) for node, token in zip(parents, tokens, strict=True)]

    def children(self) -> dict[tuple[int, int], int]:
        """Return the child of each node and token, by (node, token)."""
        nodes = range(1, self.size)
        parents, tokens = self.parents[1 : self.size].tolist(), self.tokens[1 : self.size].tolist()
        return dict(zip(zip(parents, tokens, strict=True), nodes, strict=True))

    def tree(self) -> TokenTree:
        tokens, parents = self.tokens[: self.size].tolist(), self.parents[: self.size].tolist()
        return TokenTree(tuple(tokens), tuple(parents), self.tree_batch.draws(self.index))


class TreeBatch:
    """The trees of several requests, extended with candidates level by level.

    The nodes of all trees lie in common arrays, and each tree has its own range. A level takes a few array operations,
    however many trees there are.
    """

    def __init__(self, growing_trees: Sequence[GrowingTree], calibration: Calibration) -> None:
        self.growing_trees = growing_trees
        self._calibration = calibration
        self._levels: list[Candidates] = []
        self._guesses = Guesses(sum(map(_most_guesses, growing_trees)))
        self._open = np.zeros(0, dtype=np.int64)  # numbers of the guesses that may still be taken
        self._taken: list[Ints] = []
        self._draws: list[tuple[Draw, ...]] | None = None
        self._sources = [source(growing_tree.drafter, growing_tree.request) for growing_tree in growing_trees]
        by_rank = {name: calibration.by_rank(name) for name in set(self._sources)}
        self._best_chance = {name: float(chances[0]) for name, chances in by_rank.items()}
        self._subtree_sizes = {name: subtree_size_of(chances) for name, chances in by_rank.items()}
        self._rooms = np.asarray([growing_tree.budget.max_nodes for growing_tree in growing_trees], dtype=np.int64)
        self._least = np.asarray([growing_tree.budget.min_path_prob for growing_tree in growing_trees])
        rooms = [growing_tree.budget.max_nodes + 1 for growing_tree in growing_trees]
        ends = np.cumsum([0, *rooms])
        self._starts = ends[:-1]
        self.sizes = np.ones(len(growing_trees), dtype=np.int64)  # [trees] nodes so far
        self._tokens = np.zeros(ends[-1], dtype=np.int64)
        self._parents, self._depths = np.full(ends[-1], -1), np.zeros(ends[-1], dtype=np.int64)
        self._path_prob = np.ones(ends[-1])
        self._ancestry = np.zeros((ends[-1], max(rooms, default=1)), dtype=np.bool_)
        self._ancestry[self._starts, :1] = True
        for i, (growing_tree, start, room) in enumerate(zip(growing_trees, self._starts.tolist(), rooms, strict=True)):
            part = slice(start, start + room)
            growing_tree.tree_batch, growing_tree.index = self, i
            growing_tree.tokens, growing_tree.parents, growing_tree.depths = (
                self._tokens[part],
                self._parents[part],
                self._depths[part],
            )
            growing_tree.path_prob, growing_tree.ancestry = self._path_prob[part], self._ancestry[part]
            growing_tree.tokens[0] = growing_tree.request.token_ids[-1]

    def wanted(self) -> list[Node]:
        """Return the nodes that need candidates next, tree by tree; none when all trees are grown."""
        return [
            Node(
                growing_tree.request,
                growing_tree.paths[node],
                width,
                width if growing_tree.budget.widths else 1,
                growing_tree.drafter,
            )
            for growing_tree in self.growing_trees
            if growing_tree.frontier
            for width in (growing_tree.width,)
            for node in growing_tree.frontier
        ]

    def extend(self, candidates: Candidates) -> None:
        """Take guesses from these candidates, whose rows are the wanted nodes, and from those left from before."""
        self._levels.append(candidates)
        trees = [i for i, growing_tree in enumerate(self.growing_trees) if growing_tree.frontier]
        best_first = [i for i in trees if not self.growing_trees[i].budget.widths]
        self._open = np.concatenate([self._open, self._offer(trees, candidates)])
        if best_first:
            self._take(self._above_floor(best_first))
        else:  # a fixed expansion takes all that it requested
            self._take(np.ones(len(self._open), dtype=np.bool_))
        for i in trees:
            self.growing_trees[i].advance()
        if best_first:
            self._end(best_first)

    def _offer(self, trees: Sequence[int], candidates: Candidates) -> Ints:
        """Add the guesses that could be taken below the frontiers of these trees, and return their numbers.

        The rows of the candidates belong to the nodes of these frontiers, in order.
        """
        growing_trees = [self.growing_trees[tree] for tree in trees]
        counts = [len(growing_tree.frontier) for growing_tree in growing_trees]
        limits = [growing_tree.width for growing_tree in growing_trees]
        width = min(candidates.tokens.shape[1], max(limits))
        owners = np.repeat(trees, counts)
        nodes = np.concatenate([np.asarray(growing_tree.frontier) for growing_tree in growing_trees])
        tokens, confidence = candidates.tokens[:, :width], candidates.confidence[:, :width]
        # A later candidate of a node is never taken before an earlier one.
        path_prob = np.minimum.accumulate(self._chances(owners, confidence), axis=1)
        path_prob *= self._path_prob[self._starts[owners] + nodes][:, None]
        usable = (tokens >= 0) & (path_prob >= self._least[owners][:, None])
        if min(limits) < width:
            usable &= np.arange(width) < np.repeat(limits, counts)[:, None]
        rows, ranks = usable.nonzero()
        path_prob = path_prob[rows, ranks]
        return self._guesses.add(
            tree=owners[rows], node=nodes[rows], token=tokens[rows, ranks], level=len(self._levels) - 1, row=rows,
            rank=ranks, confidence=confidence[rows, ranks], path_prob=path_prob, bin=bins_of(path_prob),
        )  # fmt: skip

    def _chances(self, owners: Ints, confidence: npt.NDArray[np.float32]) -> Floats:
        """Return acceptance probabilities, [rows, width]; all are 1 in a fixed expansion."""
        chances = np.ones(confidence.shape)
        ranks = np.broadcast_to(np.arange(confidence.shape[1]), confidence.shape)
        for name in self._subtree_sizes:
            of = [
                not g.budget.widths and kind == name for g, kind in zip(self.growing_trees, self._sources, strict=True)
            ]
            rows = np.asarray(of)[owners]
            if rows.all():
                return self._calibration.chance(name, ranks, confidence)
            if rows.any():
                chances[rows] = self._calibration.chance(name, ranks[rows], confidence[rows])
        return chances

    def _end(self, trees: Sequence[int]) -> None:
        """Stop best-first trees where another level does not pay, and fill their budget from the open guesses."""
        growing_trees = [self.growing_trees[i] for i in trees]
        # The minimum: a level that one tree continues with anyway costs the others little.
        min_gain = min(growing_tree.budget.min_gain for growing_tree in growing_trees)
        if min_gain > 0 and self._gain(growing_trees) < min_gain:
            for growing_tree in growing_trees:
                growing_tree.frontier = range(0)
        ended = [
            growing_tree.index
            for growing_tree in growing_trees
            if not growing_tree.frontier and growing_tree.num_left > 0
        ]
        if ended:
            self._take(np.isin(self._guesses.tree[self._open], ended))

    def _gain(self, growing_trees: Sequence[GrowingTree]) -> float:
        """Return the accepted tokens expected of another level if each node got only its best guess."""
        return sum(
            self._best_chance[self._sources[growing_tree.index]]
            * float(growing_tree.path_prob[growing_tree.frontier[0] : growing_tree.frontier[-1] + 1].sum())
            for growing_tree in growing_trees
            if growing_tree.frontier
        )

    def _above_floor(self, trees: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return whether each open guess is above the floor, that is, better than what is still expected, [open]."""
        bins, owners = self._guesses.bin[self._open], self._guesses.tree[self._open]
        counts = self._count_bins(owners, bins)
        floors = np.full(len(self.growing_trees), NUM_BINS)
        alike: dict[tuple[str, int], list[int]] = {}
        for i in trees:
            alike.setdefault((self._sources[i], self.growing_trees[i].levels_to_come), []).append(i)
        room = self._rooms + 1 - self.sizes
        for (name, levels), group in alike.items():
            # [trees, bins] expected number of nodes with each floor
            expected = counts[group] @ self._subtree_sizes[name].table(levels - 1)
            floors[group] = np.maximum(
                (expected <= room[group][:, None]).sum(axis=1) - 1, (counts[group] > 0).argmax(axis=1)
            )
        return np.asarray(bins <= floors[owners])

    def _count_bins(self, owners: Ints, bins: Ints) -> Ints:
        """Return the number of guesses, [trees, bins]."""
        counts = np.bincount(owners * NUM_BINS + bins, minlength=len(self.growing_trees) * NUM_BINS)
        return np.asarray(counts.reshape(-1, NUM_BINS))

    def _take(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Add these guesses to the trees; if a tree has too little room, only its best ones."""
        guesses, chosen = self._guesses, wanted.nonzero()[0]
        owners = guesses.tree[self._open[chosen]]
        room = self._rooms + 1 - self.sizes
        if (np.bincount(owners, minlength=len(room)) > room).any():
            # Sorting is slow, so first drop the guesses behind the bin in which the budget is used up.
            bins = guesses.bin[self._open[chosen]]
            last = (self._count_bins(owners, bins).cumsum(axis=1) < room[:, None]).sum(axis=1)
            chosen = chosen[bins <= last[owners]]
            owners = guesses.tree[self._open[chosen]]
            order = np.lexsort((-guesses.path_prob[self._open[chosen]], owners))
            chosen = np.sort(chosen[order[places(owners[order]) < room[owners[order]]]])
        if not len(chosen):
            return
        taken = self._open[chosen]
        taken = taken[guesses.tree[taken].argsort(kind="stable")]
        is_left = np.ones(len(self._open), dtype=np.bool_)
        is_left[chosen] = False
        self._open = self._open[is_left]
        self._taken.append(taken)
        new = taken[self._number(taken)]
        owners, child, node = guesses.tree[new], guesses.child[new], guesses.node[new]
        starts = self._starts[owners]
        nodes, parents = starts + child, starts + node
        self._tokens[nodes], self._parents[nodes], self._path_prob[nodes] = (
            guesses.token[new],
            node,
            guesses.path_prob[new],
        )
        self._depths[nodes], self._ancestry[nodes] = self._depths[parents] + 1, self._ancestry[parents]
        self._ancestry[nodes, child] = True
        self.sizes += np.bincount(owners, minlength=len(self.sizes))

    def _number(self, taken: Ints) -> npt.NDArray[np.bool_]:
        """Give each guess its node and return which nodes are new, [taken]; a token drawn before is not a new node."""
        guesses = self._guesses
        owners = guesses.tree[taken]
        is_new = np.ones(len(taken), dtype=np.bool_)
        if not any(level.replaced for level in self._levels):
            guesses.child[taken] = self.sizes[owners] + places(owners)
            return is_new
        children = {tree: self.growing_trees[tree].children() for tree in set(owners.tolist())}
        names = zip(owners.tolist(), guesses.node[taken].tolist(), guesses.token[taken].tolist(), strict=True)
        for i, (tree, node, token) in enumerate(names):
            known = children[tree]
            is_new[i] = (node, token) not in known
            guesses.child[taken[i]] = known.setdefault((node, token), len(known) + 1)
        return is_new

    def draws(self, tree: int) -> tuple[Draw, ...]:
        """Return all draws of a tree, in draw order."""
        if self._draws is None:
            guesses, taken = self._guesses, np.concatenate([self._open[:0], *self._taken])
            taken = taken[guesses.tree[taken].argsort(kind="stable")]
            ends = np.searchsorted(guesses.tree[taken], np.arange(len(self.growing_trees) + 1)).tolist()
            names = [self.growing_trees[owner].drafter for owner in guesses.tree[taken].tolist()]
            nodes, sure = guesses.child[taken].tolist(), guesses.confidence[taken].tolist()
            every = [*map(Draw, nodes, names, self._distributions(taken), sure)]
            self._draws = [tuple(every[a:b]) for a, b in pairwise(ends)]
        return self._draws[tree]

    def _distributions(self, taken: Ints) -> Iterable[Distribution | None]:
        if not any(level.has_distributions for level in self._levels):
            return repeat(None, len(taken))
        guesses = self._guesses
        where = zip(
            guesses.level[taken].tolist(), guesses.row[taken].tolist(), guesses.rank[taken].tolist(), strict=True
        )
        return [self._levels[level].distribution(row, rank) for level, row, rank in where]


def _most_guesses(growing_tree: GrowingTree) -> int:
    """Return the largest number of guesses that a tree can be offered; a fixed expansion is offered what it takes."""
    nodes = growing_tree.budget.max_nodes
    return nodes if growing_tree.budget.widths else (nodes + 1) * BEST_FIRST_WIDTH
