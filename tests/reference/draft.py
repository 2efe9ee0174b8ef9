"""The growth of trees of a device in plain PyTorch: the reference of its kernels.

Rule and sources are those of `drafters.growth` (SpecInfer, arXiv 2305.09781, section 3; OPT-Tree, arXiv 2406.17276).
The draws of a node are one race of exponentials (Sequoia, arXiv 2402.12374) over its best tokens, with noise that
nothing else reads, as in `drafters.growth.draft_sampling`: the same numbers, so the same tokens.
"""

import torch
from torch import Tensor

from specinfer.core.noise import gumbel
from specinfer.ops.tree_layout import pack_bits, unpack_bits
from specinfer.ops.trees import (
    DRAWN,
    GREEDY,
    SAMPLED,
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


def chance(table: ChanceTable, numbers: Tensor, confidence: Tensor) -> Tensor:
    """Return the probability that a token is accepted once its parent is, [requests, nodes, width].

    Args:
        numbers: [requests] int64 numbers of tables.
        confidence: [requests, nodes, width] float32, the best candidate of a node first.
    """
    num_lines = len(table.points) + 1
    ranks = torch.arange(confidence.shape[2], device=confidence.device).clamp(max=table.num_ranks - 1)
    line = torch.searchsorted(table.points, confidence.contiguous()) + ranks * num_lines
    line = line + numbers[:, None, None] * (table.num_ranks * num_lines)
    # Rounding could give more than 1, and a child a higher path probability than its parent.
    return (table.heights.flatten()[line] + table.slopes.flatten()[line] * confidence).clamp(0.0, 1.0)


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
    """Compute `add_candidates` of `ops/triton/candidates.py`."""
    requests, nodes = frontier.tokens.shape
    of_level = slice(first, first + nodes * width)
    kept = None if least is None else least.view(requests, nodes, 1)
    token, confidence = _best_tokens(logits.unflatten(0, (requests, nodes)), sampling, frontier.level, width, kept)
    if accepted is not None:
        scale = accepted.view(requests, nodes, 1) / confidence[:, :, :1].clamp(min=1e-9)
        confidence = (confidence * scale).clamp(max=1.0)
    numbers = torch.where(sampling.temperatures > 0, SAMPLED, GREEDY)
    path_prob = path_probs(token >= 0, chance(table, numbers, confidence), frontier, limits)
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


def draw_candidates(
    values: Tensor,
    ids: Tensor,
    least: Tensor,
    drawn: DrawnRows,
    frontier: Frontier,
    first: int,
    width: int,
    table: ChanceTable,
    limits: Limits,
    candidates: Candidates,
    out: DeviceDraws,
    accepted: Tensor | None = None,
) -> None:
    """Compute `draw_candidates` of `ops/triton/drawn.py`."""
    requests, nodes = frontier.tokens.shape
    temperatures = torch.where(drawn.is_drawn, drawn.temperatures, 1.0).repeat_interleave(nodes).unsqueeze(1)
    numbers = drawn.numbers.unsqueeze(1) + torch.arange(nodes, device=values.device)
    scores = values / temperatures
    scores = scores.masked_fill(scores < least.unsqueeze(1), -torch.inf)
    whole = scores.double().softmax(dim=1).nan_to_num(0.0)
    noise = gumbel(drawn.streams.repeat_interleave(nodes), numbers.flatten(), ids)
    places = (scores + noise).topk(width, dim=1).indices
    tokens = ids.gather(1, places).masked_fill(whole.gather(1, places) <= 0, -1).view(requests, nodes, width)
    is_own = places.unsqueeze(2) == torch.arange(values.shape[1], device=ids.device)
    was_drawn = is_own.cumsum(dim=1) > is_own.long()
    left = torch.where(was_drawn, 0.0, whole.unsqueeze(1))
    probs = (left / left.sum(dim=2, keepdim=True)).nan_to_num(0.0)

    sure = (whole[:, 0].float() if accepted is None else accepted).view(requests, nodes, 1).expand(-1, -1, width)
    probable = chance(table, torch.full_like(drawn.streams, DRAWN), sure)
    of_level, is_drawn = slice(first, first + nodes * width), drawn.is_drawn.unsqueeze(1)
    for place, found in (
        (candidates.tokens, tokens.clamp(min=0)),
        (candidates.confidence, sure),
        (candidates.path_prob, path_probs(tokens >= 0, probable, frontier, limits)),
    ):
        place[:, of_level] = torch.where(is_drawn, found.flatten(1), place[:, of_level])
    out.tokens[:, of_level] = ids.int().view(requests, nodes, 1, -1).expand(-1, -1, width, -1).flatten(1, 2)
    out.probs[:, of_level] = probs.view(requests, nodes * width, -1)


def next_frontier(
    path_prob: Tensor,
    frontier: Frontier,
    first: int,
    first_column: int,
    candidates: Candidates,
    level_probs: Tensor,
    out: Frontier,
) -> None:
    """Compute `next_frontier` of `ops/triton/draft.py`."""
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


def merge_guesses(guesses: Guesses, candidates: Candidates, first: int) -> None:
    """Compute `merge_guesses` of `ops/triton/draft.py`."""
    tokens, parents = candidates.tokens[:, :first], candidates.parents[:, :first]
    numbers = torch.full_like(guesses.parents, -1, dtype=torch.int64)  # of each guess, among the candidates
    for guess in range(guesses.tokens.shape[1]):
        above, token = guesses.parents[:, guess : guess + 1].long(), guesses.tokens[:, guess : guess + 1].long()
        path_prob = guesses.path_prob[:, guess : guess + 1]
        parent = torch.where(above >= 0, numbers.gather(1, above.clamp(min=0)), -1)
        is_same = (parents == parent) & (tokens == token)
        is_known, place = is_same.any(dim=1, keepdim=True), is_same.to(torch.int8).argmax(dim=1, keepdim=True)
        known = candidates.path_prob.gather(1, place)
        raised = torch.where(is_known, torch.maximum(known, path_prob), known)
        candidates.path_prob.scatter_(1, place, raised)
        numbers[:, guess : guess + 1] = torch.where(is_known, place, first + guess)
        at = slice(first + guess, first + guess + 1)
        candidates.tokens[:, at] = token
        candidates.parents[:, at] = parent.int()
        candidates.path_prob[:, at] = torch.where(is_known, -1.0, path_prob)
    candidates.confidence[:, first:].fill_(-1.0)
    candidates.columns[:, first:].fill_(-1)


def best_tree(
    path_prob: Tensor, candidates: Candidates, roots: Tensor, root_columns: Tensor, limits: Limits, out: DeviceTrees
) -> None:
    """Compute `best_tree` of `ops/triton/draft.py`."""
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
    """Compute `mark_ancestors` of `ops/triton/draft.py`."""
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
    """Compute `keep_drafted` of `ops/triton/draft.py`."""
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
