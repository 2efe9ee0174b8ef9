"""Scores of weights on held-out texts: values, table and plot."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from specinfer.reporting.environment import Environment
from specinfer.reporting.plots import Panel, Series, draw_plot
from specinfer.reporting.tables import Column, millions, print_rows


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one set of weights on all texts.

    Attributes:
        num_bytes: Size of the weights in memory, in bytes.
        num_tokens: Number of predicted tokens.
        surprise: Sum of the tokens' negative log-probabilities, in nats.
        divergence: Sum over positions of the Kullback-Leibler divergence from the unquantized model, in nats.
        num_same: Number of positions with the same most likely token as the unquantized model.
    """

    name: str
    num_bytes: int
    num_tokens: int = 0
    surprise: float = 0.0
    divergence: float = 0.0
    num_same: int = 0

    def plus(self, num_tokens: int, surprise: float, divergence: float, num_same: int) -> "Score":
        """Return the score with one more text added."""
        return Score(
            self.name,
            self.num_bytes,
            self.num_tokens + num_tokens,
            self.surprise + surprise,
            self.divergence + divergence,
            self.num_same + num_same,
        )

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.num_tokens)

    @property
    def bits_per_token(self) -> float:
        return self.surprise / self.num_tokens / math.log(2)

    @property
    def divergence_bits(self) -> float:
        """Mean Kullback-Leibler divergence of a position, in bits."""
        return self.divergence / self.num_tokens / math.log(2)

    @property
    def same_best(self) -> float:
        return self.num_same / self.num_tokens

    def as_dict(self) -> dict[str, object]:
        return {
            "perplexity": self.perplexity,
            "bits_per_token": self.bits_per_token,
            "divergence_bits": self.divergence_bits,
            "same_best_token": self.same_best,
            "weight_bytes": self.num_bytes,
        }


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    """The scores of the unquantized weights and then of the others, in the requested order."""

    scores: tuple[Score, ...]
    num_texts: int
    options: Mapping[str, object]
    environment: Environment

    @property
    def exact(self) -> Score:
        return self.scores[0]

    def increase_of(self, score: Score) -> float:
        """Return the increase of perplexity relative to the unquantized model."""
        return score.perplexity / self.exact.perplexity - 1

    def as_dict(self) -> dict[str, object]:
        """Return the report in a form ready for JSON."""
        return {
            "weights": {
                score.name: {**score.as_dict(), "perplexity_increase": self.increase_of(score)} for score in self.scores
            },
            "num_texts": self.num_texts,
            "num_tokens": self.exact.num_tokens,
            "options": dict(self.options),
            "environment": self.environment.as_dict(),
        }


def print_perplexity(report: PerplexityReport, console: Console) -> None:
    """Print a table with a row for each set of weights."""
    environment = report.environment
    console.print(
        f"[bold]{report.options['model']}[/bold]: {millions(environment.target_parameters)}, {environment.precision} "
        f"on {environment.device}; {report.exact.num_tokens} tokens of {report.num_texts} texts"
    )

    def against_exact(heading: str, cell: Callable[[Score], str]) -> Column[Score]:
        return Column(heading, lambda score: "" if score is report.exact else cell(score))

    columns = (
        Column[Score]("weights", lambda score: score.name, label=True),
        Column[Score]("perplexity", lambda score: f"{score.perplexity:.4f}"),
        against_exact("increase", lambda score: f"{report.increase_of(score):+.2%}"),
        Column[Score]("bits/token", lambda score: f"{score.bits_per_token:.4f}"),
        against_exact("KL, bits", lambda score: f"{score.divergence_bits:.5f}"),
        against_exact("same best", lambda score: f"{score.same_best:.2%}"),
        Column[Score]("MiB", lambda score: f"{score.num_bytes / 2**20:,.1f}"),
    )
    title = "Quality loss of quantization: each token predicted from those before it"
    print_rows(console, title, columns, report.scores)


def plot_perplexity(report: PerplexityReport, path: str | Path) -> None:
    """Draw quality loss and size of the weights.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    names = [score.name for score in report.scores]

    def bars(title: str, values: list[float], form: str) -> Panel:
        series = Series(title, values, notes=[form.format(value) for value in values])
        return Panel(title, [series], kind="bars", horizontal=True, names=names)

    panels = [
        bars("Perplexity", [score.perplexity for score in report.scores], "{:.3f}"),
        bars("Divergence from the unquantized model, bits", [one.divergence_bits for one in report.scores], "{:.4f}"),
        bars("Weights, MiB", [score.num_bytes / 2**20 for score in report.scores], "{:,.1f}"),
    ]
    title = (
        f"{Path(str(report.options['model'])).name}: {report.environment.description}, "
        f"{report.exact.num_tokens} tokens of {report.num_texts} texts"
    )
    draw_plot(path, title, panels, width=11, height=1.6 + 0.5 * len(names), shares_places=True)
