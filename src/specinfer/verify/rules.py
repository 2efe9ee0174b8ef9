"""The verification rules: from a tree and the target's predictions in it to the accepted path and the next token.

There are four rules, each with the condition under which the output's distribution is the target's
(docs/verification.md):

- coupled: plain decoding emits argmax(log p(. | prefix) + G_t) with the request's seeded noise G_t. The same
  argmax is taken at each node of the walk. Exact for any tree; greedy is the case G = 0.
- multi-step: the paper's multi-step speculative sampling. Exact if each recorded draft token was drawn from the
  recorded distribution, given all that was drawn before it, and no drawn token was dropped or moved afterwards.
- traversal: from leaf to root, under the same condition; on a chain it is block verification.
- target-only: the paper's naive sampling: the coupled walk over a tree that is independent of the noise.

Each has a file of its own with its sources; target-only is the coupled walk. `core.rules` lists them.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specinfer.core.noise import UniformStream
from specinfer.core.rules import RULES
from specinfer.core.tree import TokenTree
from specinfer.ops.tree_ops import NAN, NO_VALID_TOKEN
from specinfer.verify.acceptance import Acceptance, Probs, SeededSource

MULTI_STEP, TRAVERSAL = "multi-step", "traversal"


class _NoValidTokenError(Exception):
    """A node without a valid token."""

    def __init__(self, reason: int) -> None:
        self.reason = reason


def verify_seeded(
    rule: str, tree: TokenTree, row_at: Callable[[int], npt.NDArray[Any]], uniforms: UniformStream
) -> Acceptance:
    """Verify one tree by a rule that uses random numbers.

    Args:
        rule: The rule.
        tree: The tree.
        row_at: Function from a node to its processed logits, [vocab].
        uniforms: The random numbers.
    """

    def probs_at(node: int) -> Probs | None:
        # By numpy: waking PyTorch's threads takes longer than the row itself.
        row = row_at(node).astype(np.float64)
        best = row.max()
        if best != best:
            raise _NoValidTokenError(NAN)
        if best > -torch.inf:
            return np.asarray(torch.from_numpy(row).softmax(dim=-1).numpy())
        if node == 0:
            raise _NoValidTokenError(NO_VALID_TOKEN)
        return None  # an accepted path may end here, and other nodes are not affected

    start = time.perf_counter()
    try:
        found: Acceptance = RULES[rule].verify(tree, probs_at, SeededSource(uniforms))
        return replace(found, seconds=time.perf_counter() - start)
    except _NoValidTokenError as error:
        return Acceptance((), error.reason)
