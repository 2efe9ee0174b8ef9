"""The tree kernels for tensors on any device: Triton on CUDA devices, plain PyTorch for others.

Each is documented at its plain version. On a GPU none of them waits for the device, so they can be captured.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specinfer.core.rules import RULES
from specinfer.ops import (
    plain_draft,
    plain_drawn,
    plain_guesses,
    plain_logits,
    plain_multi_step,
    plain_traversal,
    plain_tree,
)
from specinfer.ops.plain_tree import NAN, NO_VALID_TOKEN, Walk
from specinfer.ops.triton import by_device, runs_on

__all__ = [
    "NAN", "NO_VALID_TOKEN", "Walk", "add_candidates", "adjust_logits", "attend", "best_tree", "choose", "commit",
    "draw_candidates", "keep_drafted", "least_kept", "mark_ancestors", "mask_logits", "merge_guesses", "next_frontier",
    "store", "walk", "walk_multi_step", "walk_of", "walk_traversal",
]  # fmt: skip


def _runs_on(tensor: Tensor) -> bool:
    return runs_on(tensor)


def _guesses_run_on(guesses: plain_guesses.Guesses) -> bool:
    return runs_on(guesses.tokens)


def _walk_runs_on(inputs: plain_multi_step.WalkInputs) -> bool:
    return runs_on(inputs.logits)


attend = by_device(_runs_on, plain_tree.attend, "attention")
store = by_device(_runs_on, plain_tree.store, "store")
choose = by_device(_runs_on, plain_tree.choose, "choose")
walk = by_device(_runs_on, plain_tree.walk, "walk")
walk_multi_step = by_device(_walk_runs_on, plain_multi_step.walk_multi_step, "multi_step")
walk_traversal = by_device(_walk_runs_on, plain_traversal.walk_traversal, "traversal")
commit = by_device(_runs_on, plain_tree.commit, "commit")
least_kept = by_device(_runs_on, plain_logits.least_kept, "truncation")
mask_logits = by_device(_runs_on, plain_logits.mask_logits, "adjustment")
adjust_logits = by_device(_runs_on, plain_logits.adjust_logits, "adjustment")
add_candidates = by_device(_runs_on, plain_draft.add_candidates, "candidates")
draw_candidates = by_device(_runs_on, plain_drawn.draw_candidates, "drawn")
next_frontier = by_device(_runs_on, plain_draft.next_frontier, "draft")
merge_guesses = by_device(_guesses_run_on, plain_guesses.merge_guesses, "draft")
best_tree = by_device(_runs_on, plain_draft.best_tree, "draft")
mark_ancestors = by_device(_runs_on, plain_draft.mark_ancestors, "draft")
keep_drafted = by_device(_runs_on, plain_draft.keep_drafted, "draft")


def walk_of(rule: str) -> Callable[..., None]:
    """Return the walk of a rule with random numbers, which has one."""
    name = RULES[rule].gpu_walk
    assert name is not None, f"the rule {rule} has no walk on a device"
    walk: Any = globals()[name]
    return walk  # type: ignore[no-any-return]
