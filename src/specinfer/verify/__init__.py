"""Verification: it decides which draft tokens of a tree are accepted, and the one token that follows them.

`algorithms` has the rules as their papers state them, and `core.rules` lists them; `batch` applies one of them to all
trees of a step.
"""

from specinfer.ops.trees import NAN, NO_VALID_TOKEN
from specinfer.verify.algorithms import (
    Acceptance,
    Probs,
    RandomSource,
    SeededSource,
    verify_coupled,
    verify_multi_step,
    verify_traversal,
)
from specinfer.verify.batch import check_rule, random_rule, verify

__all__ = [
    "NAN",
    "NO_VALID_TOKEN",
    "Acceptance",
    "Probs",
    "RandomSource",
    "SeededSource",
    "check_rule",
    "random_rule",
    "verify",
    "verify_coupled",
    "verify_multi_step",
    "verify_traversal",
]
