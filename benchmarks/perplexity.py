"""Quality loss of quantization: the unquantized model and the quantized ones read the same held-out texts.

Nothing is timed. Every token after a text's first is predicted from those before it. The unquantized model stays
loaded, so that full distributions can be compared.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.growth.models import growing
from benchmarks.options import MODEL, LabSettings
from specinfer.bench.models import Models, find_models
from specinfer.bench.options import AnyPrompt, SharedSettings, check_once
from specinfer.bench.prompts import token_prompts
from specinfer.cli.measure import Measurement
from specinfer.core.config import KV_CACHE_DTYPES, QUANTIZATIONS, DType
from specinfer.core.options import check_settings, setting, setting_of
from specinfer.engine_args import EngineArgs
from specinfer.llm import LLM
from specinfer.model.batch import Piece
from specinfer.model.device import find_device
from specinfer.model.runner import TargetRunner
from specinfer.reporting.environment import Environment
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported

UNQUANTIZED, STORED = "unquantized", "as stored"  # the second of a GGUF file
_AT_ONCE = 64  # positions compared together, since memory holds several copies of their distributions
_PROBE = "perplexity-probe"


@dataclass(frozen=True, slots=True)
class PerplexityConfig:
    """Options of the measurement. The unquantized model is always measured too.

    Attributes:
        prompts: Texts or token ids to read in place of the held-out texts.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    model: str = setting_of(LabSettings, "model")
    quantizations: tuple[str, ...] | None = setting(
        None,
        MODEL,
        "Quantization: int8, int4 or fp8. May be repeated. (default: all, or none for a GGUF file or with "
        "--kv-cache-dtype)",
        name="quantization",
    )
    kv_cache_dtypes: tuple[str, ...] = setting(
        (), MODEL, "Data type of keys and values, such as fp8. May be repeated.", name="kv_cache_dtype"
    )
    grow: str | None = setting_of(LabSettings, "grow")
    dtype: DType = setting_of(EngineArgs, "dtype")
    device: str = setting_of(EngineArgs, "device")
    num_prompts: int = setting_of(SharedSettings, "num_prompts", default=16)
    prompt_chars: int = setting_of(SharedSettings, "prompt_chars", default=1200)
    prompts: tuple[AnyPrompt, ...] | None = None
    json: str | Path | None = setting_of(SharedSettings, "json")

    def __post_init__(self) -> None:
        check_settings(self)
        for name, known in (("quantizations", QUANTIZATIONS), ("kv_cache_dtypes", KV_CACHE_DTYPES)):
            values = getattr(self, name)
            if values:
                check_once(name.removesuffix("s"), values)
            if unknown := [value for value in values or () if value not in known]:
                raise ValueError(f"{name.removesuffix('s')}: use {', '.join(known)}, not {unknown[0]!r}")

    @property
    def is_gguf(self) -> bool:
        return self.model.lower().endswith(".gguf")

    @property
    def compared(self) -> tuple[str, ...]:
        """The quantizations to measure."""
        usual = () if self.is_gguf or self.kv_cache_dtypes else tuple(QUANTIZATIONS)
        return usual if self.quantizations is None else self.quantizations


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
        return replace(
            self,
            num_tokens=self.num_tokens + num_tokens,
            surprise=self.surprise + surprise,
            divergence=self.divergence + divergence,
            num_same=self.num_same + num_same,
        )

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.num_tokens)


@reported
def run_perplexity(config: PerplexityConfig, progress: StageBar) -> Report[None]:
    """Read all texts with each set of weights.

    Raises:
        ModelError: The model cannot be used.
        ValueError: An option cannot be used; the message names it. Nothing was read.
    """
    device, prepare = find_device(config.device), growing(config.grow)
    models = Models(find_models(config.model, "ngram").target, ())
    dtype: str = config.dtype
    texts = token_prompts(
        models.target, 0, count=config.num_prompts, num_chars=config.prompt_chars, prompts=config.prompts
    )
    if short := [number for number, text in enumerate(texts) if len(text) < 2]:
        raise ValueError(f"prompts: number {short[0]} has one token, and nothing is predicted; give longer ones")
    arms: list[tuple[str, str | None, str]] = [(name, name, "auto") for name in config.compared]
    arms += [(f"keys and values in {kind}", None, kind) for kind in config.kv_cache_dtypes]
    scores = []
    progress.stage("reading", len(texts) * (1 + len(arms)))
    if prepare is not None:
        models, dtype = prepare(models, dtype, device, progress.stage)
    with _load(config, models, dtype, texts, None) as exact:

        def score(name: str, llm: LLM) -> Score:
            progress.stage(name)
            found = Score(name, llm.target.loaded.num_bytes)
            for text in texts:
                wanted = _logits(exact.target, text[:-1])
                logits = wanted if llm is exact else _logits(llm.target, text[:-1])
                found = found.plus(*_compare(wanted, logits, text))
                progress.advance()
            return found

        scores.append(score(STORED if config.is_gguf else UNQUANTIZED, exact))
        for name, quantization, kv_cache_dtype in arms:
            # One quantized model at a time, since all of them together might not fit into memory.
            with _load(config, models, dtype, texts, quantization, kv_cache_dtype) as llm:
                scores.append(score(name, llm))
        environment = Environment.from_llm(exact, {})
    return _report(config, scores, len(texts), environment)


def _report(
    config: PerplexityConfig, scores: Sequence[Score], num_texts: int, environment: Environment
) -> Report[None]:
    exact = scores[0]

    def but_exact(value: Callable[[Score], float]) -> Callable[[Score], float | None]:
        return lambda score: None if score is exact else value(score)

    nats = math.log(2)
    table = Table(
        "weights",
        "Quality loss of quantization: each token predicted from those before it",
        (
            Value[Score]("name", lambda score: score.name, heading="weights"),
            Value[Score]("perplexity", lambda score: score.perplexity, "{:.4f}"),
            Value[Score]("increase", but_exact(lambda score: score.perplexity / exact.perplexity - 1), "{:+.2%}"),
            Value[Score](
                "divergence_bits",
                but_exact(lambda score: score.divergence / score.num_tokens / nats),
                "{:.5f}",
                "KL, bits",
            ),
            Value[Score]("same_best", but_exact(lambda score: score.num_same / score.num_tokens), "{:.2%}"),
            Value[Score]("weight_bytes", lambda score: score.num_bytes, "{:,}"),
        ),
        scores,
    )
    about = f"{config.model}: {environment.target_parameters / 1e6:,.1f} M parameters, {environment.precision} on "
    lines = [f"{about}{environment.device}; {exact.num_tokens} tokens of {num_texts} texts"]
    numbers = {"num_texts": num_texts, "num_tokens": exact.num_tokens}
    return Report(lines, (table,), environment=environment, numbers=numbers)


def _load(
    config: PerplexityConfig,
    models: Models,
    dtype: str,
    texts: Sequence[Sequence[int]],
    quantization: str | None,
    kv_cache_dtype: str = "auto",
) -> LLM:
    kinds: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    return LLM(
        models.target,
        drafters=(),
        tree="off",
        **kinds,
        device=config.device,
        max_model_len=max(map(len, texts)),
        max_num_seqs=1,
    )


def _compare(wanted: Tensor, logits: Tensor, tokens: Sequence[int]) -> tuple[int, float, float, int]:
    """Return the arguments of `Score.plus` for one text, from the logits of both models [tokens - 1, vocab]."""
    following = torch.tensor(tokens[1:], device=wanted.device)
    surprise = divergence = 0.0
    num_same = 0
    for rows in torch.arange(len(following), device=following.device).split(_AT_ONCE):
        p, q = wanted[rows].double().log_softmax(1), logits[rows].double().log_softmax(1)
        surprise -= q.gather(1, following[rows].unsqueeze(1)).sum().item()
        divergence += (p.exp() * (p - q)).sum().item()
        num_same += int((p.argmax(1) == q.argmax(1)).sum())
    return len(following), surprise, divergence, num_same


def _logits(runner: TargetRunner, tokens: Sequence[int]) -> Tensor:
    """Return the logits after each of the tokens [tokens, vocab]."""
    cache = runner.cache
    try:
        slots = cache.reserve(_PROBE, len(tokens))
        piece = Piece.from_span(tokens, None, cache.slots(_PROBE), slots)
        return runner.forward([replace(piece, num_logits=len(tokens))])
    finally:
        cache.free(_PROBE)


PERPLEXITY = Measurement(
    "perplexity",
    PerplexityConfig,
    "benchmarks.perplexity:run_perplexity",
    "Compare the perplexity of a model with that of its quantized weights.",
)
