"""The walks of a step on a device under the multi-step or the traversal rule, next to those of plain decoding."""

import torch
from torch import Tensor

from specinfer.engine.device.state import DeviceState
from specinfer.ops import tree_ops
from specinfer.ops.trees import DeviceDraws, DeviceTrees, Walk, WalkInputs


def walk_drawn(
    rule: str,
    state: DeviceState,
    trees: DeviceTrees,
    draws: DeviceDraws,
    logits: Tensor,
    least: Tensor | None,
    starts: Tensor,
    walked: Walk,
) -> None:
    """Walk the trees of requests under this rule.

    Args:
        logits: [requests * nodes, vocab] of the target, processed.
        least: [requests * nodes] least scores of tokens that may follow, or None to keep all.
        starts: [requests] rows of the roots.
        walked: The walks of plain decoding, which these replace.
    """
    rows = len(trees.tokens)
    inputs = WalkInputs(
        logits, starts, state.temperatures[:rows], trees.tokens, trees.parents,
        torch.where(state.is_drawn[:rows], trees.sizes, 0), draws.nodes, draws.tokens, draws.probs,
        state.uniforms[:rows], least,
    )  # fmt: skip
    tree_ops.walk_of(rule)(inputs, out=walked)
