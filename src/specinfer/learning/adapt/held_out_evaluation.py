"""Comparison of two versions of a drafter on examples that neither was trained on.

Both are evaluated at the same positions, so only those count where they differ. For greedy text, where a position is a
hit or not, this is McNemar's test (McNemar, Psychometrika 12, 1947).
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from specinfer.learning.adapt.hits import Hits
from specinfer.learning.examples import TrainingExample
from specinfer.model.load import LoadedModel

_DEVIATIONS = 2.0  # number of standard deviations of the difference


@dataclass(slots=True, eq=False)
class Version:
    """Weights of a drafter, and their hits on held-out examples, by the numbers of these.

    Attributes:
        hits_of: Function from an example to [num_output] hits, see `hits_in`.
        loaded: The weights in the form in which they serve; None for the training copy.
        folder: Their folder, or None for the training copy.
    """

    hits_of: Callable[[TrainingExample], Hits]
    loaded: LoadedModel | None = None
    folder: Path | None = None
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
        self._num_added = 0
        self.examples: dict[int, TrainingExample] = {}  # by number, the oldest first

    def add(self, example: TrainingExample) -> None:
        """Add an example and drop the oldest ones over the limit."""
        self.examples[self._num_added] = example
        self._num_added += 1
        while sum(each.num_output for each in self.examples.values()) > self._max_tokens:
            del self.examples[next(iter(self.examples))]

    def has_evaluated(self, version: Version) -> bool:
        """Return whether the version has hits on all examples."""
        return self.examples.keys() <= version.hits.keys()

    def evaluate(self, version: Version) -> Generator[None]:
        """Evaluate a version on the examples that it has no hits on, yielding after each."""
        version.hits = {number: hits for number, hits in version.hits.items() if number in self.examples}
        for number, example in tuple(self.examples.items()):
            if number not in version.hits:
                version.hits[number] = version.hits_of(example)
                yield

    def rate(self, version: Version) -> float:
        """Return the hits per token, or NaN if the version was not evaluated."""
        hits = [version.hits[number] for number in self.examples if number in version.hits]
        return float(np.concatenate(hits).mean()) if hits else float("nan")

    def is_better(self, version: Version, other: Version) -> bool:
        """Return whether the first version is better, significantly and by the margin, where both were evaluated."""
        both = [number for number in self.examples if number in version.hits and number in other.hits]
        if not both:
            return False
        gained = np.concatenate([version.hits[number] - other.hits[number] for number in both]).astype(np.float64)
        least = max(self._margin * len(gained), _DEVIATIONS * float((gained**2).sum()) ** 0.5)
        return len(gained) >= self._min_tokens and float(gained.sum()) > least
