"""Draft tokens drawn without replacement on a device, with the distribution of each draw, for the multi-step rule.

The draws of a node are one race of exponentials (Sequoia, arXiv 2402.12374) over its best tokens, with noise that
nothing else reads, as in `drafters.growth.draft_sampling`: the same numbers, so the same tokens. These are PyTorch
operations with fixed shapes on every device. Which nodes a fixed expansion has does not depend on what is drawn, so no
drawn token is left out because of its value.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.core.noise import gumbel
from specinfer.kernels import tree_ops
from specinfer.kernels.choice import SUPPORT, most_probable
from specinfer.kernels.plain_draft import Candidates, Frontier, Grown, Limits
from specinfer.kernels.plain_logits import Truncation


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of trees, as `walk_multi_step` takes them; draw i made node i + 1."""

    nodes: Tensor  # [requests, nodes - 1] int32; -1 where there is no draw
    tokens: Tensor  # [requests, nodes - 1, support] int32
    probs: Tensor  # [requests, nodes - 1, support] float64

    @classmethod
    def empty(cls, num_requests: int, num_nodes: int, vocab: int, device: torch.device) -> "Draws":
        shape = num_requests, max(num_nodes - 1, 1)
        return cls(
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.full((*shape, min(SUPPORT, vocab)), -1, dtype=torch.int32, device=device),
            torch.zeros((*shape, min(SUPPORT, vocab)), dtype=torch.float64, device=device),
        )


class Drawing:
    """The draws of one draft loop: candidates of requests under the multi-step rule replace those that were chosen.

    Args:
        is_drawn: [requests] bool, True for these requests.
        streams: [requests] int64 seeds of the noise of their draws.
        first: [requests] int64 number of the first draw of the tree.
        truncation: Of the requests.
        out: The draws of the trees, written to.
    """

    def __init__(self, is_drawn: Tensor, streams: Tensor, first: Tensor, truncation: Truncation, out: Draws) -> None:
        self._is_drawn, self._streams, self._number, self._truncation = is_drawn, streams, first, truncation
        self._out = out
        self._levels: list[tuple[Tensor, Tensor]] = []  # supports and probabilities of the candidates of each level

    def add_candidates(
        self, logits: Tensor, frontier: Frontier, first: int, width: int, limits: Limits, candidates: Candidates
    ) -> None:
        """Draw the candidates of a level; arguments as for `plain_draft.add_candidates`."""
        requests, nodes = frontier.tokens.shape
        in_use = frontier.path_prob >= 0  # such nodes come first
        numbers = self._number.unsqueeze(1) + torch.arange(nodes, device=logits.device)
        self._number = self._number + in_use.sum(dim=1)
        tokens, sure, support, probs = draw_children(
            logits, width, self._streams.repeat_interleave(nodes), numbers.flatten(), self._truncation
        )
        self._levels.append((support.reshape(requests, nodes * width, -1), probs.reshape(requests, nodes * width, -1)))
        tokens = tokens.view(requests, nodes, width)
        ranks = torch.arange(width, device=logits.device)
        usable = (tokens >= 0) & in_use.unsqueeze(2) & (ranks < limits.widths[:, frontier.level, None, None])
        usable = usable & (frontier.level < limits.max_depth)[:, None, None]
        is_drawn = self._is_drawn.unsqueeze(1)
        for place, values in (
            (candidates.tokens, tokens.clamp(min=0)),
            (candidates.confidence, sure.view(requests, nodes, 1).expand(-1, -1, width)),
            (candidates.path_prob, torch.where(usable, 1.0, -1.0)),
        ):
            of_level = place[:, first : first + nodes * width]
            of_level.copy_(torch.where(is_drawn, values.flatten(1), of_level))

    def finish(self, numbers: Tensor, trees: Grown) -> None:
        """Note what the nodes of the trees were drawn from; `numbers` [requests, nodes] are those of candidates."""
        support, probs = (torch.cat([level[i] for level in self._levels], dim=1) for i in range(2))
        place = numbers[:, 1:].long().clamp(min=0)
        nodes = torch.arange(1, 1 + place.shape[1], dtype=torch.int32, device=place.device)
        is_draw = self._is_drawn.unsqueeze(1) & (nodes < trees.sizes.unsqueeze(1))
        self._out.nodes.copy_(torch.where(is_draw, nodes, -1))
        place = place.unsqueeze(2).expand(-1, -1, support.shape[2])
        self._out.tokens.copy_(support.gather(1, place))
        self._out.probs.copy_(probs.gather(1, place))


def draw_children(
    logits: Tensor, width: int, streams: Tensor, numbers: Tensor, truncation: Truncation
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw tokens after nodes without replacement.

    Args:
        logits: [rows, vocab].
        streams, numbers: [rows] int64 seed and number of each row's noise.
        truncation: Of each request, which has as many rows as any other.

    Returns:
        [rows, width] int64 tokens, -1 where none is left; [rows, 1] float32 probability of the most probable token;
        [rows, width, support] int32 tokens that could be drawn, and float64 probabilities of each draw.
    """
    values, ids = most_probable(logits.float(), min(SUPPORT, logits.shape[1]))
    temperatures = truncation.temperatures.repeat_interleave(len(values) // len(truncation.top_k)).unsqueeze(1)
    scores = values / torch.where(temperatures > 0, temperatures, 1.0)
    scores = scores.masked_fill(scores < tree_ops.least_kept(values, truncation).unsqueeze(1), -torch.inf)
    whole = scores.double().softmax(dim=1).nan_to_num(0.0)
    places = (scores + gumbel(streams, numbers, ids)).topk(width, dim=1).indices
    tokens = ids.gather(1, places).masked_fill(whole.gather(1, places) <= 0, -1)
    is_own = places.unsqueeze(2) == torch.arange(values.shape[1], device=ids.device)
    was_drawn = is_own.cumsum(dim=1) > is_own.long()
    left = torch.where(was_drawn, 0.0, whole.unsqueeze(1))
    probs = left / left.sum(dim=2, keepdim=True)
    return tokens, whole[:, :1].float(), ids.int().unsqueeze(1).expand_as(probs), probs.nan_to_num(0.0)
