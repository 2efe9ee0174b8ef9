"""Drawing: draft tokens drawn without replacement on a device, with their distributions, for rules with random numbers.

Which nodes a fixed expansion has does not depend on what is drawn, so no drawn token is left out because of its value.
"""

import torch
from torch import Tensor

from specinfer.kernels import tree_ops
from specinfer.kernels.choice import SUPPORT, most_probable
from specinfer.kernels.plain_draft import Candidates, Frontier, Limits
from specinfer.kernels.plain_drawn import DrawnRows, Draws
from specinfer.kernels.plain_logits import Truncation


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
        self._drawn = DrawnRows(is_drawn, streams, first, truncation.temperatures)
        self._truncation, self._out = truncation, out

    def add_candidates(
        self,
        logits: Tensor,
        frontier: Frontier,
        first: int,
        width: int,
        limits: Limits,
        candidates: Candidates,
        accepted: Tensor | None = None,
    ) -> None:
        """Draw the candidates of a level; arguments as for `plain_draft.add_candidates`."""
        values, ids = most_probable(logits.float(), min(SUPPORT, logits.shape[1]))
        least = tree_ops.least_kept(values, self._truncation)
        tree_ops.draw_candidates(
            values, ids, least, self._drawn, frontier, first, width, limits, candidates, self._out
        )  # fmt: skip
        if accepted is not None:
            part = candidates.confidence[:, first : first + len(accepted) // len(candidates.tokens) * width]
            predicted = accepted.repeat_interleave(width).view_as(part)
            part.copy_(torch.where(self._drawn.is_drawn.unsqueeze(1), predicted, part))
        num_in_use = (frontier.path_prob >= 0).sum(dim=1)  # such nodes come first
        self._drawn = self._drawn._replace(numbers=self._drawn.numbers + num_in_use)

    def finish(self, path_prob: Tensor) -> None:
        """Note the nodes that candidates have become: a fixed expansion has all that could be drawn, in their order.

        Args:
            path_prob: [requests, candidates] of all levels.
        """
        is_node = path_prob >= 0
        is_draw = self._drawn.is_drawn.unsqueeze(1) & is_node
        self._out.nodes.copy_(torch.where(is_draw, is_node.cumsum(dim=1), -1))
