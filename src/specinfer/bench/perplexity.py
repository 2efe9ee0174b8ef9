"""Benchmark of the quality loss of quantization: unquantized and quantized models read the same held-out texts.

Nothing is timed. Every token after a text's first is predicted from those before it. The unquantized model stays
loaded, so that full distributions can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from specinfer.bench.environment import Environment
from specinfer.bench.inputs import (
    AnyPrompt,
    check_dtype,
    check_files,
    check_whole,
    options_of,
    showing_progress,
    token_prompts,
    write_json,
)
from specinfer.bench.models import Models, at_size, find_models
from specinfer.bench.perplexity_plot import plot_perplexity
from specinfer.bench.perplexity_report import UNQUANTIZED, PerplexityReport, Score
from specinfer.core.config import QUANTIZATIONS, check_quantization
from specinfer.llm import LLM
from specinfer.model.batch import Piece
from specinfer.model.device import find_device
from specinfer.model.runner import TargetRunner

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
        if not self.quantizations or len(set(self.quantizations)) < len(self.quantizations):
            shown = ", ".join(map(str, self.quantizations)) or "none"
            raise ValueError(f"quantization: {shown} given; give at least one, none twice")
        for quantization in self.quantizations:
            check_quantization("quantization", quantization)


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
    with showing_progress(console) as progress:
        task = progress.add_task("loading", total=(1 + len(config.quantizations)) * len(texts))
        if config.grow is not None:
            progress.update(task, description=f"growing to {config.grow}")
        models, dtype = at_size(models, config.grow, config.dtype, device)
        with _load(config, models, dtype, texts, None) as exact:
            scores = []
            for quantization in (None, *config.quantizations):
                progress.update(task, description=quantization or UNQUANTIZED)
                # One quantized model at a time, since all of them together might not fit into memory.
                llm = exact if quantization is None else _load(config, models, dtype, texts, quantization)
                score = Score(quantization or UNQUANTIZED, llm.target.loaded.num_bytes)
                for text in texts:
                    score = score.plus(*_compare(exact.target, llm.target, text))
                    progress.advance(task)
                scores.append(score)
                del llm
            environment = Environment.of(exact, {})
    report = PerplexityReport(tuple(scores), len(texts), options_of(config), environment)
    if config.json is not None:
        write_json(config.json, report.as_dict())
    if config.plot is not None:
        plot_perplexity(report, config.plot)
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
    said = torch.tensor(tokens[1:], device=runner.loaded.device)
    wanted = _logits(exact, tokens[:-1])
    found = wanted if runner is exact else _logits(runner, tokens[:-1])
    surprise = divergence = 0.0
    num_same = 0
    for rows in torch.arange(len(said), device=said.device).split(_AT_ONCE):
        p, q = wanted[rows].double().log_softmax(1), found[rows].double().log_softmax(1)
        surprise -= q.gather(1, said[rows].unsqueeze(1)).sum().item()
        divergence += (p.exp() * (p - q)).sum().item()
        num_same += int((p.argmax(1) == q.argmax(1)).sum())
    return len(said), surprise, divergence, num_same


def _logits(runner: TargetRunner, tokens: Sequence[int]) -> Tensor:
    """Return the logits after each of the tokens [tokens, vocab]."""
    cache = runner.cache
    try:
        slots = cache.reserve(_PROBE, len(tokens))
        piece = Piece.of_span(tokens, None, cache.slots(_PROBE), slots)
        return runner.forward([replace(piece, num_logits=len(tokens))])
    finally:
        cache.free(_PROBE)
