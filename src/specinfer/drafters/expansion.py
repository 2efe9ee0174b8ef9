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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specinfer.drafters.calibration import Calibration, source
from specinfer.drafters.drawing import Candidates, Node
from specinfer.request import Request
from specinfer.tree import Draw, Law, TokenTree, TreeBudget

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BEST_FIRST_WIDTH = 8  # children of a node at most, best first
_STEPS = 4  # bins for each halving of worth
_BINS = 64  # down to 2^-16


def _bins(worth: Floats) -> Ints:
    steps = -np.log2(np.maximum(worth, 1e-9)) * _STEPS
    return np.asarray(np.clip(steps, 0, _BINS - 1), dtype=np.int64)


class Outlook:
    """How many nodes worth how much are to be expected below a node.

    Args:
        by_rank: [ranks] chance that a node's first, second, ... guess is accepted once the node was.
    """

    def __init__(self, by_rank: Floats) -> None:
        self.best_chance = float(by_rank[0])
        node = np.zeros(_BINS)
        node[0] = 1.0
        self._levels = [node]  # [bins] nodes of each worth, itself included, with 0, 1, ... levels to come
        self._steps = [int(step) for step in _bins(by_rank) if step < _BINS - 1]
        self._tables: dict[int, Floats] = {}

    def table(self, num_levels: int) -> Floats:
        """[bins of a guess, bins of a floor] nodes worth at least the floor, with so many levels to come."""
        if num_levels not in self._tables:
            while len(self._levels) <= num_levels:
                grown = self._levels[0].copy()
                for step in self._steps:
                    grown[step:] += self._levels[-1][: _BINS - step]
                self._levels.append(grown)
            at_least = np.concatenate([np.zeros(_BINS - 1), self._levels[num_levels].cumsum()])
            below = np.arange(_BINS)[None, :] - np.arange(_BINS)[:, None]
            self._tables[num_levels] = at_least[below + _BINS - 1]
        return self._tables[num_levels]


@dataclass(slots=True)
class Growth:
    """A tree while it grows."""

    request: Request
    budget: TreeBudget
    drafter: str
    tokens: list[int] = field(init=False)
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    paths: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    worth: list[float] = field(default_factory=lambda: [1.0])
    draws: list[Draw] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # node, token -> child
    ancestry: npt.NDArray[np.bool_] = field(init=False)  # [nodes, nodes], with room for all to come
    frontier: list[int] = field(default_factory=lambda: [0])  # nodes whose candidates come next
    computed: list[int] = field(default_factory=list)  # nodes whose keys and values are in the cache, but the root
    num_levels: int = 0  # grown so far

    def __post_init__(self) -> None:
        self.tokens = [self.request.token_ids[-1]]
        self.ancestry = np.eye(self.budget.max_nodes + 1, dtype=np.bool_)

    @property
    def num_left(self) -> int:
        return self.budget.max_nodes + 1 - len(self.tokens)

    @property
    def levels_to_come(self) -> int:
        return self.budget.max_depth - self.num_levels

    def wanted(self) -> list[Node]:
        """The frontier, and how many candidates each of its nodes can use."""
        widths = self.budget.widths
        if not widths:
            width = min(BEST_FIRST_WIDTH, self.num_left)
            return [Node(self.request, self.paths[node], width) for node in self.frontier]
        width = widths[self.num_levels]
        return [Node(self.request, self.paths[node], width, group=width) for node in self.frontier]

    def hang(self, node: int, token: int, law: Law | None, confidence: float, worth: float) -> None:
        """Takes a guess; one that another draw made before is no new node."""
        child = self.children.get((node, token))
        if child is None:
            child = self.children[node, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
            self.paths.append((*self.paths[node], token))
            self.worth.append(worth)
            self.ancestry[child, :child] = self.ancestry[node, :child]
        self.draws.append(Draw(child, self.drafter, law, confidence))

    def advance(self, first: int) -> None:
        """A level is done: its nodes, from `first` on, are the frontier, unless nothing may hang on them."""
        self.num_levels += 1
        growing = self.num_left > 0 and self.levels_to_come > 0
        self.frontier = list(range(first, len(self.tokens))) if growing else []

    def tree(self) -> TokenTree:
        return TokenTree(tuple(self.tokens), tuple(self.parents), tuple(self.draws))


_SLOT = np.dtype([("tree", "i8"), ("node", "i8"), ("level", "i8"), ("row", "i8"), ("rank", "i8"), ("worth", "f8")])


class Forest:
    """The trees of several requests, fed with candidates level by level."""

    def __init__(self, growths: Sequence[Growth], calibration: Calibration) -> None:
        self.growths = growths
        self._calibration = calibration
        self._levels: list[Candidates] = []
        self._open = np.empty(0, dtype=_SLOT)  # guesses that could be taken, in draw order
        self._outlooks: dict[str, Outlook] = {}

    def wanted(self) -> list[Node]:
        """The nodes whose candidates come next, tree by tree; none when all are grown."""
        return [node for growth in self.growths if growth.frontier for node in growth.wanted()]

    def extend(self, candidates: Candidates) -> None:
        """Takes guesses of these candidates, whose rows are the nodes wanted, and of those left from before."""
        self._levels.append(candidates)
        row = 0
        best_first: dict[int, int] = {}  # tree -> its first row
        for i, growth in enumerate(self.growths):
            num_rows = len(growth.frontier)
            if num_rows and growth.budget.widths:
                _expand(growth, candidates, row)
            elif num_rows:
                best_first[i] = row
            row += num_rows
        if best_first:
            self._open = np.concatenate([self._open, self._slots(best_first, candidates)])
            self._take_best(list(best_first))

    def _slots(self, first_rows: Mapping[int, int], candidates: Candidates) -> npt.NDArray[np.void]:
        """What could hang on the frontiers of these trees, each with its first row of the candidates."""
        growths = [self.growths[tree] for tree in first_rows]
        sizes = [len(growth.frontier) for growth in growths]
        rows = np.concatenate(
            [np.arange(row, row + size) for row, size in zip(first_rows.values(), sizes, strict=True)]
        )
        width = min(candidates.tokens.shape[1], BEST_FIRST_WIDTH)
        ranks = np.arange(width)
        confidence = candidates.confidence[rows, :width]
        sources = np.repeat([source(growth.drafter, growth.request) for growth in growths], sizes)
        chance = np.empty(confidence.shape)
        for name in dict.fromkeys(sources.tolist()):
            chance[sources == name] = self._calibration.chance(name, ranks, confidence[sources == name])
        worth = np.asarray([growth.worth[node] for growth in growths for node in growth.frontier])[:, None] * chance
        slots = np.empty(worth.shape, dtype=_SLOT)
        slots["tree"], slots["level"] = np.repeat(list(first_rows), sizes)[:, None], len(self._levels) - 1
        slots["node"] = np.asarray([node for growth in growths for node in growth.frontier])[:, None]
        slots["row"], slots["rank"] = rows[:, None], ranks
        # A later guess of a node is never taken before an earlier one.
        slots["worth"] = np.minimum.accumulate(worth, axis=1)
        least = np.repeat([growth.budget.least_chance for growth in growths], sizes)[:, None]
        return slots[(candidates.tokens[rows, :width] >= 0) & (slots["worth"] >= least)]

    def _take_best(self, trees: Sequence[int]) -> None:
        before = {i: len(self.growths[i].tokens) for i in trees}
        self._take(self._above_floor(trees))
        for i in trees:
            self.growths[i].advance(before[i])
        if not self._pays(trees):
            for i in trees:
                self.growths[i].frontier = []
        ended = [i for i in trees if not self.growths[i].frontier and self.growths[i].num_left > 0]
        if ended:  # nothing is to come: what is left of the budget goes to what is there
            self._take(np.isin(self._open["tree"], ended))

    def _pays(self, trees: Sequence[int]) -> bool:
        """Whether another level is expected to yield what it costs."""
        gain = 0.0
        for i in trees:
            growth = self.growths[i]
            best = self._outlook(growth).best_chance
            gain += best * sum(growth.worth[node] for node in growth.frontier)
        # The least: a level that one of them goes on with anyway costs the others little.
        return gain >= min(self.growths[i].budget.least_gain for i in trees)

    def _above_floor(self, trees: Sequence[int]) -> npt.NDArray[np.bool_]:
        """[open] whether a guess is worth more than what is still to come."""
        bins, owners = _bins(self._open["worth"]), self._open["tree"]
        counts = np.bincount(owners * _BINS + bins, minlength=len(self.growths) * _BINS).reshape(-1, _BINS)
        floors = np.full(len(self.growths), -1)
        for i in trees:
            growth = self.growths[i]
            if counts[i].any():
                # [bins] nodes there would be with each floor
                expected = counts[i] @ self._outlook(growth).table(growth.levels_to_come - 1)
                floors[i] = max((expected <= growth.num_left).sum() - 1, (counts[i] > 0).argmax())
        return np.asarray(bins <= floors[owners])

    def _outlook(self, growth: Growth) -> Outlook:
        key = source(growth.drafter, growth.request)
        if key not in self._outlooks:
            self._outlooks[key] = Outlook(self._calibration.by_rank(key))
        return self._outlooks[key]

    def _take(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Hangs these guesses, the best of each tree if they are more than it has room for."""
        chosen = wanted.nonzero()[0]
        slots = self._open[chosen]
        order = np.lexsort((-slots["worth"], slots["tree"]))
        owners = slots["tree"][order]
        place = np.arange(len(order)) - np.searchsorted(owners, owners)  # among those of its tree
        room = np.asarray([growth.num_left for growth in self.growths])
        chosen = np.sort(chosen[order[place < room[owners]]])
        for tree, node, level, row, rank, worth in self._open[chosen].tolist():
            candidates = self._levels[level]
            self.growths[tree].hang(
                node,
                int(candidates.tokens[row, rank]),
                candidates.law(row, rank),
                float(candidates.confidence[row, rank]),
                worth,
            )
        self._open = np.delete(self._open, chosen)


def _expand(growth: Growth, candidates: Candidates, row: int) -> None:
    """The fixed expansion's children of every frontier node; the first of those has the candidates of `row`."""
    first, width = len(growth.tokens), growth.budget.widths[growth.num_levels]
    rows = slice(row, row + len(growth.frontier))
    tokens, confidence = candidates.tokens[rows, :width].tolist(), candidates.confidence[rows, :width].tolist()
    for i, node in enumerate(growth.frontier):
        for rank, token in enumerate(tokens[i]):
            if token >= 0:
                growth.hang(node, token, candidates.law(row + i, rank), confidence[i][rank], 0.0)
    growth.advance(first)
