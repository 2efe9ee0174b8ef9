"""Comparison of two versions of a drafter on examples that neither was trained on.

Both are evaluated at the same positions, so only those count where they differ. For greedy text, where a position is a
hit or not, this is McNemar's test (McNemar, Psychometrika 12, 1947).
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from specinfer.learning.adapt.hits import Hits
from specinfer.learning.examples import TrainingExample

_DEVIATIONS = 2.0  # number of standard deviations of the difference


@dataclass(slots=True)
class HeldOutExample:
    """A held-out example and the results of versions on it.

    Attributes:
        hits: By version number, [num_output] the result of `hits_in` for its logits.
    """

    example: TrainingExample
    hits: dict[int, Hits] = field(default_factory=dict)


class HeldOutEvaluation:
    """The newest held-out examples.

    Args:
        max_tokens: The largest number of output tokens in all of them.
        min_tokens: The number of tokens both versions must have been evaluated on before they are compared.
        margin: The hits per token by which a better version must be ahead.
    """

    def __init__(self, max_tokens: int, min_tokens: int, margin: float) -> None:
        self._max_tokens, self._min_tokens, self._margin = max_tokens, min_tokens, margin
        self.held_out: deque[HeldOutExample] = deque()

    def add(self, example: TrainingExample) -> None:
        """Add an example and drop the oldest ones over the limit."""
        self.held_out.append(HeldOutExample(example))
        while sum(each.example.num_output for each in self.held_out) > self._max_tokens:
            self.held_out.popleft()

    def unevaluated(self, version: int) -> list[HeldOutExample]:
        """Return the examples that the version was not evaluated on yet."""
        return [example for example in self.held_out if version not in example.hits]

    def forget(self, version: int) -> None:
        """Drop the results of a version that no longer exists."""
        for example in self.held_out:
            example.hits.pop(version, None)

    def rate(self, version: int) -> float:
        """Return the hits per token, or NaN if the version was not evaluated."""
        hits = [example.hits[version] for example in self.held_out if version in example.hits]
        return float(np.concatenate(hits).mean()) if hits else float("nan")

    def is_better(self, version: int, other: int) -> bool:
        """Return whether the first version is better, significantly and by the margin, where both were evaluated."""
        both = [
            (example.hits[version], example.hits[other])
            for example in self.held_out
            if {version, other} <= example.hits.keys()
        ]
        if not both:
            return False
        gained = np.concatenate([hits - hits_of_other for hits, hits_of_other in both]).astype(np.float64)
        least = max(self._margin * len(gained), _DEVIATIONS * float((gained**2).sum()) ** 0.5)
        return len(gained) >= self._min_tokens and float(gained.sum()) > least
