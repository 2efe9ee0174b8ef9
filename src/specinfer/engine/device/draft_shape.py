"""DraftShape: the fixed sizes of a draft loop, of which a small set holds the trees of all policies.

Plain decoding is the shape without nodes, `PLAIN`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from specinfer.core.tree import TreeBudget
from specinfer.drafters.growth.tree_batch import BEST_FIRST_WIDTH
from specinfer.drafters.kind import DraftKind
from specinfer.model.graphs.sizes import at_least


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The fixed sizes of a captured draft loop.

    Attributes:
        frontiers: The number of nodes computed at each level; the first level is the root alone.
        children: The number of candidates of each node of a level.
        num_nodes: The largest number of drafted nodes in a tree, without the root.
        num_guesses: The largest number of nodes that lookups propose.
        guess_depth: The longest path that they propose, which may be longer than the levels of the draft loop.
        kinds: Those of the drafters that grow such a tree each, before these are merged; none if lookups propose the
            whole tree, and there are no levels.
    """

    frontiers: tuple[int, ...]
    children: tuple[int, ...]
    num_nodes: int
    num_guesses: int = 0
    guess_depth: int = 0
    kinds: tuple[DraftKind, ...] = (DraftKind(),)

    def __post_init__(self) -> None:
        assert len(self.frontiers) == len(self.children)
        assert self.frontiers[:1] == ((1,) if self.kinds else ())
        grown = self._grown
        assert all(width <= above for width, above in zip(self.frontiers[1:], grown[:-1], strict=True))
        assert self.num_nodes <= self.num_candidates
        assert self.num_nodes or not (self.kinds or self.num_guesses)

    @property
    def _grown(self) -> list[int]:
        """Candidates of each level of one model."""
        return [width * each for width, each in zip(self.frontiers, self.children, strict=True)]

    def of_model(self, number: int) -> "DraftShape":
        """Return the shape of one model's draft loop, whose guesses are the tree of the model before it."""
        if not self.kinds:
            return self
        num_guesses = num_nodes = self.num_guesses
        for kind in self.kinds[: number + 1]:
            num_guesses, num_nodes = num_nodes, min(self.num_nodes, sum(self._grown[: kind.max_depth]) + num_nodes)
        levels = slice(self.kinds[number].max_depth)
        return DraftShape(
            self.frontiers[levels], self.children[levels], num_nodes, num_guesses, self.max_depth, (self.kinds[number],)
        )  # fmt: skip

    @property
    def num_models(self) -> int:
        return len(self.kinds)

    @property
    def num_levels(self) -> int:
        return len(self.frontiers)

    def holds(self, other: "DraftShape") -> bool:
        """Return whether every tree of the other shape also fits this one; plain decoding takes no draft loop."""
        if not self.num_nodes or not other.num_nodes:
            return self == other
        levels = (zip(self.frontiers, other.frontiers, strict=False), zip(self.children, other.children, strict=False))
        deep = (
            self.guess_depth >= other.guess_depth
            and self.num_levels >= other.num_levels
            and self.num_nodes >= other.num_nodes
        )
        return (
            deep
            and self.kinds == other.kinds
            and self.num_guesses >= other.num_guesses
            and all(mine >= theirs for level in levels for mine, theirs in level)
        )

    @property
    def max_depth(self) -> int:
        return max(self.num_levels, self.guess_depth)

    @property
    def num_candidates(self) -> int:
        return sum(sum(self._grown[: kind.max_depth]) for kind in self.kinds) + self.num_guesses

    @property
    def num_known(self) -> int:
        """The largest number of known tokens that the drafter of one model's shape computes."""
        kind = self.kinds[0]
        return 1 + self.max_depth if kind.reads_paths else 1 if kind.shares_cache else 2

    @property
    def passes(self) -> list[Sequence[int]]:
        """The distances from the root of the tokens of each pass after the known ones, of one model's shape."""
        if self.kinds[0].block:
            return [self.kinds[0].block]
        distances = range(self.num_levels) if self.kinds[0].stores_drafts else [0] * self.num_levels
        return [[distance] * width for distance, width in zip(distances[1:], self.frontiers[1:], strict=True)]

    @property
    def num_columns(self) -> int:
        """The number of tokens computed for one request: known ones and those of later passes; the most of a model."""
        if len(self.kinds) != 1:
            return max((self.of_model(number).num_columns for number in range(len(self.kinds))), default=0)
        return self.num_known + sum(map(len, self.passes))

    @property
    def num_slots(self) -> int:
        """The target's slots for a request: of the root and the nodes, or of what a copy computes, if that is more."""
        borrowed = [self.of_model(i).num_columns for i, kind in enumerate(self.kinds) if kind.borrows_slots]
        return max([1 + self.num_nodes, *borrowed])

    @property
    def first_columns(self) -> tuple[int, ...]:
        """The index of each pass's first token among these; known tokens come first."""
        return (0, *accumulate(map(len, self.passes), initial=self.num_known))[: 1 + len(self.passes)]


PLAIN = DraftShape((), (), 0, kinds=())

# With the root 2, 3, 4, 6, 8, 12, 16, ... rows, so that those of all requests fill the blocks of kernels.
NODES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255, 256)
LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
RECOMPUTED = (8, LEVELS[-1])  # places for tokens of a path that recurrent layers recompute
# Nodes of a best-first tree, and nodes of each level that may have children.
_WIDTHS = ((2, 1), (8, 2), (16, 4), (64, 8), (256, 16))


def holds(budget: TreeBudget) -> bool:
    """Return whether there is a shape for the budget."""
    return budget.max_nodes <= NODES[-1] and budget.max_depth <= LEVELS[-1]


def shape_of(
    budgets: Sequence[TreeBudget],
    most_nodes: int,
    most_frontier: int,
    guess_depth: int = 0,
    kinds: Sequence[DraftKind] = (DraftKind(),),
    most_slots: int | None = None,
) -> DraftShape:
    """Return the smallest shape that holds a tree of each budget, `PLAIN` if drafts are not wanted or have no slots.

    If all budgets are fixed expansions, the shape fits them exactly.

    Args:
        budgets: Budgets of the requests.
        most_nodes: Draft tokens of a tree that there are slots for; the least promising are left out.
        most_frontier: Nodes of a level that may have children.
        guess_depth: Longest path that lookups propose, at most as many nodes as a tree has; 0 without lookups.
        kinds: Those of the drafters that grow a tree each; the trees are merged.
        most_slots: Most slots of the target for each request, of which copies may need more than trees have nodes; None
            for no limit.
    """
    wanted = [budget for budget in budgets if budget.max_nodes]
    assert all(map(holds, wanted))
    if not wanted or most_nodes < 1:
        return PLAIN
    are_fixed = all(budget.widths for budget in wanted)
    depth = max(budget.max_depth for budget in wanted)
    levels = depth if are_fixed else at_least(LEVELS, depth)
    nodes = max(budget.max_nodes for budget in wanted)
    assert levels is not None
    nodes = nodes if are_fixed else at_least(NODES, nodes) or nodes
    if nodes > most_nodes:
        nodes = most_nodes if are_fixed else max(size for size in NODES if size <= most_nodes)
    levels = min(levels, nodes, max(kind.max_depth for kind in kinds))  # each has a node at least
    frontiers, children = [1], list[int]()
    for level in range(levels):
        children.append(max(_children(budget, level) for budget in wanted))
        if level + 1 < levels:
            width = max(_frontier(budget, level + 1) for budget in wanted)
            frontiers.append(min(width, frontiers[-1] * children[-1], most_frontier))
    grown = [width * each for width, each in zip(frontiers, children, strict=True)]
    total = sum(sum(grown[: kind.max_depth]) for kind in kinds)
    num_guesses = nodes if guess_depth else 0
    guess_depth = min(guess_depth if are_fixed else at_least(LEVELS, guess_depth) or guess_depth, num_guesses)
    num_nodes = min(nodes, total + num_guesses)
    shape = DraftShape(tuple(frontiers), tuple(children), num_nodes, num_guesses, guess_depth, tuple(kinds))
    if most_slots is None or shape.num_slots <= most_slots:
        return shape
    fewer = max((size for size in NODES if size < nodes), default=0)
    cut = [budget.cut(budget.max_depth, fewer) for budget in budgets]
    return shape_of(cut, fewer, most_frontier, guess_depth, kinds, most_slots)


def shape_of_guesses(num_guesses: int, depth: int, most_nodes: int) -> DraftShape:
    """Return the shape of trees that lookups alone propose, `PLAIN` if they propose nothing.

    Args:
        num_guesses: Nodes of the largest tree, without the root.
        depth: Depth of the deepest one.
        most_nodes: Nodes that there are slots for, without the root.
    """
    if num_guesses < 1:
        return PLAIN
    nodes = min(at_least(NODES, num_guesses) or num_guesses, most_nodes)
    assert nodes >= num_guesses
    return DraftShape((), (), nodes, nodes, min(at_least(LEVELS, depth) or depth, nodes), kinds=())


def holds_expansion(shape: DraftShape, budget: TreeBudget) -> bool:
    """Return whether a draft loop of this shape grows the whole fixed expansion, if the budget is one.

    True in plain decoding, which grows no tree.
    """
    if not shape.num_nodes or not budget.widths:
        return True
    budget = budget.cut(max((kind.max_depth for kind in shape.kinds), default=budget.max_depth), budget.max_nodes)
    widths, depth = [_frontier(budget, level) for level in range(len(budget.widths))], len(budget.widths)
    return (
        0 < depth <= shape.num_levels
        and shape.num_nodes >= budget.max_nodes
        and all(width <= most for width, most in zip(widths, shape.frontiers, strict=False))
    )


def _children(budget: TreeBudget, level: int) -> int:
    if budget.widths:
        return budget.widths[level] if level < len(budget.widths) else 1
    nodes = at_least(NODES, budget.max_nodes)
    assert nodes is not None
    return min(BEST_FIRST_WIDTH, nodes)


def _frontier(budget: TreeBudget, level: int) -> int:
    if not budget.widths:
        return next(width for nodes, width in _WIDTHS if budget.max_nodes <= nodes)
    width = 1
    for each in budget.widths[:level]:
        width *= each
    return width
