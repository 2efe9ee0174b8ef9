"""Growth of token trees on a device: level by level as in `expansion`, in operations with fixed shapes.

The frontier of a level is its most promising nodes, as many as the shape allows; their candidates come next. At
the end the best of all candidates form the tree. A candidate never has a higher path probability than its parent, and
ties go to the earlier one, so the best are closed under ancestors. Nothing here waits for the device, and only values
depend on tensor contents, so that everything is captured as one graph.

Rule and sources are those of `expansion` (SpecInfer, arXiv 2305.09781, section 3; OPT-Tree, arXiv 2406.17276), with one
difference: a level does not save nodes for later ones, since all candidates are computed before any is chosen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specinfer.core.noise import gumbel
from specinfer.drafters.growth.calibration import MIDDLE, RANKS
from specinfer.drafters.growth.draft_sampling import SUPPORT


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The fixed sizes of a captured draft loop.

    Attributes:
        frontiers: The number of nodes computed at each level; the first level is the root alone.
        children: The number of candidates of each node of a level.
        num_nodes: The largest number of drafted nodes in a tree, without the root.
    """

    frontiers: tuple[int, ...]
    children: tuple[int, ...]
    num_nodes: int

    def __post_init__(self) -> None:
        assert len(self.frontiers) == len(self.children) >= 1
        assert self.frontiers[0] == 1
        grown = [width * each for width, each in zip(self.frontiers, self.children, strict=True)]
        assert all(width <= above for width, above in zip(self.frontiers[1:], grown[:-1], strict=True))
        assert 1 <= self.num_nodes <= sum(grown)

    @property
    def num_levels(self) -> int:
        return len(self.frontiers)

    def holds(self, other: "DraftShape") -> bool:
        """Return whether every tree of the other shape also fits this one."""
        levels = (zip(self.frontiers, other.frontiers, strict=False), zip(self.children, other.children, strict=False))
        deep = self.num_levels >= other.num_levels and self.num_nodes >= other.num_nodes
        return deep and all(mine >= theirs for level in levels for mine, theirs in level)

    @property
    def num_columns(self) -> int:
        """The number of tokens computed for one request: two known ones and the frontiers below the root."""
        return 1 + sum(self.frontiers)

    @property
    def first_columns(self) -> tuple[int, ...]:
        """The index of each level's frontier among these tokens; the root's is not fixed."""
        return (0, *accumulate(self.frontiers[1:], initial=2))[: self.num_levels]


@dataclass(frozen=True, slots=True)
class ChanceTable:
    """Acceptance probabilities as `Calibration` counts them: a table for greedy and one for sampled requests."""

    points: Tensor  # [points] float32, the confidences at which the lines meet
    heights: Tensor  # [2, ranks * (points + 1)] float32, the lines' values at 0
    slopes: Tensor  # [2, ranks * (points + 1)]

    @classmethod
    def empty(cls, device: torch.device) -> "ChanceTable":
        points = torch.from_numpy(MIDDLE).float().to(device)
        lines = torch.zeros(2, 2, RANKS * (len(points) + 1), device=device)
        return cls(points, lines[0], lines[1])

    def chance(self, sampled: Tensor, confidence: Tensor) -> Tensor:
        """Return the probability that a token is accepted once its parent is, [requests, nodes, width].

        Args:
            sampled: [requests] True where drafting uses noise.
            confidence: [requests, nodes, width] float32, the best candidate of a node first.
        """
        num_lines = len(self.points) + 1
        ranks = torch.arange(confidence.shape[2], device=confidence.device).clamp(max=RANKS - 1)
        line = torch.searchsorted(self.points, confidence.contiguous()) + ranks * num_lines
        line = line + sampled.long()[:, None, None] * (RANKS * num_lines)
        return (self.heights.flatten()[line] + self.slopes.flatten()[line] * confidence).clamp(min=0.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the tree of each request of a launch."""

    max_nodes: Tensor  # [requests] int64; 0 for no draft
    max_depth: Tensor  # [requests] int64
    min_path_prob: Tensor  # [requests] float32; less likely nodes are left out
    widths: Tensor  # [requests, levels] int64 children of each node in a fixed expansion; 0 for best first


@dataclass(frozen=True, slots=True)
class Sampling:
    """The inputs that decide the tokens of each request of a launch."""

    seeds: Tensor  # [requests] int64
    temperatures: Tensor  # [requests] float32; 0 is greedy
    positions: Tensor  # [requests] int64, position of the root


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes of one level, with their visibility of the columns that the drafter computes for a request."""

    level: int
    tokens: Tensor  # [requests, frontier] int64
    sees: Tensor  # [requests, frontier, columns so far] bool: known tokens, ancestors and the node itself


@dataclass(frozen=True, slots=True)
class Grown:
    """The trees of a launch; node 0 is the root, and entries beyond `sizes` are meaningless."""

    tokens: Tensor  # [requests, 1 + nodes] int64; the root's is 0
    parents: Tensor  # [requests, 1 + nodes] int64; the root's, and those of unused nodes, are 0
    sizes: Tensor  # [requests] int64, including the root
    confidence: Tensor  # [requests, 1 + nodes] float32
    columns: Tensor  # [requests, 1 + nodes] int64, the drafter's column of the node; -1 if not computed
    path_prob: Tensor  # [requests, levels] float32, sum over each level's frontier


Score = Callable[[Frontier], Tensor]  # -> [requests, frontier, vocab] logits after each of these nodes


def grow(
    shape: DraftShape,
    roots: Tensor,
    has_two: Tensor,
    score: Score,
    distribution: Sampling,
    table: ChanceTable,
    limits: Limits,
) -> Grown:
    """Grow the trees of all requests of a launch.

    Args:
        roots: [requests] int64 the last known tokens.
        has_two: [requests] bool, True if the drafter computes two known tokens, so that the root's column is 1 instead
            of 0.
        score: One pass of the drafter.
    """
    requests, device = len(roots), roots.device
    root_column = has_two.long()
    known = torch.stack([torch.ones_like(has_two), has_two], dim=1).unsqueeze(1)
    frontier = Frontier(0, roots.unsqueeze(1), known)
    prob_above = (limits.max_nodes > 0).float().mul(2).sub(1).unsqueeze(1)  # -1 where there is no such node
    place_above = torch.full((requests, 1), -1, device=device)  # index among all candidates; -1 for the root
    tokens, confidences, path_probs = list[Tensor](), list[Tensor](), list[Tensor]()
    parents, columns, level_probs = list[Tensor](), list[Tensor](), list[Tensor]()
    offset = 0
    for level, children in enumerate(shape.children):
        level_probs.append(prob_above.clamp(min=0.0).sum(dim=1))
        token, confidence, possible = _candidates(score(frontier), distribution, level, children)
        path_prob = _path_prob(prob_above, confidence, possible, level, distribution, table, limits)
        tokens.append(token.flatten(1))
        confidences.append(confidence.flatten(1))
        path_probs.append(path_prob.flatten(1))
        parents.append(place_above.repeat_interleave(children, dim=1))
        column = torch.full_like(tokens[-1], -1)
        if level + 1 < shape.num_levels:
            first, width = shape.first_columns[level + 1], shape.frontiers[level + 1]
            best = path_probs[-1].sort(dim=1, descending=True, stable=True).indices[:, :width]
            own = torch.eye(width, dtype=torch.bool, device=device).expand(requests, -1, -1)
            above = (best // children).unsqueeze(2).expand(-1, -1, frontier.sees.shape[2])
            sees = torch.cat([frontier.sees.gather(1, above), own], dim=2)
            frontier = Frontier(level + 1, tokens[-1].gather(1, best), sees)
            prob_above, place_above = path_probs[-1].gather(1, best), best + offset
            column = column.scatter(1, best, torch.arange(first, first + width, device=device).expand(requests, -1))
        columns.append(column)
        offset += tokens[-1].shape[1]
    found = [torch.cat(each, dim=1) for each in (tokens, confidences, parents, columns)]
    return _best(shape, torch.cat(path_probs, dim=1), found, root_column, limits, torch.stack(level_probs, dim=1))


def _candidates(logits: Tensor, distribution: Sampling, level: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, confidence, and possible, [requests, frontier, width] each, like `drawing` with noise."""
    requests, nodes, vocab = logits.shape
    values, ids = logits.topk(min(vocab, max(SUPPORT, width)), dim=-1)
    sampled = (distribution.temperatures > 0)[:, None, None]
    scores = values / torch.where(sampled, distribution.temperatures[:, None, None], 1.0)
    seeds, positions = (
        each.repeat_interleave(nodes) for each in (distribution.seeds, distribution.positions + level + 1)
    )
    noise = gumbel(seeds, positions, ids.flatten(0, 1)).unflatten(0, (requests, nodes))
    scores = torch.where(sampled, scores + noise, values)
    best = scores.topk(width, dim=-1)
    confidence = scores.softmax(dim=-1).gather(2, best.indices).nan_to_num(0.0)
    return ids.gather(2, best.indices), confidence, best.values > -torch.inf


def _path_prob(
    above: Tensor,
    confidence: Tensor,
    possible: Tensor,
    level: int,
    distribution: Sampling,
    table: ChanceTable,
    limits: Limits,
) -> Tensor:
    """Return path probabilities, [requests, frontier, width]; -1 for what may not be taken."""
    width = limits.widths[:, level, None, None]
    is_fixed = (limits.widths[:, 0] > 0)[:, None, None]
    chance = torch.where(is_fixed, 1.0, table.chance(distribution.temperatures > 0, confidence))
    # A later candidate of a node is never taken before an earlier one.
    path_prob = chance.cummin(dim=2).values * above.unsqueeze(2)
    ranks = torch.arange(confidence.shape[2], device=confidence.device)
    usable = possible & (above.unsqueeze(2) >= 0) & (path_prob >= limits.min_path_prob[:, None, None])
    usable = usable & ((ranks < width) | ~is_fixed) & (level < limits.max_depth)[:, None, None]
    return torch.where(usable, path_prob, -1.0)


def _best(
    shape: DraftShape,
    path_prob: Tensor,
    found: Sequence[Tensor],
    root_column: Tensor,
    limits: Limits,
    level_probs: Tensor,
) -> Grown:
    """Return the trees of the best candidates.

    `path_prob` and each of `found` are [requests, candidates], level by level.
    """
    tokens, confidence, parents, columns = found
    requests, total = path_prob.shape
    numbers = torch.arange(1, shape.num_nodes + 1, device=path_prob.device).expand(requests, -1)
    order = path_prob.sort(dim=1, descending=True, stable=True).indices[:, : shape.num_nodes]
    taken = (path_prob.gather(1, order) >= 0) & (numbers <= limits.max_nodes.unsqueeze(1))
    chosen = torch.where(taken, order, total).sort(dim=1).values  # parents before children
    in_use = chosen < total
    node_of = torch.zeros(requests, total + 1, dtype=torch.int64, device=path_prob.device).scatter(1, chosen, numbers)
    chosen = chosen.clamp(max=total - 1)
    above = parents.gather(1, chosen)
    parent = torch.where(in_use & (above >= 0), node_of.gather(1, above.clamp(min=0)), 0)

    def column(root: Tensor, values: Tensor, unused: float) -> Tensor:
        return torch.cat([root.unsqueeze(1), torch.where(in_use, values.gather(1, chosen), unused)], dim=1)

    none = torch.zeros_like(root_column)
    return Grown(
        tokens=column(none, tokens, 0),
        parents=torch.cat([none.unsqueeze(1), parent], dim=1),
        sizes=1 + in_use.sum(dim=1),
        confidence=column(none.float(), confidence, 0.0),
        columns=column(root_column, columns, -1),
        path_prob=level_probs,
    )
