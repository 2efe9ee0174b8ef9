"""The verification rules: from a tree and the target's predictions in it to the accepted path and the next token.

There are four rules, each with the condition under which the output's distribution is the target's
(docs/verification.md):

- coupled: plain decoding emits argmax(log p(. | prefix) + G_t) with the request's seeded noise G_t. The same
  argmax is taken at each node of the walk. Exact for any tree; greedy is the case G = 0.
- multi-step: the paper's multi-step speculative sampling. Exact if each recorded draft token was drawn from the
  recorded distribution, given all that was drawn before it, and no drawn token was dropped or moved afterwards.
- traversal: from leaf to root, under the same condition; on a chain it is block verification.
- target-only: the paper's naive sampling: the coupled walk over a tree that is independent of the noise.

Each has a file of its own with its sources; target-only is the coupled walk.
"""

from collections.abc import Callable

from specinfer.core.tree import TokenTree
from specinfer.verify.acceptance import Acceptance, Probs, RandomSource
from specinfer.verify.multi_step import verify_multi_step
from specinfer.verify.traversal import verify_traversal

MULTI_STEP, TRAVERSAL = "multi-step", "traversal"
RANDOM_RULES: dict[str, Callable[[TokenTree, Callable[[int], Probs | None], RandomSource], Acceptance]] = {
    MULTI_STEP: verify_multi_step,
    TRAVERSAL: verify_traversal,
}
