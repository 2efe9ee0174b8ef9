"""The kernels around a device's passes in plain PyTorch; those in `ops/triton` have the same signatures.

Rule and sources are those of `drafters.growth.tree_batch` (SpecInfer, arXiv 2305.09781, section 3; OPT-Tree, arXiv
2406.17276). The shapes of results depend only on the shapes of inputs, so that a loop can be captured.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.core.noise import gumbel
from specinfer.ops.chance_table import GREEDY, SAMPLED, ChanceTable
from specinfer.ops.tree_layout import pack_bits, unpack_bits


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the tree of each request of a launch, in integers of any size."""

    max_nodes: Tensor  # [requests]; 0 for no draft
    max_depth: Tensor  # [requests]
    min_path_prob: Tensor  # [requests] float32; less likely nodes are left out
    widths: Tensor  # [requests, levels] children of each node in a fixed expansion; 0 for best first


@dataclass(frozen=True, slots=True)
class Sampling:
    """The inputs that decide the tokens of each request of a launch."""

    seeds: Tensor  # [requests] int64
    temperatures: Tensor  # [requests] float32; 0 is greedy
    positions: Tensor  # [requests] integers, position of the root


@dataclass(frozen=True, slots=True)
class Candidates:
    """All candidates of a launch, level by level, as the levels add them. All are [requests, candidates]."""

    tokens: Tensor  # int64; 0 where there is none
    confidence: Tensor  # float32; -1 for guesses of lookups alone
    path_prob: Tensor  # float32; -1 for what may not be taken
    parents: Tensor  # int32 numbers of their parents among the candidates; -1 for the root
    columns: Tensor  # int32 columns in which the drafter computes them; -1 if it does not

    @classmethod
    def empty(cls, num_requests: int, num_candidates: int, device: torch.device) -> "Candidates":
        def room(dtype: torch.dtype) -> Tensor:
            return torch.empty((num_requests, num_candidates), dtype=dtype, device=device)

        return cls(
            room(torch.int64), room(torch.float32), room(torch.float32), room(torch.int32), room(torch.int32)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes of one level that may have children, in the order of their numbers; padding last."""

    level: int
    tokens: Tensor  # [requests, width] int64; 0 for padding
    sees: Tensor  # [requests, width, words] int32 bits: the drafter's columns that the node sees, its own included
    numbers: Tensor  # [requests, width] int32 numbers among the candidates; -1 for the root and for padding
    path_prob: Tensor  # [requests, width] float32; -1 for padding


@dataclass(frozen=True, slots=True)
class Grown:
    """The trees of a launch; node 0 is the root."""

    tokens: Tensor  # [requests, 1 + nodes] int32; 0 from `sizes` on
    parents: Tensor  # [requests, 1 + nodes] int32; the root's, and those from `sizes` on, are 0
    sizes: Tensor  # [requests] int32, including the root
    confidence: Tensor  # [requests, 1 + nodes] float32
    columns: Tensor  # [requests, 1 + nodes] int32, the drafter's column of the node; -1 if not computed
    path_prob: Tensor  # [requests, levels] float32, sum over each level's frontier


def add_candidates(
    logits: Tensor,
    frontier: Frontier,
    first: int,
    width: int,
    sampling: Sampling,
    table: ChanceTable,
    limits: Limits,
    candidates: Candidates,
    least: Tensor | None = None,
    accepted: Tensor | None = None,
) -> None:
    """Add the candidates of a level: the best tokens after each node of the frontier, under the target's noise.

    Args:
        logits: [requests * frontier, vocab] of the drafter.
        first: Number of the level's first candidate.
        width: Candidates of each node.
        candidates: Written to, from `first` on.
        least: [requests * frontier] float32 as `plain_logits.least_kept` returns it, or None to keep all tokens.
        accepted: [requests * frontier] float32 confidence of the best candidate, which scales that of the others; None
            for that of the logits.
    """
    requests, nodes = frontier.tokens.shape
    of_level = slice(first, first + nodes * width)
    kept = None if least is None else least.view(requests, nodes, 1)
    token, confidence = _best_tokens(logits.unflatten(0, (requests, nodes)), sampling, frontier.level, width, kept)
    if accepted is not None:
        scale = accepted.view(requests, nodes, 1) / confidence[:, :, :1].clamp(min=1e-9)
        confidence = (confidence * scale).clamp(max=1.0)
    numbers = torch.where(sampling.temperatures > 0, SAMPLED, GREEDY)
    path_prob = path_probs(token >= 0, table.chance(numbers, confidence), frontier, limits)
    candidates.tokens[:, of_level] = token.clamp(min=0).flatten(1)
    candidates.confidence[:, of_level] = confidence.flatten(1)
    candidates.path_prob[:, of_level] = path_prob.flatten(1)
    candidates.parents[:, of_level] = frontier.numbers.repeat_interleave(width, dim=1)
    candidates.columns[:, of_level].fill_(-1)


def path_probs(is_token: Tensor, chance: Tensor, frontier: Frontier, limits: Limits) -> Tensor:
    """Return the path probability of each candidate, -1 for what may not be taken, [requests, nodes, width].

    Args:
        is_token: [requests, nodes, width] whether there is a candidate.
        chance: [requests, nodes, width] its acceptance probability, which counts best first.
    """
    above, is_fixed = frontier.path_prob.unsqueeze(2), (limits.widths[:, 0] > 0)[:, None, None]
    # A later candidate of a node is never taken before an earlier one.
    path_prob = torch.where(is_fixed, 1.0, chance).cummin(dim=2).values * above
    ranks = torch.arange(chance.shape[2], device=chance.device)
    usable = is_token & (above >= 0) & (path_prob >= limits.min_path_prob[:, None, None])
    usable = usable & ((ranks < limits.widths[:, frontier.level, None, None]) | ~is_fixed)
    usable = usable & (frontier.level < limits.max_depth)[:, None, None]
    return torch.where(usable, path_prob, -1.0)


def _best_tokens(
    logits: Tensor, sampling: Sampling, level: int, width: int, least: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return tokens, -1 where there is none, and their confidence: [requests, nodes, width] each."""
    vocab = logits.shape[2]
    scores = logits.float()
    sampled = (sampling.temperatures > 0)[:, None, None]
    noise = gumbel(sampling.seeds, sampling.positions.long() + level + 1, torch.arange(vocab, device=logits.device))
    scaled = scores / torch.where(sampled, sampling.temperatures[:, None, None], 1.0)
    if least is not None:
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    scores = torch.where(sampled, scaled + noise.unsqueeze(1), scores)
    scores = scores.masked_fill(scores.isnan().any(dim=2, keepdim=True), -torch.inf)
    best = scores.topk(width, dim=-1)
    confidence = scores.softmax(dim=-1).gather(2, best.indices).nan_to_num(0.0)
    return best.indices.masked_fill(best.values == -torch.inf, -1), confidence


def next_frontier(
    path_prob: Tensor,
    frontier: Frontier,
    first: int,
    first_column: int,
    candidates: Candidates,
    level_probs: Tensor,
    out: Frontier,
) -> None:
    """Choose the most promising candidates of a level as the next frontier; of equals, the earlier one.

    Args:
        path_prob: [requests, of level] float32 of the level's candidates, -1 for what may not be taken.
        frontier: The frontier that these are children of.
        first: Number of the level's first candidate.
        first_column: The drafter's column of the new frontier's first node.
        candidates: Its `columns` are written to.
        level_probs: [requests, levels] float32; the column of the new frontier is written to.
        out: The new frontier, written to.
    """
    requests, total = path_prob.shape
    width, num_children = out.tokens.shape[1], total // frontier.tokens.shape[1]
    place = torch.arange(width, device=path_prob.device)
    limit = torch.full((requests,), width, dtype=torch.int64, device=path_prob.device)
    chosen = _best_first(path_prob, width, limit)
    in_use = chosen < total
    chosen = chosen.clamp(max=total - 1)
    column = first_column + place
    words = out.sees.shape[2]
    own = torch.arange(words * 32, device=path_prob.device) == column.unsqueeze(1)
    above = unpack_bits(frontier.sees, words * 32).gather(
        1, (chosen // num_children).unsqueeze(2).expand(-1, -1, words * 32)
    )
    out.sees.copy_(pack_bits((above & in_use.unsqueeze(2)) | own, words))
    of_level = slice(first, first + total)
    out.tokens.copy_(torch.where(in_use, candidates.tokens[:, of_level].gather(1, chosen), 0))
    out.numbers.copy_(torch.where(in_use, chosen + first, -1))
    out.path_prob.copy_(torch.where(in_use, path_prob.gather(1, chosen), -1.0))
    level_probs[:, out.level] = out.path_prob.clamp(min=0.0).sum(dim=1)
    columns = torch.nn.functional.pad(candidates.columns[:, of_level], (0, 1))
    columns.scatter_(1, torch.where(in_use, chosen, total), column.int().expand(requests, -1))
    candidates.columns[:, of_level] = columns[:, :-1]


def best_tree(
    path_prob: Tensor, candidates: Candidates, roots: Tensor, root_columns: Tensor, limits: Limits, out: Grown
) -> None:
    """Form the trees of the best candidates; these are closed under ancestors, since ties go to the earlier one.

    Args:
        path_prob: [requests, candidates] float32, that of `candidates`.
        roots: [requests] int64 tokens of the roots.
        root_columns: [requests] int32, or bool if all are below 2.
        out: The trees, written to; `path_prob` is not.
    """
    requests, total = path_prob.shape
    num_nodes = out.tokens.shape[1] - 1
    chosen = _best_first(path_prob, num_nodes, limits.max_nodes)
    in_use = chosen < total
    numbers = torch.arange(1, num_nodes + 1, device=path_prob.device).expand(requests, -1)
    node_of = torch.zeros((requests, total + 1), dtype=torch.int64, device=path_prob.device).scatter(1, chosen, numbers)
    chosen = chosen.clamp(max=total - 1)
    above = candidates.parents.long().gather(1, chosen)

    def fill(place: Tensor, root: Tensor, values: Tensor, unused: float) -> None:
        place[:, 0] = root
        place[:, 1:] = torch.where(in_use, values, unused)

    none = torch.zeros_like(roots)
    fill(out.tokens, roots, candidates.tokens.gather(1, chosen), 0)
    fill(out.parents, none, torch.where(above >= 0, node_of.gather(1, above.clamp(min=0)), 0), 0)
    fill(out.confidence, none, candidates.confidence.gather(1, chosen), 0.0)
    fill(out.columns, root_columns, candidates.columns.gather(1, chosen), -1)
    out.sizes.copy_(1 + in_use.sum(dim=1))


def mark_ancestors(parents: Tensor, first: Tensor, *, max_depth: int, last: int) -> tuple[Tensor, Tensor]:
    """Compute the tree attention mask and the positions of trees.

    Args:
        parents: [requests, nodes] int32 of the trees, the root first; nodes that are not in use have parent 0.
        first: [requests] int32 positions of the roots.
        max_depth: Longest possible path.
        last: Highest position. Nodes of a request that may emit no more may lie beyond it.

    Returns:
        visible: [requests * nodes, words] int32 bits, as in `TreeLayout`.
        positions: [requests, nodes] int32.
    """
    num_nodes = parents.shape[1]
    own = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    found, above = own, parents.long().unsqueeze(2).expand(-1, -1, num_nodes)
    for _ in range(num_nodes > 1 and max_depth):
        found = own | found.gather(1, above)
    positions = first.unsqueeze(1) + found.sum(dim=2, dtype=torch.int32) - 1
    return pack_bits(found.flatten(0, 1)), positions.clamp(max=last)


def keep_drafted(
    path: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    columns: Tensor,
    drafts: Tensor,
    before: Tensor,
    has_two: Tensor,
    out: tuple[Tensor, Tensor],
) -> None:
    """List what the drafter computed of each accepted path: all of it, or all but the last node.

    Args:
        path, lengths: As `walk` returns them.
        tokens, columns: [requests, nodes] of the trees.
        drafts: [requests] int32, 1 if the drafter has read the request.
        before: [requests] int64 the token before the next root, written to.
        has_two: [requests] bool, True if the drafter had two known tokens to compute; written to: it will have.
        out: [requests, max_depth + 1] int32 columns kept, after the first one, and [requests] int32 their number, -1
            for requests without drafts; written to.
    """
    is_drafted = (lengths >= 0) & (drafts > 0)
    nodes = path.clamp(min=0).long()
    kept = torch.where(path >= 0, columns.gather(1, nodes), -1)
    num_computed = (kept >= 0).sum(dim=1)
    one = torch.ones_like(kept[:, :1])
    out[0].copy_(torch.where(has_two.unsqueeze(1), torch.cat([one, kept], dim=1), torch.cat([kept, -one], dim=1)))
    out[1].copy_(torch.where(is_drafted, num_computed + has_two, -1))
    last = nodes.gather(1, (lengths.long() - 1).clamp(min=0).unsqueeze(1))
    before.copy_(torch.where(is_drafted, tokens.gather(1, last).squeeze(1), before))
    has_two.copy_(torch.where(is_drafted, num_computed < lengths, has_two))


def _best_first(path_prob: Tensor, width: int, limit: Tensor) -> Tensor:
    """Return the numbers of the best that may be taken, at most `limit` of each row, in rising order: [rows, width].

    Places that are not used hold the number of candidates.
    """
    total = path_prob.shape[1]
    order = path_prob.sort(dim=1, descending=True, stable=True).indices[:, :width]
    is_taken = (path_prob.gather(1, order) >= 0) & (
        torch.arange(order.shape[1], device=path_prob.device) < limit.unsqueeze(1)
    )
    return torch.where(is_taken, order, total).sort(dim=1).values
