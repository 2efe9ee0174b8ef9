"""Draft tokens drawn without replacement on a device, with their distributions, for rules with random numbers.

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
from specinfer.kernels.plain_draft import Candidates, Frontier, Limits
from specinfer.kernels.plain_logits import Truncation


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


class Drawing:
    """The draws of one draft loop: these candidates replace those that were chosen.

    Args:
        is_drawn: [requests] bool, True for requests whose tokens are drawn.
        streams: [requests] int64 seeds of the noise of their draws.
        first: [requests] int64 number of the first draw of the tree.
        truncation: Of the requests.
        out: The draws of the trees, written to.
    """

    def __init__(self, is_drawn: Tensor, streams: Tensor, first: Tensor, truncation: Truncation, out: Draws) -> None:
        self._is_drawn, self._streams, self._number, self._truncation = is_drawn, streams, first, truncation
        self._out = out

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
        for whole, of_candidates in ((self._out.tokens, support), (self._out.probs, probs)):
            of_level = whole[:, first : first + nodes * width]
            of_level.unflatten(1, (nodes, width)).copy_(of_candidates.unflatten(0, (requests, nodes)))
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

    def finish(self, path_prob: Tensor) -> None:
        """Note the nodes that candidates have become: a fixed expansion has all that could be drawn, in their order.

        Args:
            path_prob: [requests, candidates] of all levels.
        """
        is_node = path_prob >= 0
        is_draw = self._is_drawn.unsqueeze(1) & is_node
        self._out.nodes.copy_(torch.where(is_draw, is_node.cumsum(dim=1), -1))


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
