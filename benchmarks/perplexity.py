"""Benchmark of the quality loss of quantization: unquantized and quantized models read the same held-out texts.

Nothing is timed. Every token after a text's first is predicted from those before it. The unquantized model stays
loaded, so that full distributions can be compared.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from specinfer.bench.loop import write_files
from specinfer.bench.models import Models, at_size, find_models
from specinfer.bench.options import AnyPrompt, check_dtype, check_once, check_whole
from specinfer.bench.prompts import token_prompts
from specinfer.core.config import QUANTIZATIONS, check_quantization
from specinfer.llm import LLM
from specinfer.model.batch import Piece
from specinfer.model.device import find_device
from specinfer.model.runner import TargetRunner
from specinfer.reporting.environment import Environment
from specinfer.reporting.files import check_files, options_of
from specinfer.reporting.plots import Panel, Series, draw_plot
from specinfer.reporting.progress_bar import stage_bar
from specinfer.reporting.tables import Column, millions, print_rows

UNQUANTIZED = "unquantized"
_AT_ONCE = 64  # positions compared together, since memory holds several copies of their distributions
_PROBE = "perplexity-probe"


@dataclass(frozen=True, slots=True)
class PerplexityConfig:
    """Options of the benchmark. The unquantized model is always measured too.

    Attributes:
        model: A local folder, a hub name, or "demo".
        quantizations: Quantizations to measure, from "int8", "int4" and "fp8".
        grow: Size to grow the model to, such as "1b". Llama models only.
        dtype: "auto" for the checkpoint's dtype, or bfloat16 for grown models.
        num_prompts: Held-out texts to read.
        prompt_chars: Approximate length of the held-out texts in characters.
        prompts: Texts or token ids to read in place of the held-out texts.
        json: File to write the numbers to.
        plot: File to draw the plot to. Its suffix is the format.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    model: str = "demo"
    quantizations: tuple[str, ...] = QUANTIZATIONS
    grow: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    num_prompts: int = 16
    prompt_chars: int = 1200
    prompts: tuple[AnyPrompt, ...] | None = None
    json: str | Path | None = None
    plot: str | Path | None = None

    def __post_init__(self) -> None:
        check_whole("num_prompts", self.num_prompts, 1)
        check_whole("prompt_chars", self.prompt_chars, 1)
        check_dtype(self.dtype)
        check_once("quantization", self.quantizations)
        for quantization in self.quantizations:
            check_quantization("quantization", quantization)


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


def run_perplexity(config: PerplexityConfig, console: Console | None = None) -> PerplexityReport:
    """Read all texts with each set of weights, and write the requested files.

    Raises:
        ModelError: The model cannot be used.
        ValueError: An option cannot be used; the message names it. Nothing was read.
    """
    check_files(config.json, config.plot)
    device = find_device(config.device)
    models = Models(find_models(config.model, "ngram").target, ())
    texts = token_prompts(
        models.target, 0, count=config.num_prompts, num_chars=config.prompt_chars, prompts=config.prompts
    )
    if short := [text for text in texts if len(text) < 2]:
        raise ValueError(f"prompts: one has {len(short[0])} tokens; give at least 2, the first of which is only read")
    with stage_bar(console) as progress:
        progress.stage("loading", (1 + len(config.quantizations)) * len(texts))
        if config.grow is not None:
            progress.stage(f"growing to {config.grow}")
        models, dtype = at_size(models, config.grow, config.dtype, device)
        with _load(config, models, dtype, texts, None) as exact:
            scores = []
            for quantization in (None, *config.quantizations):
                progress.stage(quantization or UNQUANTIZED)
                # One quantized model at a time, since all of them together might not fit into memory.
                llm = exact if quantization is None else _load(config, models, dtype, texts, quantization)
                score = Score(quantization or UNQUANTIZED, llm.target.loaded.num_bytes)
                for text in texts:
                    score = score.plus(*_compare(exact.target, llm.target, text))
                    progress.advance()
                scores.append(score)
                del llm
            environment = Environment.of(exact, {})
    report = PerplexityReport(tuple(scores), len(texts), options_of(config), environment)
    write_files(report, config.json, config.plot, plot_perplexity)
    return report


def _load(
    config: PerplexityConfig, models: Models, dtype: str, texts: Sequence[Sequence[int]], quantization: str | None
) -> LLM:
    longest = max(map(len, texts))
    return LLM(
        models.target,
        drafters=(),
        tree="off",
        dtype=dtype,
        quantization=quantization,
        device=config.device,
        max_model_len=longest,
        max_num_seqs=1,
    )


def _compare(exact: TargetRunner, runner: TargetRunner, tokens: Sequence[int]) -> tuple[int, float, float, int]:
    """Return the arguments of `Score.plus` for one text."""
    following = torch.tensor(tokens[1:], device=runner.loaded.device)
    wanted = _logits(exact, tokens[:-1])
    found = wanted if runner is exact else _logits(runner, tokens[:-1])
    surprise = divergence = 0.0
    num_same = 0
    for rows in torch.arange(len(following), device=following.device).split(_AT_ONCE):
        p, q = wanted[rows].double().log_softmax(1), found[rows].double().log_softmax(1)
        surprise -= q.gather(1, following[rows].unsqueeze(1)).sum().item()
        divergence += (p.exp() * (p - q)).sum().item()
        num_same += int((p.argmax(1) == q.argmax(1)).sum())
    return len(following), surprise, divergence, num_same


def _logits(runner: TargetRunner, tokens: Sequence[int]) -> Tensor:
    """Return the logits after each of the tokens [tokens, vocab]."""
    cache = runner.cache
    try:
        slots = cache.reserve(_PROBE, len(tokens))
        piece = Piece.of_span(tokens, None, cache.slots(_PROBE), slots)
        return runner.forward([replace(piece, num_logits=len(tokens))])
    finally:
        cache.free(_PROBE)


if __name__ == "__main__":
    from benchmarks.program import run

    run("perplexity")
