"""The tree kernels for tensors on any device: Triton on CUDA devices, plain PyTorch elsewhere.

Each is documented at its plain version. On a GPU none of them waits for the device, so they can be captured.
"""

from collections.abc import Callable

from torch import Tensor

from specinfer.kernels import plain_multi_step, plain_tree
from specinfer.kernels.plain_tree import NAN, NO_VALID_TOKEN, Walk
from specinfer.kernels.tree_layout import TreeLayout
from specinfer.kernels.triton import runs_on

__all__ = ["NAN", "NO_VALID_TOKEN", "Walk", "attend", "choose", "commit", "store", "walk", "walk_multi_step"]


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: TreeLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Return the [tokens, heads, value_dim] attention of all new tokens; see `plain_tree.attend`."""
    run: Callable[..., Tensor] = plain_tree.attend
    if runs_on(query):
        from specinfer.kernels.triton.attention import attend as run
    return run(
        query,
        keys,
        values,
        layout,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        key_bias=key_bias,
        out=out,
        scratch=scratch,
    )


def store(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write new keys and values to their slots; see `plain_tree.store`."""
    if runs_on(keys):
        from specinfer.kernels.triton.store import store as run
    else:
        run = plain_tree.store
    run(keys, values, slots, key, value)


def choose(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the [rows] token chosen at each row; see `plain_tree.choose`."""
    if runs_on(logits):
        from specinfer.kernels.triton.choose import choose as run

        return run(logits, seeds, positions, temperatures, out)
    return plain_tree.choose(logits, seeds, positions, temperatures, out)


def walk(
    chosen: Tensor,
    starts: Tensor,
    tokens: Tensor,
    parents: Tensor,
    sizes: Tensor,
    *,
    max_depth: int,
    out: Walk | None = None,
) -> Walk:
    """Return accepted paths, their lengths, and the tokens that follow; see `plain_tree.walk`."""
    if runs_on(chosen):
        from specinfer.kernels.triton.walk import walk as run
    else:
        run = plain_tree.walk
    return run(chosen, starts, tokens, parents, sizes, max_depth=max_depth, out=out)


def walk_multi_step(
    logits: Tensor,
    starts: Tensor,
    temperatures: Tensor,
    tokens: Tensor,
    parents: Tensor,
    sizes: Tensor,
    draws: Tensor,
    distribution_tokens: Tensor,
    distribution_probs: Tensor,
    uniforms: Tensor,
    *,
    max_depth: int,
    out: Walk | None = None,
    left: Tensor | None = None,
) -> Walk:
    """Return the same by the multi-step rule; see `plain_multi_step.walk_multi_step`.

    Args:
        left: [requests, vocab] float64 scratch memory, -1 everywhere before and after. None to allocate it on a GPU.
    """
    distributions = (draws, distribution_tokens, distribution_probs, uniforms)
    trees = (logits, starts, temperatures, tokens, parents, sizes)
    if runs_on(logits):
        from specinfer.kernels.triton.multi_step import walk_multi_step as run

        return run(*trees, *distributions, max_depth=max_depth, out=out, left=left)
    return plain_multi_step.walk_multi_step(*trees, *distributions, max_depth=max_depth, out=out)


def commit(slot_table: Tensor, prefix_lens: Tensor, node_slots: Tensor, path: Tensor, lengths: Tensor) -> None:
    """Append the accepted path's slots to each prefix; see `plain_tree.commit`."""
    if runs_on(path):
        from specinfer.kernels.triton.commit import commit as run
    else:
        run = plain_tree.commit
    run(slot_table, prefix_lens, node_slots, path, lengths)
