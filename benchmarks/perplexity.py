"""Benchmark of the quality loss of quantization: unquantized and quantized models read the same held-out texts.

Nothing is timed. Every token after a text's first is predicted from those before it. The unquantized model stays
loaded, so that full distributions can be compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.perplexity_report import PerplexityReport, Score, plot_perplexity
from specinfer.bench.loop import write_files
from specinfer.bench.models import Models, at_size, find_models
from specinfer.bench.options import AnyPrompt, check_dtype, check_once, check_whole
from specinfer.bench.prompts import token_prompts
from specinfer.core.config import KV_CACHE_DTYPES, QUANTIZATIONS, check_quantization
from specinfer.llm import LLM
from specinfer.model.batch import Piece
from specinfer.model.device import find_device
from specinfer.model.runner import TargetRunner
from specinfer.reporting.environment import Environment
from specinfer.reporting.files import check_files, options_of
from specinfer.reporting.progress_bar import stage_bar

UNQUANTIZED = "unquantized"
STORED = "as stored"  # of a GGUF file
LLAMA_CPP = "llama.cpp"
_AT_ONCE = 64  # positions compared together, since memory holds several copies of their distributions
_PEER_ROWS = 16  # tokens that llama.cpp reads at once
_PROBE = "perplexity-probe"
Read = Callable[[Sequence[int]], Tensor]  # logits after each of the tokens [tokens, vocab]


@dataclass(frozen=True, slots=True)
class PerplexityConfig:
    """Options of the benchmark. The unquantized model is always measured too.

    Attributes:
        model: A local folder, a hub name, or "demo".
        quantizations: Quantizations to measure, from "int8", "int4" and "fp8"; None is all, or none for a GGUF
            file or with types of keys and values.
        kv_cache_dtypes: Types of keys and values to measure, with the weights as they are.
        peer: "llama.cpp" to let it read the same texts with the same GGUF file, or None.
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
    quantizations: tuple[str, ...] | None = None
    kv_cache_dtypes: tuple[str, ...] = ()
    peer: str | None = None
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
        if self.peer not in (None, LLAMA_CPP):
            raise ValueError(f"peer: {self.peer!r} cannot be asked for probabilities; use {LLAMA_CPP}")
        if self.peer is not None and (self.grow is not None or not self.is_gguf):
            raise ValueError(f"peer: {LLAMA_CPP} reads GGUF files as they are; name one as the model, without grow")
        if self.quantizations is not None:
            check_once("quantization", self.quantizations)
        if self.kv_cache_dtypes:
            check_once("kv_cache_dtype", self.kv_cache_dtypes)
        if unknown := set(self.kv_cache_dtypes) - set(KV_CACHE_DTYPES):
            raise ValueError(f"kv_cache_dtype: use {', '.join(KV_CACHE_DTYPES)}, not {', '.join(sorted(unknown))}")
        for quantization in self.compared:
            check_quantization("quantization", quantization)

    @property
    def is_gguf(self) -> bool:
        return self.model.lower().endswith(".gguf")

    @property
    def compared(self) -> tuple[str, ...]:
        """The quantizations to measure."""
        usual = () if self.is_gguf or self.kv_cache_dtypes else QUANTIZATIONS
        return usual if self.quantizations is None else self.quantizations


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
    exact_name = STORED if config.is_gguf else UNQUANTIZED
    with stage_bar(console) as progress:
        arms: list[tuple[str, str | None, str]] = [(name, name, "auto") for name in config.compared]
        arms += [(f"KV cache of {name}", None, name) for name in config.kv_cache_dtypes]
        progress.stage("loading", (1 + len(arms) + (config.peer is not None)) * len(texts))
        if config.grow is not None:
            progress.stage(f"growing to {config.grow}")
        models, dtype = at_size(models, config.grow, config.dtype, device)
        with _load(config, models, dtype, texts, None) as exact:

            def score_of(name: str, num_bytes: int, read: Read | None = None) -> Score:
                progress.stage(name)
                score = Score(name, num_bytes)
                for text in texts:
                    wanted = _logits(exact.target, text[:-1])
                    score = score.plus(*_compare(wanted, wanted if read is None else read(text[:-1]), text))
                    progress.advance()
                return score

            def read_with(llm: LLM) -> Read:
                return lambda tokens: _logits(llm.target, tokens)

            scores = [score_of(exact_name, exact.target.loaded.num_bytes)]
            for name, quantization, kv_cache_dtype in arms:
                # One quantized model at a time, since all of them together might not fit into memory.
                llm = _load(config, models, dtype, texts, quantization, kv_cache_dtype)
                scores.append(score_of(name, llm.target.loaded.num_bytes, read_with(llm)))
                del llm
            if config.peer is not None:
                size = Path(config.model).stat().st_size
                scores.append(score_of(config.peer, size, _peer(config.model, max(map(len, texts)))))
            environment = Environment.from_llm(exact, {})
    report = PerplexityReport(tuple(scores), len(texts), options_of(config), environment)
    write_files(report, config.json, config.plot, plot_perplexity)
    return report


def _load(
    config: PerplexityConfig,
    models: Models,
    dtype: str,
    texts: Sequence[Sequence[int]],
    quantization: str | None,
    kv_cache_dtype: str = "auto",
) -> LLM:
    longest = max(map(len, texts))
    return LLM(
        models.target,
        drafters=(),
        tree="off",
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        device=config.device,
        max_model_len=longest,
        max_num_seqs=1,
    )


def _compare(wanted: Tensor, found: Tensor, tokens: Sequence[int]) -> tuple[int, float, float, int]:
    """Return the arguments of `Score.plus` for one text, from the logits of both models [tokens - 1, vocab]."""
    following = torch.tensor(tokens[1:], device=wanted.device)
    surprise = divergence = 0.0
    num_same = 0
    for rows in torch.arange(len(following), device=following.device).split(_AT_ONCE):
        p, q = wanted[rows].double().log_softmax(1), found[rows].double().log_softmax(1)
        surprise -= q.gather(1, following[rows].unsqueeze(1)).sum().item()
        divergence += (p.exp() * (p - q)).sum().item()
        num_same += int((p.argmax(1) == q.argmax(1)).sum())
    return len(following), surprise, divergence, num_same


def _peer(file: str, longest: int) -> Read:
    """Return a function that reads tokens with llama.cpp.

    Raises:
        ValueError: llama-cpp-python is not installed.
    """
    try:
        from benchmarks.peers import llama_cpp_engine
    except ImportError as error:
        raise ValueError(f"peer: {LLAMA_CPP} is not installed: pip install '.[peers]'") from error
    llama_cpp_engine.create(torch.get_num_threads())
    sequence = llama_cpp_engine.Sequence(file, longest, torch.get_num_threads())

    def read(tokens: Sequence[int]) -> Tensor:
        sequence.forget(0)
        parts = [list(tokens[start : start + _PEER_ROWS]) for start in range(0, len(tokens), _PEER_ROWS)]
        return torch.cat([torch.tensor(sequence.read(part, all_rows=True)) for part in parts])

    return read


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
