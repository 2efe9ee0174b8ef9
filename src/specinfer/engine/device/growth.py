"""Growth of token trees on a device: level by level as in `expansion`, in kernels with fixed shapes.

The frontier of a level is its most promising nodes, as many as the shape allows; their candidates come next. At
the end the best of all candidates form the tree. A candidate never has a higher path probability than its parent, and
ties go to the earlier one, so the best are closed under ancestors. Nothing here waits for the device, and only values
depend on tensor contents, so that everything is captured as one graph.

Rule and sources are those of `expansion` (SpecInfer, arXiv 2305.09781, section 3; OPT-Tree, arXiv 2406.17276), with two
differences: a level does not save nodes for later ones, since all candidates are computed before any is chosen; and
confidence is a share of the whole vocabulary, which kernels read anyway, not of the best tokens, unless tokens are
drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from specinfer.drafters.growth.calibration import MIDDLE, RANKS
from specinfer.drafters.kind import DraftKind
from specinfer.ops import tree_ops
from specinfer.ops.drawn import Drawing
from specinfer.ops.tree_layout import num_words, pack_bits
from specinfer.ops.trees import Candidates, ChanceTable, DeviceTrees, Frontier, Guesses, Limits, Sampling


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
        assert 1 <= self.num_nodes <= self.num_candidates

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
        """Return whether every tree of the other shape also fits this one."""
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


def empty_table(device: torch.device) -> ChanceTable:
    """Return the tables of a calibration that has seen nothing; all chances are 0."""
    points = torch.from_numpy(MIDDLE).float().to(device)
    lines = torch.zeros(2, 3, RANKS * (len(points) + 1), device=device)
    return ChanceTable(points, lines[0], lines[1])


# -> [requests * frontier, vocab] logits after each of these nodes, the least score of a token that may follow, and the
# probability that the best one is accepted, if the drafter predicts it
Score = Callable[[Frontier, Candidates], tuple[Tensor, Tensor | None, Tensor | None]]


def grow(
    shape: DraftShape,
    roots: Tensor,
    root_columns: Tensor,
    score: Score,
    sampling: Sampling,
    table: ChanceTable,
    limits: Limits,
    out: DeviceTrees,
    guesses: Guesses | None = None,
    most: Tensor | None = None,
    drawing: Drawing | None = None,
) -> Candidates:
    """Grow the trees of all requests of a launch, and return the candidates of which the best form them.

    Args:
        roots: [requests] int64 the last known tokens.
        root_columns: [requests] column of the last known token that the drafter computes; a bool if there are at most
            two.
        score: Scores of the drafter after the frontier of a level, whose nodes are among the candidates so far.
        out: The trees, written to.
        guesses: Trees of lookups and other models, or None without any.
        most: [requests] nodes of the trees that are formed; `limits` are those of what is grown here.
        drawing: The draws of requests whose tokens are drawn, or None if all are chosen.
    """
    requests, device, words = len(roots), roots.device, num_words(shape.num_columns)
    candidates = Candidates.empty(requests, shape.num_candidates, device)
    sees = torch.zeros((requests, 1, words), dtype=torch.int32, device=device)
    if shape.num_known <= 2:
        sees[:, 0, 0] = 1 + 2 * root_columns.int()
    else:
        sees[:, 0] = pack_bits(torch.arange(shape.num_known, device=device) <= root_columns.unsqueeze(1), words)
    number = torch.full((requests, 1), -1, dtype=torch.int32, device=device)
    path_prob = torch.where(limits.max_nodes > 0, 1.0, -1.0)
    out.path_prob[:, 0] = path_prob.clamp(min=0.0)
    if shape.num_levels < out.path_prob.shape[1]:  # others have deeper trees
        out.path_prob[:, shape.num_levels :] = 0.0
    frontier, first = Frontier(0, roots.unsqueeze(1), sees, number, path_prob.unsqueeze(1)), 0
    for level, (width, children) in enumerate(zip(shape.frontiers, shape.children, strict=True)):
        logits, least, accepted = score(frontier, candidates)
        tree_ops.add_candidates(logits, frontier, first, children, sampling, table, limits, candidates, least, accepted)
        if drawing is not None:
            drawing.add_candidates(logits, frontier, first, children, table, limits, candidates, accepted)
        if level + 1 < shape.num_levels:
            above, frontier = frontier, _empty_frontier(level + 1, requests, shape.frontiers[level + 1], words, device)
            first_column = 0 if shape.kinds[0].block else shape.first_columns[level + 1]  # 0 is not read
            tree_ops.next_frontier(
                candidates.path_prob[:, first : first + width * children],
                above, first, first_column, candidates, out.path_prob, frontier,
            )  # fmt: skip
        first += width * children
    if guesses is not None:
        tree_ops.merge_guesses(guesses, candidates, first)
    limits = limits if most is None else replace(limits, max_nodes=most)
    tree_ops.best_tree(candidates.path_prob, candidates, roots, root_columns, limits, out)
    if drawing is not None:
        drawing.finish(candidates, roots, root_columns, limits, out)
    return candidates


def _empty_frontier(level: int, num_requests: int, width: int, words: int, device: torch.device) -> Frontier:
    def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty((num_requests, width, *shape), dtype=dtype, device=device)

    return Frontier(level, room(dtype=torch.int64), room(words), room(), room(dtype=torch.float32))
