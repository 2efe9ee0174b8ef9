"""The results of training a scheduler, as plain values."""

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
    """The results of the training.

    Attributes:
        architectures: The predictors compared, with all features.
        left_out: One architecture without each group of features.
        fixed: Tokens per second of every configuration if it were always used.
        chosen: The architecture that was written.
        num_steps: The number of steps trained on.
        num_held_out: The number of steps evaluated on.
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
        """Return a dictionary that is ready for JSON."""
        return {
            "architectures": [row.as_dict() for row in self.architectures],
            "left_out": [row.as_dict() for row in self.left_out],
            "fixed": dict(self.fixed),
            "chosen": self.chosen,
            "num_steps": self.num_steps,
            "num_held_out": self.num_held_out,
            "out": self.out,
        }
