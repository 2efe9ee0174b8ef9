"""The walks of a step on a device under the multi-step or the traversal rule, next to those of plain decoding."""

import torch
from torch import Tensor

from specinfer.engine.device.state import DeviceState
from specinfer.kernels import tree_ops
from specinfer.kernels.drawn import Draws
from specinfer.kernels.plain_draft import Grown
from specinfer.verify.rules import TRAVERSAL


def walk_drawn(
    rule: str,
    state: DeviceState,
    trees: Grown,
    draws: Draws,
    logits: Tensor,
    least: Tensor | None,
    starts: Tensor,
    walked: tree_ops.Walk,
) -> tree_ops.Walk:
    """Walk the trees of requests under this rule, and return these walks with those of the others.

    Args:
        logits: [requests * nodes, vocab] of the target, processed.
        least: [requests * nodes] least scores of tokens that may follow, or None to keep all.
        starts: [requests] rows of the roots.
        walked: The walks of plain decoding.
    """
    (path, *_), (rows, nodes) = walked, trees.tokens.shape
    is_drawn, uniforms = state.is_drawn[:rows], state.uniforms[:rows]
    temperatures = torch.where(is_drawn, state.temperatures[:rows], 1.0)
    if least is not None:
        scores = logits / temperatures.repeat_interleave(nodes).unsqueeze(1)
        logits = logits.masked_fill(scores < least.unsqueeze(1), -torch.inf)
    walk = tree_ops.walk_traversal if rule == TRAVERSAL else tree_ops.walk_multi_step
    new_path, *new = walk(
        logits, starts, temperatures, trees.tokens, trees.parents, torch.where(is_drawn, trees.sizes, 0),
        draws.nodes, draws.tokens, draws.probs, uniforms, max_depth=path.shape[1],
    )  # fmt: skip
    lengths, following = (torch.where(is_drawn, *both) for both in zip(new, walked[1:], strict=True))
    return torch.where(is_drawn.unsqueeze(1), new_path, path), lengths, following
