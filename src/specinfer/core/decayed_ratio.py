"""A ratio that follows changes: older observations count less."""

from dataclasses import dataclass


@dataclass(slots=True)
class DecayedRatio:
    """Ratio of two sums, whose earlier terms are multiplied by `memory` with each further one.

    Attributes:
        prior: Number added to both sums, which pulls the ratio towards 1 while they are small.
    """

    memory: float
    numerator: float = 0.0
    denominator: float = 0.0
    prior: float = 0.0

    def observe(self, numerator: float, denominator: float) -> None:
        self.numerator = self.memory * self.numerator + numerator
        self.denominator = self.memory * self.denominator + denominator

    @property
    def value(self) -> float:
        return (self.numerator + self.prior) / max(self.denominator + self.prior, 1e-9)
