"""The operations on trees and their logits on a GPU, by name: each runs its Triton kernel.

Arguments and results are documented at the kernels in `ops/triton`. None of them waits for the device, so they can be
captured. Tests hold every kernel to the reference in `tests/reference`, which they install as the back end on machines
without a GPU.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from specinfer.core.rules import RULES

if TYPE_CHECKING:
    from specinfer.ops.triton.adjustment import adjust_logits, mask_logits
    from specinfer.ops.triton.attention import attend
    from specinfer.ops.triton.candidates import add_candidates
    from specinfer.ops.triton.choose import choose
    from specinfer.ops.triton.commit import commit
    from specinfer.ops.triton.draft import best_tree, keep_drafted, mark_ancestors, merge_guesses, next_frontier
    from specinfer.ops.triton.drawn import draw_candidates
    from specinfer.ops.triton.multi_step import walk_multi_step
    from specinfer.ops.triton.store import store
    from specinfer.ops.triton.traversal import walk_traversal
    from specinfer.ops.triton.truncation import least_kept
    from specinfer.ops.triton.walk import walk

__all__ = [
    "OPERATIONS", "add_candidates", "adjust_logits", "attend", "back_end", "best_tree", "choose", "commit",
    "draw_candidates", "keep_drafted", "kernel", "least_kept", "mark_ancestors", "mask_logits", "merge_guesses",
    "next_frontier", "store", "tensor_of", "walk", "walk_multi_step", "walk_of", "walk_traversal",
]  # fmt: skip

# The module of `ops/triton` that has the kernel of each operation.
OPERATIONS = {
    "attend": "attention",
    "store": "store",
    "choose": "choose",
    "add_candidates": "candidates",
    "draw_candidates": "drawn",
    "next_frontier": "draft",
    "merge_guesses": "draft",
    "best_tree": "draft",
    "mark_ancestors": "draft",
    "walk": "walk",
    "walk_multi_step": "multi_step",
    "walk_traversal": "traversal",
    "commit": "commit",
    "keep_drafted": "draft",
    "least_kept": "truncation",
    "mask_logits": "adjustment",
    "adjust_logits": "adjustment",
}


def tensor_of(first: Any) -> Tensor:
    """Return a tensor of an operation's first argument, which may have several."""
    return first if isinstance(first, Tensor) else cast(Tensor, first[0])


@cache
def kernel(name: str) -> Callable[..., Any]:
    """Return an operation that runs on the GPU of its first argument, which becomes the thread's current one."""
    run: Callable[..., Any] = getattr(import_module(f"specinfer.ops.triton.{OPERATIONS[name]}"), name)

    def run_there(first: Any, *args: Any, **options: Any) -> Any:
        device = tensor_of(first).device
        if device.type == "cuda" and torch.cuda.current_device() != device.index:
            torch.cuda.set_device(device)  # Triton launches kernels there
        return run(first, *args, **options)

    return run_there


back_end: Callable[[str], Callable[..., Any]] = kernel


def _operation(name: str) -> Callable[..., Any]:
    return lambda *args, **options: back_end(name)(*args, **options)


globals().update({name: _operation(name) for name in OPERATIONS})


def walk_of(rule: str) -> Callable[..., None]:
    """Return the walk of a rule with random numbers, which has one."""
    name = RULES[rule].gpu_walk
    assert name is not None, f"the rule {rule} has no walk on a device"
    return cast(Callable[..., None], globals()[name])
