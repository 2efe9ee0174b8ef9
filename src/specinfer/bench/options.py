"""Options that measurements share, and checks of them before the long work begins.

A field of a configuration is the only place of its option: flags and their help are made from it, as those of an engine
are from `EngineArgs`. Nothing here needs torch, so that a mistake is refused before it is imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from specinfer.core.config import (
    DTYPES,
    DType,
    KVCacheDType,
    Offload,
    OffloadConfig,
    Quantization,
    VerificationRule,
    check_device,
)
from specinfer.core.drafter_forms import parse_select
from specinfer.core.options import check_settings, parse_size, setting, setting_of
from specinfer.core.parallel_config import ParallelConfig
from specinfer.core.sampling import MAX_SEED, SamplingParams
from specinfer.core.tree_shape import MAX_TREE_NODES, parse_tree
from specinfer.engine_args import EngineArgs
from specinfer.inputs.chat.samples import ALL, FUNCTIONS, KINDS

_T = TypeVar("_T")
AnyPrompt = str | tuple[int, ...]
PLAIN = "off"  # name of the arm that decodes without speculation, as in `tree="off"`
REPLAY = "replay"  # of arms whose draft tokens are plain decoding's own
MAX_BATCH = 1024
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_SAMPLING, _SPECULATION = "Sampling", "Speculation"


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """Settings that several measurements have."""

    trees: tuple[str, ...] = setting(
        ("auto",), _SPECULATION, "Token tree to measure. May be repeated. (default: auto)", name="tree"
    )
    kinds: tuple[str, ...] | None = setting(
        None,
        _SAMPLING,
        "Kind of chat prompts: questions, rewriting, code, lists, stories, functions to complete, or all. May be "
        "repeated. (default: all but functions for a model with a chat template, and held-out texts for others)",
        name="kind",
        metavar="KIND",
    )
    num_prompts: int = setting(8, _SAMPLING, "Number of held-out texts or chat prompts.", low=1)
    prompt_chars: int = setting(600, _SAMPLING, "Approximate length of held-out texts, in characters.", low=1)
    max_tokens: int = setting(128, _SAMPLING, "Maximum number of tokens to generate for each prompt.", low=2)
    temperature: float = setting(0.0, _SAMPLING, "Temperature; 0 is greedy.")
    seed: int = setting(0, _SAMPLING, "Random seed of sampled text.", low=0, high=MAX_SEED)
    json: str | Path | None = setting(None, "Output", "Write the results to this JSON file.", metavar="FILE")
    plot: str | Path | None = setting(
        None, "Output", "Plot the results to this file: .png, .svg or .pdf.", metavar="FILE"
    )


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """Options of a comparison of trees with plain decoding, which is always one of the arms.

    The first tree gives the headline numbers. Prompts fill as many batches as they need; a batch size larger than
    their number uses as many as the batch holds. The end-of-text token does not end an output, but answers to chat
    prompts are no longer than plain decoding's.

    Attributes:
        warmup: Unmeasured runs of each arm on the first batch of each size.
        prompts: Texts or token ids to continue in place of the held-out texts.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    model: str = setting_of(EngineArgs, "model", default="demo")
    drafters: str | tuple[str, ...] = setting_of(EngineArgs, "drafters")
    trees: tuple[str, ...] = setting_of(SharedSettings, "trees")
    replays: tuple[int, ...] = setting(
        (),
        _SPECULATION,
        "Also measure chains of this many draft tokens that are plain decoding's own, so that all are accepted: the "
        "most that any drafter could bring. On GPUs it needs ngram or suffix among the drafters to be at its fastest. "
        "May be repeated.",
        name="replay",
        metavar="TOKENS",
    )
    dtype: DType = setting_of(EngineArgs, "dtype")
    quantization: Quantization | None = setting_of(EngineArgs, "quantization")
    drafter_quantization: Quantization | None = setting_of(EngineArgs, "drafter_quantization")
    drafter_token_map: int | str | Path = setting_of(EngineArgs, "drafter_token_map")
    drafter_window: str = setting_of(EngineArgs, "drafter_window")
    kv_cache_dtype: KVCacheDType = setting_of(EngineArgs, "kv_cache_dtype")
    select: str = setting_of(EngineArgs, "select")
    verification: VerificationRule = setting_of(EngineArgs, "verification")
    speculation_policy: str | Path | None = setting_of(EngineArgs, "speculation_policy")
    batch_invariant: bool = setting_of(EngineArgs, "batch_invariant")
    device: str = setting_of(EngineArgs, "device")
    tensor_parallel_size: int = setting_of(EngineArgs, "tensor_parallel_size")
    pipeline_parallel_size: int = setting_of(EngineArgs, "pipeline_parallel_size")
    offload: Offload | None = setting_of(EngineArgs, "offload")
    memory_budget: int | str | None = setting_of(EngineArgs, "memory_budget")
    offload_folder: str | Path | None = setting_of(EngineArgs, "offload_folder")
    enable_prefix_caching: bool = setting(
        False,
        _SAMPLING,
        "Read each prompt once and not in each run, to compare decoding after long prompts in less time.",
    )
    kv_cache_memory_bytes: int | str | None = setting_of(EngineArgs, "kv_cache_memory_bytes")
    num_prompts: int = setting(
        8, _SAMPLING, "Number of held-out texts, or of chat prompts of all kinds; at least the batch size.", low=1
    )
    max_tokens: int = setting_of(SharedSettings, "max_tokens", default=128)
    temperature: float = setting(0.0, _SAMPLING, "Temperature; 0 is greedy. (default: 0, or 0.7 for demo-chat)")
    repeats: int = setting(3, _SAMPLING, "Number of measured runs of each tree on each prompt or batch.", low=1)
    warmup: int = 1
    seed: int = setting_of(SharedSettings, "seed")
    prompt_chars: int = setting_of(SharedSettings, "prompt_chars")
    prompts: tuple[AnyPrompt, ...] | None = None
    kinds: tuple[str, ...] | None = setting_of(SharedSettings, "kinds")
    json: str | Path | None = setting_of(SharedSettings, "json")
    plot: str | Path | None = setting_of(SharedSettings, "plot")

    def __post_init__(self) -> None:
        check_settings(self)
        check_whole("warmup", self.warmup, 0)
        check_batches(self.sizes, self.prompts)
        check_device(self.device)
        ParallelConfig(self.tensor_parallel_size, self.pipeline_parallel_size)
        OffloadConfig(self.offload, self.memory_budget, self.offload_folder)
        check_trees(self.trees)
        if self.replays:
            check_distinct("replay", self.replays, MAX_TREE_NODES)
        parse_select(self.select)
        if self.kv_cache_memory_bytes is not None:
            parse_size("kv_cache_memory_bytes", self.kv_cache_memory_bytes)
        check_prompts(self.prompts)
        check_kinds(self.kinds, self.prompts, self.more_kinds)
        self.sampling_params(0)

    @property
    def more_kinds(self) -> tuple[str, ...]:
        """Kinds of prompts that only this measurement has."""
        return ()

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms beside plain decoding, the trees first."""
        return (*self.trees, *(f"{REPLAY}:{count}" for count in self.replays))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of requests that run together."""
        return (1,)

    @property
    def largest(self) -> int:
        return max(self.sizes)

    def sampling_params(self, prompt: int) -> SamplingParams:
        """Return the sampling parameters of a prompt, which are the same for every arm, batch and repeat."""
        return bench_params(self.temperature, self.max_tokens, self.seed + prompt)


class LatencyConfig(CompareConfig):
    """Options of the latency measurement."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ThroughputConfig(CompareConfig):
    """Options of the throughput measurement."""

    batch_sizes: tuple[int, ...] = setting(
        BATCH_SIZES, _SAMPLING, "Batch size. May be repeated. (default: 1, 2, 4, 8, 16 and 32)", name="batch"
    )
    max_tokens: int = setting_of(SharedSettings, "max_tokens", default=64)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.batch_sizes


def bench_params(temperature: float, max_tokens: int, seed: int, *, ignore_eos: bool = True) -> SamplingParams:
    """Return the parameters of a request that is measured; the seed wraps around."""
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed & MAX_SEED, ignore_eos=ignore_eos)


def parse_numbers(name: str, text: str) -> tuple[float, ...]:
    """Return numbers that are separated by commas.

    Raises:
        ValueError: One is none; the message has the name.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{name}: {text[:60]!r} cannot be read; give numbers with commas, such as 0.7,0.1") from error


def rotated(values: Sequence[_T], shift: int) -> tuple[_T, ...]:
    """Return the values in order, starting `shift` places further."""
    start = shift % len(values)
    return (*values[start:], *values[:start])


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise a ValueError that names the field if the value is no whole number within the limits."""
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        raise ValueError(f"{name} must be a whole number {limits}, not {value!r}")


def check_once(name: str, values: Sequence[object]) -> None:
    """Raise a ValueError that names the field unless there are values, all of them different."""
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name}: {', '.join(map(str, values)) or 'none'} given; give at least one, and none twice")


def check_distinct(name: str, values: Sequence[object], most: int) -> None:
    """Raise a ValueError that names the field unless the values are distinct whole numbers from 1 to `most`."""
    for value in values:
        check_whole(name, value, 1, most)
    check_once(name, values)


def check_batches(batch_sizes: Sequence[int], prompts: Sequence[AnyPrompt] | None) -> None:
    check_distinct("batch_sizes", batch_sizes, MAX_BATCH)
    if prompts and len(prompts) < max(batch_sizes):
        raise ValueError(
            f"prompts: {len(prompts)} given for {max(batch_sizes)} requests together; give as many, or lower "
            "batch_sizes"
        )


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")


class HasLoadOptions(Protocol):
    """Options of the models that a measurement loads, as `LLM` has them."""

    @property
    def quantization(self) -> str | None: ...
    @property
    def drafter_quantization(self) -> str | None: ...
    @property
    def drafter_token_map(self) -> int | str | Path: ...
    @property
    def drafter_window(self) -> str: ...
    @property
    def kv_cache_dtype(self) -> str: ...


def load_options_of(options: HasLoadOptions, dtype: str) -> dict[str, Any]:
    """Return these options as arguments of `LLM`.

    Args:
        dtype: The type that the models are loaded in, which grown ones decide.
    """
    same = ("quantization", "drafter_quantization", "drafter_token_map", "drafter_window", "kv_cache_dtype")
    return {"dtype": dtype} | {name: getattr(options, name) for name in same}


def check_trees(trees: Sequence[str]) -> None:
    """Raise a ValueError unless the trees can be the arms that are compared with plain decoding."""
    check_once("trees", trees)
    if any(parse_tree(tree).is_off for tree in trees):
        raise ValueError(f'trees: plain decoding is always measured; leave "{PLAIN}" out')


def check_prompts(prompts: Sequence[AnyPrompt] | None) -> None:
    if prompts is not None and not all(prompts or [()]):
        raise ValueError("prompts: one is empty, or there are none; give at least one, each with a token")


def check_kinds(
    kinds: Sequence[str] | None, prompts: Sequence[AnyPrompt] | None = None, more: Sequence[str] = ()
) -> None:
    """Check the requested kinds of chat prompts.

    Args:
        more: Kinds that only this measurement has.

    Raises:
        ValueError: A kind is unknown or given twice, or prompts are given as well.
    """
    if kinds is None:
        return
    known = (*KINDS, FUNCTIONS, ALL, *more)
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ValueError(f"kinds: {unknown[0]!r} is not known; use {', '.join(known)}")
    if ALL in kinds and len(kinds) > 1:
        raise ValueError(f"kinds: {ALL!r} stands for all of them; leave the others out")
    if not kinds or len(set(kinds)) < len(kinds):
        raise ValueError(f"kinds: {', '.join(kinds) or 'none'} given; give at least one, and none twice")
    if prompts is not None:
        raise ValueError("kinds: prompts are given, and have none; leave one of the two out")
