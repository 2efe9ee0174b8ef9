"""Verification: which guesses of a tree are kept, and the one token that follows them.

`rules` holds the rules as the papers state them; `batch` applies one of them to all trees of a step.
"""

from specinfer.verify.batch import NAN, NO_VALID_TOKEN, verify
from specinfer.verify.rules import (
    COIN_RULES,
    Acceptance,
    Chance,
    Probs,
    SeededChance,
    verify_coupled,
    verify_multi_step,
    verify_traversal,
)

__all__ = [
    "COIN_RULES",
    "NAN",
    "NO_VALID_TOKEN",
    "Acceptance",
    "Chance",
    "Probs",
    "SeededChance",
    "verify",
    "verify_coupled",
    "verify_multi_step",
    "verify_traversal",
]
