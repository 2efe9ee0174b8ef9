"""How trees grow, level by level, those of all requests together.

Two ways, told apart by the budget. A fixed expansion <k1, ..., km> gives every node of a level its k children
(SpecInfer, arXiv 2305.09781, section 3). Best first takes the most promising guesses on any node there is, within
a number of nodes; a guess is worth the product of the chances along its path (OPT-Tree, arXiv 2406.17276, with
chances learned from verification).

One pass of the drafter serves a whole level, so each level must decide what to take now and how many nodes to save
for guesses whose parents are still to come. What those will be worth is expected from how often guesses of each
rank were accepted: the floor is the worth above which all that is there and all that is expected fills the budget.

Whether a guess is taken depends on what is known before its token is drawn, so drawn trees stay exact.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specinfer.drafters.calibration import Calibration, source
from specinfer.drafters.drawing import Candidates, Node
from specinfer.drafters.outlook import NUM_BINS, bins_of, outlook_of
from specinfer.request import Request
from specinfer.tree import Draw, Law, TokenTree, TreeBudget

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BEST_FIRST_WIDTH = 8  # children of a node at most, best first


@dataclass(slots=True)
class Growth:
    """One tree of a forest while it grows. Its nodes are numbered from the root, 0, in the order they came."""

    request: Request
    budget: TreeBudget
    drafter: str
    forest: "Forest" = field(init=False, repr=False)
    index: int = field(init=False)  # of this tree in the forest
    # Parts of the forest's arrays, with room for all nodes to come:
    tokens: Ints = field(init=False)  # [nodes]
    parents: Ints = field(init=False)
    depths: Ints = field(init=False)
    worth: Floats = field(init=False)
    ancestry: npt.NDArray[np.bool_] = field(init=False)  # [nodes, nodes] row a, column b: b is a, or an ancestor
    paths: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    frontier: range = range(1)  # nodes whose candidates come next
    computed: list[int] = field(default_factory=list)  # nodes whose keys and values are in the cache, but the root
    num_levels: int = 0  # grown so far

    @property
    def size(self) -> int:
        return int(self.forest.sizes[self.index])

    @property
    def num_left(self) -> int:
        return self.budget.max_nodes + 1 - self.size

    @property
    def levels_to_come(self) -> int:
        return self.budget.max_depth - self.num_levels

    @property
    def width(self) -> int:
        """How many candidates a node of the frontier can use."""
        widths = self.budget.widths
        return widths[self.num_levels] if widths else min(BEST_FIRST_WIDTH, self.num_left)

    def advance(self) -> None:
        """A level is done: its nodes are the frontier, unless nothing may hang on them."""
        first, end = len(self.paths), self.size
        self.num_levels += 1
        growing = end <= self.budget.max_nodes and self.levels_to_come > 0
        self.frontier = range(first, end) if growing else range(0)
        parents, tokens = self.parents[first:end].tolist(), self.tokens[first:end].tolist()
        self.paths += [(*self.paths[node], token) for node, token in zip(parents, tokens, strict=True)]

    def children(self) -> dict[tuple[int, int], int]:
        """Node and token -> the node's child with this token."""
        nodes = range(1, self.size)
        parents, tokens = self.parents[1 : self.size].tolist(), self.tokens[1 : self.size].tolist()
        return dict(zip(zip(parents, tokens, strict=True), nodes, strict=True))

    def tree(self) -> TokenTree:
        tokens, parents = self.tokens[: self.size].tolist(), self.parents[: self.size].tolist()
        return TokenTree(tuple(tokens), tuple(parents), self.forest.draws(self.index))


_SLOT = np.dtype(
    [(name, "i8") for name in ("tree", "node", "token", "level", "row", "rank", "child")]
    + [(name, "f8") for name in ("confidence", "worth")]
)
_Slots: TypeAlias = npt.NDArray[np.void]  # guesses that could be taken; a child of -1 is not known yet


class Forest:
    """The trees of several requests, fed with candidates level by level.

    Nodes of all trees lie in common arrays, each tree's in a stretch of its own: a level costs some operations
    on arrays, however many trees there are.
    """

    def __init__(self, growths: Sequence[Growth], calibration: Calibration) -> None:
        self.growths = growths
        self._calibration = calibration
        self._levels: list[Candidates] = []
        self._open = np.empty(0, dtype=_SLOT)  # in draw order
        self._taken: list[_Slots] = []
        self._draws: list[tuple[Draw, ...]] | None = None
        self._sources = [source(growth.drafter, growth.request) for growth in growths]
        by_rank = {name: calibration.by_rank(name) for name in set(self._sources)}
        self._best_chance = {name: float(chances[0]) for name, chances in by_rank.items()}
        self._outlooks = {name: outlook_of(chances) for name, chances in by_rank.items()}
        self._rooms = np.asarray([growth.budget.max_nodes for growth in growths], dtype=np.int64)
        self._least = np.asarray([growth.budget.least_chance for growth in growths])
        rooms = [growth.budget.max_nodes + 1 for growth in growths]
        ends = np.cumsum([0, *rooms])
        self._starts = ends[:-1]
        self.sizes = np.ones(len(growths), dtype=np.int64)  # [trees] nodes so far
        self._tokens = np.zeros(ends[-1], dtype=np.int64)
        self._parents, self._depths = np.full(ends[-1], -1), np.zeros(ends[-1], dtype=np.int64)
        self._worth = np.ones(ends[-1])
        self._ancestry = np.zeros((ends[-1], max(rooms, default=1)), dtype=np.bool_)
        self._ancestry[self._starts, :1] = True
        for i, (growth, start, room) in enumerate(zip(growths, self._starts.tolist(), rooms, strict=True)):
            part = slice(start, start + room)
            growth.forest, growth.index = self, i
            growth.tokens, growth.parents, growth.depths = self._tokens[part], self._parents[part], self._depths[part]
            growth.worth, growth.ancestry = self._worth[part], self._ancestry[part]
            growth.tokens[0] = growth.request.token_ids[-1]

    def wanted(self) -> list[Node]:
        """The nodes whose candidates come next, tree by tree; none when all are grown."""
        return [
            Node(growth.request, growth.paths[node], width, width if growth.budget.widths else 1)
            for growth in self.growths
            if growth.frontier
            for width in (growth.width,)
            for node in growth.frontier
        ]

    def extend(self, candidates: Candidates) -> None:
        """Takes guesses of these candidates, whose rows are the nodes wanted, and of those left from before."""
        self._levels.append(candidates)
        trees = [i for i, growth in enumerate(self.growths) if growth.frontier]
        best_first = [i for i in trees if not self.growths[i].budget.widths]
        self._open = _joined([self._open, self._slots(trees, candidates)])
        # A fixed expansion takes all that it asked for.
        self._take(self._above_floor(best_first) if best_first else np.ones(len(self._open), dtype=np.bool_))
        for i in trees:
            self.growths[i].advance()
        if best_first:
            self._end(best_first)

    def _slots(self, trees: Sequence[int], candidates: Candidates) -> _Slots:
        """What could hang on the frontiers of these trees, which the rows of the candidates belong to."""
        growths = [self.growths[tree] for tree in trees]
        counts = [len(growth.frontier) for growth in growths]
        widths = np.zeros(len(self.growths), dtype=np.int64)
        widths[trees] = [growth.width for growth in growths]
        width = min(candidates.tokens.shape[1], int(widths.max()))
        slots = np.zeros((sum(counts), width), dtype=_SLOT)
        owners = np.repeat(trees, counts)
        nodes = np.concatenate([np.asarray(growth.frontier) for growth in growths])
        slots["tree"], slots["node"], slots["child"] = owners[:, None], nodes[:, None], -1
        slots["level"], slots["row"] = len(self._levels) - 1, np.arange(len(owners))[:, None]
        slots["rank"], slots["token"] = np.arange(width), candidates.tokens[:, :width]
        slots["confidence"] = candidates.confidence[:, :width]
        chance = self._chances(owners, slots)
        # A later guess of a node is never taken before an earlier one.
        slots["worth"] = np.minimum.accumulate(self._worth[self._starts[owners] + nodes][:, None] * chance, axis=1)
        usable = (slots["token"] >= 0) & (slots["worth"] >= self._least[owners][:, None])
        usable &= slots["rank"] < widths[owners][:, None]
        return np.asarray(slots[usable])

    def _chances(self, owners: Ints, slots: _Slots) -> Floats:
        """[rows, width]; in a fixed expansion every guess is as good as another."""
        chances = np.ones(slots.shape)
        for name in self._outlooks:
            of = [not g.budget.widths and kind == name for g, kind in zip(self.growths, self._sources, strict=True)]
            rows = np.asarray(of)[owners]
            if rows.all():
                return self._calibration.chance(name, slots["rank"], slots["confidence"])
            if rows.any():
                chances[rows] = self._calibration.chance(name, slots["rank"][rows], slots["confidence"][rows])
        return chances

    def _end(self, trees: Sequence[int]) -> None:
        """Best first: stops where another level does not pay; what is left of a budget goes to what is there."""
        growths = [self.growths[i] for i in trees]
        gain = sum(
            self._best_chance[self._sources[growth.index]]
            * float(growth.worth[growth.frontier[0] : growth.frontier[-1] + 1].sum())
            for growth in growths
            if growth.frontier
        )
        # The least: a level that one of them goes on with anyway costs the others little.
        if gain < min(growth.budget.least_gain for growth in growths):
            for growth in growths:
                growth.frontier = range(0)
        ended = [growth.index for growth in growths if not growth.frontier and growth.num_left > 0]
        if ended:
            self._take(np.isin(self._open["tree"], ended))

    def _above_floor(self, trees: Sequence[int]) -> npt.NDArray[np.bool_]:
        """[open] whether a guess is worth more than what is still to come."""
        bins, owners = bins_of(self._open["worth"]), self._open["tree"]
        counts = np.bincount(owners * NUM_BINS + bins, minlength=len(self.growths) * NUM_BINS).reshape(-1, NUM_BINS)
        floors = np.full(len(self.growths), NUM_BINS)
        alike: dict[tuple[str, int], list[int]] = {}
        for i in trees:
            alike.setdefault((self._sources[i], self.growths[i].levels_to_come), []).append(i)
        room = self._rooms + 1 - self.sizes
        for (name, levels), group in alike.items():
            # [trees, bins] nodes there would be with each floor
            expected = counts[group] @ self._outlooks[name].table(levels - 1)
            floors[group] = np.maximum(
                (expected <= room[group][:, None]).sum(axis=1) - 1, (counts[group] > 0).argmax(axis=1)
            )
        return np.asarray(bins <= floors[owners])

    def _take(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Hangs these guesses, the best of each tree if they are more than it has room for."""
        chosen = wanted.nonzero()[0]
        if not len(chosen):
            return
        order = np.lexsort((-self._open["worth"][chosen], self._open["tree"][chosen]))
        owners = self._open["tree"][chosen[order]]
        room = self._rooms + 1 - self.sizes
        chosen = np.sort(chosen[order[_places(owners) < room[owners]]])
        taken = self._open[chosen]
        taken = taken[taken["tree"].argsort(kind="stable")]
        is_new = self._number(taken)
        self._taken.append(taken)
        left = np.ones(len(self._open), dtype=np.bool_)
        left[chosen] = False
        self._open = self._open[left]
        taken = taken[is_new]
        starts = self._starts[taken["tree"]]
        nodes, parents = starts + taken["child"], starts + taken["node"]
        self._tokens[nodes], self._parents[nodes], self._worth[nodes] = taken["token"], taken["node"], taken["worth"]
        self._depths[nodes], self._ancestry[nodes] = self._depths[parents] + 1, self._ancestry[parents]
        self._ancestry[nodes, taken["child"]] = True
        self.sizes += np.bincount(taken["tree"], minlength=len(self.sizes))

    def _number(self, taken: _Slots) -> npt.NDArray[np.bool_]:
        """[taken] gives each guess its node, and tells which are new: one drawn before is no new node."""
        if not any(level.replaced for level in self._levels):
            taken["child"] = self.sizes[taken["tree"]] + _places(taken["tree"])
            return np.ones(len(taken), dtype=np.bool_)
        is_new = np.zeros(len(taken), dtype=np.bool_)
        children = {tree: self.growths[tree].children() for tree in set(taken["tree"].tolist())}
        for i, (tree, node, token) in enumerate(taken[["tree", "node", "token"]].tolist()):
            known = children[tree]
            is_new[i] = (node, token) not in known
            taken["child"][i] = known.setdefault((node, token), len(known) + 1)
        return is_new

    def draws(self, tree: int) -> tuple[Draw, ...]:
        """All draws of a tree, in draw order."""
        if self._draws is None:
            taken = _joined([self._open[:0], *self._taken])
            taken = taken[taken["tree"].argsort(kind="stable")]
            ends = np.searchsorted(taken["tree"], np.arange(len(self.growths) + 1)).tolist()
            names = [self.growths[owner].drafter for owner in taken["tree"].tolist()]
            every = [*map(Draw, taken["child"].tolist(), names, self._laws(taken), taken["confidence"].tolist())]
            self._draws = [tuple(every[a:b]) for a, b in pairwise(ends)]
        return self._draws[tree]

    def _laws(self, taken: _Slots) -> Iterable[Law | None]:
        if not any(level.has_laws for level in self._levels):
            return repeat(None, len(taken))
        places = zip(taken["level"].tolist(), taken["row"].tolist(), taken["rank"].tolist(), strict=True)
        return [self._levels[level].law(row, rank) for level, row, rank in places]


def _joined(slots: Sequence[_Slots]) -> _Slots:
    """As bytes: numpy would compare their fields each time."""
    return np.concatenate([part.view(np.dtype((np.void, _SLOT.itemsize))) for part in slots]).view(_SLOT)


def _places(owners: Ints) -> Ints:
    """[n] the how manieth of its owner each is; owners ascend."""
    return np.asarray(np.arange(len(owners)) - np.searchsorted(owners, owners))
