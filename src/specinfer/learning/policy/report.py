"""The results of training a speculation policy, and their table."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich.console import Console

from specinfer.learning.policy.network_training import NetworkQuality
from specinfer.reporting.tables import new_table, print_table


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """The results of the training.

    Attributes:
        architectures: The networks compared, with all features.
        left_out: One architecture without each group of features.
        fixed: Tokens per second of every configuration if it were always used.
        chosen: The architecture that was written.
        num_steps: The number of steps trained on.
        num_held_out: The number of steps evaluated on.
    """

    architectures: tuple[NetworkQuality, ...]
    left_out: tuple[NetworkQuality, ...]
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
        return asdict(self)


def print_policy(report: PolicyReport, console: Console) -> None:
    """Print the predictors, the effect of each group of features, and the best single configuration."""
    name, rate = report.best_fixed
    table = new_table("network", "weights", "error", "tokens/s", "over best single")
    for quality in (*report.architectures, *report.left_out):
        table.add_row(
            f"[bold]{quality.name}[/bold]" if quality.name == report.chosen else quality.name,
            f"{quality.num_weights}",
            f"{quality.error:.3f}",
            f"{quality.rate:.1f}",
            f"{quality.rate / rate:.3f}",
            end_section=quality is report.architectures[-1],
        )
    heading = f"Networks trained on {report.num_steps} steps and evaluated on {report.num_held_out}"
    print_table(console, heading, table)
    console.print(
        "error: mean absolute error of the expected tokens; tokens/s: rate of the chosen configurations, by the logged "
        f"trees and the cost model; the best single configuration is {name} with {rate:.1f}"
    )
    console.print(f"wrote {report.chosen} to {report.out}")
