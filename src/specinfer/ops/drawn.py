"""Drawing: draft tokens drawn without replacement on a device, with their distributions, for rules with random numbers.

All candidates are drawn, and the best of them become nodes. Which these are is decided by the confidence in the most
probable token after each node, not in the tokens drawn there, so the trees are those of tokens that are drawn one by
one (docs/verification.md, condition A).
"""

from dataclasses import replace

import torch
from torch import Tensor

from specinfer.ops import tree_ops
from specinfer.ops.cpu.choice import SUPPORT, most_probable
from specinfer.ops.logits import Truncation
from specinfer.ops.trees import Candidates, ChanceTable, DeviceDraws, DeviceTrees, DrawnRows, Frontier, Limits


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
