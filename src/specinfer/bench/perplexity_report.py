"""Prediction quality of each set of weights on the same texts, as values and as a table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console

from specinfer.bench.environment import Environment
from specinfer.bench.table import millions, new_table, print_table

UNQUANTIZED = "unquantized"


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
    table = new_table("weights", "perplexity", "increase", "bits/token", "KL, bits", "same best", "MiB")
    for score in report.scores:
        is_exact = score is report.exact
        table.add_row(
            score.name,
            f"{score.perplexity:.4f}",
            "" if is_exact else f"{report.increase_of(score):+.2%}",
            f"{score.bits_per_token:.4f}",
            "" if is_exact else f"{score.divergence_bits:.5f}",
            "" if is_exact else f"{score.same_best:.2%}",
            f"{score.num_bytes / 2**20:,.1f}",
        )
    print_table(console, "What rounding the weights costs: each token predicted from those before it", table)
