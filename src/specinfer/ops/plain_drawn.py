"""Draft tokens drawn without replacement in plain PyTorch, the counterpart of `ops/triton/drawn.py`.

The draws of a node are one race of exponentials (Sequoia, arXiv 2402.12374) over its best tokens, with noise that
nothing else reads, as in `drafters.growth.draft_sampling`: the same numbers, so the same tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specinfer.core.noise import gumbel
from specinfer.ops.chance_table import DRAWN, ChanceTable
from specinfer.ops.plain_draft import Candidates, Frontier, Limits, path_probs


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws, and the tokens that each could have produced, as `walk_multi_step` and `walk_traversal` take them."""

    nodes: Tensor  # [requests, draws] int32; -1 where nothing was drawn
    tokens: Tensor  # [requests, draws, support] int32
    probs: Tensor  # [requests, draws, support] float64

    @classmethod
    def empty(cls, num_requests: int, num_draws: int, support: int, device: torch.device) -> "Draws":
        """Return room for draws, of which there are none yet."""
        shape = num_requests, max(num_draws, 1)
        return cls(
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.empty((*shape, support), dtype=torch.int32, device=device),
            torch.empty((*shape, support), dtype=torch.float64, device=device),
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
    table: ChanceTable,
    limits: Limits,
    candidates: Candidates,
    out: Draws,
    accepted: Tensor | None = None,
) -> None:
    """Draw the candidates of a level, in place of those that were chosen.

    The confidence in each is that in the most probable token, drawn or not, so it reveals no draw.

    Args:
        values: [requests * frontier, support] float32 the greatest logits of each node, in descending order.
        ids: [requests * frontier, support] int64 their tokens.
        least: [requests * frontier] float32 as `plain_logits.least_kept` returns it.
        drawn: The requests.
        first: Number of the level's first candidate.
        width: Candidates of each node.
        candidates: Written to, from `first` on, for the requests whose tokens are drawn.
        out: A draw for each candidate, written to but for its nodes.
        accepted: [requests * frontier] float32 confidence in the most probable token; None for that of the values.
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

    sure = (whole[:, 0].float() if accepted is None else accepted).view(requests, nodes, 1).expand(-1, -1, width)
    chance = table.chance(torch.full_like(drawn.streams, DRAWN), sure)
    of_level, is_drawn = slice(first, first + nodes * width), drawn.is_drawn.unsqueeze(1)
    for place, found in (
        (candidates.tokens, tokens.clamp(min=0)),
        (candidates.confidence, sure),
        (candidates.path_prob, path_probs(tokens >= 0, chance, frontier, limits)),
    ):
        place[:, of_level] = torch.where(is_drawn, found.flatten(1), place[:, of_level])
    out.tokens[:, of_level] = ids.int().view(requests, nodes, 1, -1).expand(-1, -1, width, -1).flatten(1, 2)
    out.probs[:, of_level] = probs.view(requests, nodes * width, -1)
