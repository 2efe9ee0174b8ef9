"""Draft tokens drawn without replacement in plain PyTorch, the counterpart of `kernels/triton/drawn.py`.

The draws of a node are one race of exponentials (Sequoia, arXiv 2402.12374) over its best tokens, with noise that
nothing else reads, as in `drafters.growth.draft_sampling`: the same numbers, so the same tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specinfer.core.noise import gumbel
from specinfer.kernels.choice import SUPPORT
from specinfer.kernels.plain_draft import Candidates, Frontier, Limits


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of trees, as `walk_multi_step` and `walk_traversal` take them; there is one for each candidate."""

    nodes: Tensor  # [requests, candidates] int32; -1 where nothing was drawn
    tokens: Tensor  # [requests, candidates, support] int32
    probs: Tensor  # [requests, candidates, support] float64

    @classmethod
    def empty(cls, num_requests: int, num_candidates: int, vocab: int, device: torch.device) -> "Draws":
        shape = num_requests, max(num_candidates, 1)
        return cls(
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.full((*shape, min(SUPPORT, vocab)), -1, dtype=torch.int32, device=device),
            torch.zeros((*shape, min(SUPPORT, vocab)), dtype=torch.float64, device=device),
        )


class DrawnRows(NamedTuple):
    """The requests whose tokens are drawn, and the noise of a level's draws."""

    is_drawn: Tensor  # [requests] bool
    streams: Tensor  # [requests] int64 seeds
    numbers: Tensor  # [requests] int64 number of the frontier's first node; each further node has the next one
    temperatures: Tensor  # [requests] float32, above 0 where tokens are drawn


def draw_candidates(
    values: Tensor,
    ids: Tensor,
    least: Tensor,
    drawn: DrawnRows,
    frontier: Frontier,
    first: int,
    width: int,
    limits: Limits,
    candidates: Candidates,
    out: Draws,
) -> None:
    """Draw the candidates of a level, in place of those that were chosen.

    Args:
        values: [requests * frontier, support] float32 the greatest logits of each node, in descending order.
        ids: [requests * frontier, support] int64 their tokens.
        least: [requests * frontier] float32 as `plain_logits.least_kept` returns it.
        drawn: The requests.
        first: Number of the level's first candidate.
        width: Candidates of each node.
        candidates: Written to, from `first` on, for the requests whose tokens are drawn.
        out: What the candidates could have been, written to.
    """
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

    ranks = torch.arange(width, device=values.device)
    usable = (tokens >= 0) & (frontier.path_prob >= 0).unsqueeze(2)
    usable = usable & (ranks < limits.widths[:, frontier.level, None, None])
    usable = usable & (frontier.level < limits.max_depth)[:, None, None]
    of_level, is_drawn = slice(first, first + nodes * width), drawn.is_drawn.unsqueeze(1)
    for place, found in (
        (candidates.tokens, tokens.clamp(min=0)),
        (candidates.confidence, whole[:, 0].float().view(requests, nodes, 1).expand(-1, -1, width)),
        (candidates.path_prob, torch.where(usable, 1.0, -1.0)),
    ):
        place[:, of_level] = torch.where(is_drawn, found.flatten(1), place[:, of_level])
    out.tokens[:, of_level] = ids.int().view(requests, nodes, 1, -1).expand(-1, -1, width, -1).flatten(1, 2)
    out.probs[:, of_level] = probs.view(requests, nodes * width, -1)
