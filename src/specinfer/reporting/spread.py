"""Spread of repeated measurements, and where two outputs part."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, quartiles and extremes of repeated measurements."""

    median: float
    lower_quartile: float
    upper_quartile: float
    min: float
    max: float

    @classmethod
    def from_values(cls, values: Iterable[float]) -> "Spread":
        values = sorted(values)
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        return cls(quartiles[1], quartiles[0], quartiles[2], values[0], values[-1])

    @property
    def quartiles(self) -> str:
        """Both quartiles as text, such as "1.21-1.34"."""
        return f"{self.lower_quartile:.2f}-{self.upper_quartile:.2f}"

    def as_dict(self) -> dict[str, float]:
        return {
            "lower_quartile": self.lower_quartile,
            "upper_quartile": self.upper_quartile,
            "min": self.min,
            "max": self.max,
        }

    def fields(self, name: str) -> dict[str, object]:
        """Return the median under this name, and the rest under the name with "_spread", ready for JSON."""
        return {name: self.median, f"{name}_spread": self.as_dict()}


def first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two outputs."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def partings(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """Return the length of the common prefix of each pair of outputs that differ."""
    return [first_difference(first, second) for first, second in pairs if first != second]
