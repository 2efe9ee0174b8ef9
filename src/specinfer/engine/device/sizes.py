"""A small set of shapes that hold the trees of all policies, so that few programs are captured."""

from collections.abc import Sequence

from specinfer.core.tree import TreeBudget
from specinfer.drafters.growth.tree_batch import BEST_FIRST_WIDTH
from specinfer.drafters.kind import DraftKind
from specinfer.engine.device.growth import DraftShape
from specinfer.model.graphs.sizes import at_least

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
) -> DraftShape | None:
    """Return the smallest shape that holds a tree of each budget, or None if drafts are not wanted or have no slots.

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
        return None
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


def shape_of_guesses(num_guesses: int, depth: int, most_nodes: int) -> DraftShape | None:
    """Return the shape of trees that lookups alone propose, or None if they propose nothing.

    Args:
        num_guesses: Nodes of the largest tree, without the root.
        depth: Depth of the deepest one.
        most_nodes: Nodes that there are slots for, without the root.
    """
    if num_guesses < 1:
        return None
    nodes = min(at_least(NODES, num_guesses) or num_guesses, most_nodes)
    assert nodes >= num_guesses
    return DraftShape((), (), nodes, nodes, min(at_least(LEVELS, depth) or depth, nodes), kinds=())


def holds_expansion(shape: DraftShape | None, budget: TreeBudget) -> bool:
    """Return whether a draft loop of this shape grows the whole fixed expansion, if the budget is one.

    None is grown without a shape.
    """
    if shape is None or not budget.widths:
        return True
    budget = budget.cut(max((kind.max_depth for kind in shape.kinds), default=budget.max_depth), budget.max_nodes)
    widths, depth = [_frontier(budget, level) for level in range(len(budget.widths))], len(budget.widths)
    return (
        0 < depth <= shape.num_levels
        and shape.num_nodes >= budget.max_nodes
        and all(width <= there for width, there in zip(widths, shape.frontiers, strict=False))
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
