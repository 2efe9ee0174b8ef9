"""Operations on trees and their logits on GPUs; see `kernels`. None waits for the device, so all can be captured."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from specinfer.core.rules import RULES
from specinfer.ops.kernels import operations

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
    "OPERATIONS", "add_candidates", "adjust_logits", "attend", "best_tree", "choose", "commit",
    "draw_candidates", "keep_drafted", "least_kept", "mark_ancestors", "mask_logits", "merge_guesses",
    "next_frontier", "store", "walk", "walk_multi_step", "walk_of", "walk_traversal",
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


globals().update(operations(OPERATIONS))


def walk_of(rule: str) -> Callable[..., None]:
    """Return the walk of a rule with random numbers, which has one."""
    name = RULES[rule].gpu_walk
    assert name is not None, f"the rule {rule} has no walk on a device"
    return cast(Callable[..., None], globals()[name])
