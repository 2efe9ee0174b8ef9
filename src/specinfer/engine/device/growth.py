"""Growth of token trees on a device: level by level as in `tree_batch`, in kernels with fixed shapes.

The frontier of a level is its most promising nodes, as many as the shape allows; their candidates come next. At
the end the best of all candidates form the tree. A candidate never has a higher path probability than its parent, and
ties go to the earlier one, so the best are closed under ancestors. Nothing here waits for the device, and only values
depend on tensor contents, so that everything is captured as one graph.

Rule and sources are those of `tree_batch` (SpecInfer, arXiv 2305.09781, section 3; OPT-Tree, arXiv 2406.17276), with
two differences: a level does not save nodes for later ones, since all candidates are computed before any is chosen; and
confidence is a share of the whole vocabulary, which kernels read anyway, not of the best tokens, unless tokens are
drawn.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specinfer.engine.device.draft_shape import DraftShape
from specinfer.ops import tree_ops
from specinfer.ops.cpu.choice import SUPPORT, most_probable
from specinfer.ops.logits import Truncation
from specinfer.ops.tree_layout import num_words, pack_bits
from specinfer.ops.trees import (
    Candidates,
    ChanceTable,
    DeviceDraws,
    DeviceTrees,
    DrawnRows,
    Frontier,
    Guesses,
    Limits,
    Sampling,
)


class Drawing:
    """The draws of one draft loop: these candidates replace those that were chosen.

    Args:
        is_drawn: [requests] bool, True for requests whose tokens are drawn.
        streams: [requests] int64 seeds of the noise of their draws.
        first: [requests] int64 number of the first draw of the tree.
        truncation: Of the requests.
        num_candidates: Candidates of each request.
        out: The draws of the trees' nodes, in order, written to.
    """

    def __init__(
        self,
        is_drawn: Tensor,
        streams: Tensor,
        first: Tensor,
        truncation: Truncation,
        num_candidates: int,
        out: DeviceDraws,
    ) -> None:
        self._drawn = DrawnRows(is_drawn, streams, first, truncation.temperatures)
        self._truncation, self._out = truncation, out
        self._candidates = DeviceDraws.empty(len(streams), num_candidates, out.tokens.shape[2], streams.device)

    def add_candidates(
        self,
        logits: Tensor,
        frontier: Frontier,
        first: int,
        width: int,
        table: ChanceTable,
        limits: Limits,
        candidates: Candidates,
        accepted: Tensor | None = None,
    ) -> None:
        """Draw the candidates of a level; arguments as for `tree_ops.add_candidates`."""
        values, ids = most_probable(logits.float(), min(SUPPORT, logits.shape[1]))
        least = tree_ops.least_kept(values, self._truncation)
        tree_ops.draw_candidates(
            values, ids, least, self._drawn, frontier, first, width, table, limits, candidates, self._candidates,
            accepted,
        )  # fmt: skip
        num_in_use = (frontier.path_prob >= 0).sum(dim=1)  # such nodes come first
        self._drawn = self._drawn._replace(numbers=self._drawn.numbers + num_in_use)

    def finish(
        self, candidates: Candidates, roots: Tensor, root_columns: Tensor, limits: Limits, trees: DeviceTrees
    ) -> None:
        """Note what the nodes were drawn from; what was drawn for other candidates has not been looked at.

        Args:
            candidates, roots, root_columns, limits: What `best_tree` formed the trees of.
        """
        requests, total = candidates.tokens.shape
        numbers = torch.arange(total, dtype=torch.int32, device=roots.device).repeat(requests, 1)
        numbered = replace(trees, columns=torch.empty_like(trees.columns))
        tree_ops.best_tree(
            candidates.path_prob, replace(candidates, columns=numbers), roots, root_columns, limits, numbered
        )  # fmt: skip
        nodes = torch.arange(1, trees.tokens.shape[1], dtype=torch.int32, device=roots.device)
        is_draw = (nodes < trees.sizes.unsqueeze(1)) & self._drawn.is_drawn.unsqueeze(1)
        self._out.nodes.copy_(torch.where(is_draw, nodes, -1))
        chosen = numbered.columns[:, 1:].clamp(min=0).long().unsqueeze(2).expand_as(self._out.tokens)
        for place, drawn in ((self._out.tokens, self._candidates.tokens), (self._out.probs, self._candidates.probs)):
            torch.gather(drawn, 1, chosen, out=place)


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
