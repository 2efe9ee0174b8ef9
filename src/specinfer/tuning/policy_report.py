"""What came of training a scheduler. Values only."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from specinfer.tuning.fit import Worth


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison."""

    name: str
    worth: Worth

    def as_dict(self) -> dict[str, object]:
        return {"name": self.name, **asdict(self.worth)}


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What came of the training.

    Attributes:
        architectures: The predictors compared, with all features.
        left_out: One architecture without each group of features.
        fixed: Tokens per second of every configuration if it alone were used.
        chosen: The architecture that was written.
        num_steps: Steps learned from.
        num_held_out: Steps judged by.
    """

    architectures: tuple[Row, ...]
    left_out: tuple[Row, ...]
    fixed: Mapping[str, float]
    chosen: str
    num_steps: int
    num_held_out: int
    out: str

    @property
    def best_fixed(self) -> tuple[str, float]:
        """The best single configuration and its tokens per second."""
        return max(self.fixed.items(), key=lambda item: item[1])

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "architectures": [row.as_dict() for row in self.architectures],
            "left_out": [row.as_dict() for row in self.left_out],
            "fixed": dict(self.fixed),
            "chosen": self.chosen,
            "num_steps": self.num_steps,
            "num_held_out": self.num_held_out,
            "out": self.out,
        }
