"""Verification: it decides which draft tokens of a tree are accepted, and the one token that follows them.

`core.rules` lists the rules, each in a file here as its paper states it; `batch` applies one of them to
all trees of a step.
"""

from specinfer.verify.acceptance import Acceptance, Probs, RandomSource, SeededSource
from specinfer.verify.batch import NAN, NO_VALID_TOKEN, verify
from specinfer.verify.coupled import verify_coupled
from specinfer.verify.multi_step import verify_multi_step
from specinfer.verify.traversal import verify_traversal

__all__ = [
    "NAN",
    "NO_VALID_TOKEN",
    "Acceptance",
    "Probs",
    "RandomSource",
    "SeededSource",
    "verify",
    "verify_coupled",
    "verify_multi_step",
    "verify_traversal",
]
