"""Options that measurements share, and checks of them before the long work begins.

Nothing here needs torch, so that a mistake is refused before it is imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from specinfer.core.config import (
    DTYPES,
    KV_CACHE_DTYPES,
    check_device,
    check_quantization,
    check_verification,
    parse_select,
)
from specinfer.core.options import parse_size
from specinfer.core.parallel_config import ParallelConfig
from specinfer.core.sampling import MAX_SEED, SamplingParams
from specinfer.core.tree_shape import parse_tree
from specinfer.demo.chat_model import CHAT

_T = TypeVar("_T")
AnyPrompt = str | tuple[int, ...]
PLAIN = "off"  # name of the arm that decodes without speculation, as in `tree="off"`
KINDS = ("questions", "rewriting", "code", "lists", "stories")  # of chat prompts
MAX_BATCH = 1024
BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """Options of a comparison of trees with plain decoding, which is always one of the arms.

    Attributes:
        model: A local folder, a hub name, or "demo".
        drafters: "auto", or folders, hub names, "ngram" and "suffix".
        trees: One arm each: "auto", children per level such as "1,1,3,1", or "best-first:16". The first gives the
            headline numbers.
        grow: Size to grow the target to, such as "1b"; drafters grow to a hundredth of that. Llama models only.
        dtype: Data type of the models; "auto" is the checkpoint's, or bfloat16 for grown models.
        quantization: Quantization of the target ("int8", "int4" or "fp8"), or None for none.
        drafter_quantization: Quantization of the model drafters.
        kv_cache_dtype: Data type of the keys and values in the caches, one of `KV_CACHE_DTYPES`.
        select: Selection of the model drafters that draft, as for the option of this name.
        verification: Verification rule of the arms with trees.
        scheduler: A policy file made by `specinfer tune --policy`, which chooses trees for the tree "auto".
        tensor_parallel_size, pipeline_parallel_size: Numbers of ranks that hold the target, all on this machine.
        enable_prefix_caching: Whether the prefix cache keeps prompts from run to run, instead of each reading its own.
            The times with prompts then say nothing.
        kv_cache_memory_bytes: Size of the KV caches of all models, such as "6GiB". None for the default of `LLM`.
        num_prompts: Held-out texts or chat prompts for each batch size, in as many batches as they fill. A batch size
            larger than this uses as many prompts as the batch holds.
        max_tokens: Tokens generated for each prompt. The end-of-text token does not end them, but answers to chat
            prompts are no longer than plain decoding's.
        temperature: Sampling temperature; 0 is greedy.
        repeats: Measured runs of each arm on each batch.
        warmup: Unmeasured runs of each arm on the first batch of each size before them.
        prompt_chars: Approximate length of the held-out texts in characters.
        prompts: Texts or token ids to continue in place of the held-out texts.
        kinds: Kinds of chat prompts to answer. None means all kinds if the model is "demo-chat", and texts to continue
            otherwise.
        json: File to write the numbers to.
        plot: File to write the plot to; its suffix sets the format.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    model: str = "demo"
    drafters: str | tuple[str, ...] = "auto"
    trees: tuple[str, ...] = ("auto",)
    grow: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    drafter_quantization: str | None = None
    kv_cache_dtype: str = "auto"
    select: str = "all"
    verification: str = "coupled"
    scheduler: str | Path | None = None
    device: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_prefix_caching: bool = False
    kv_cache_memory_bytes: int | str | None = None
    num_prompts: int = 8
    max_tokens: int = 128
    temperature: float = 0.0
    repeats: int = 3
    warmup: int = 1
    seed: int = 0
    prompt_chars: int = 600
    prompts: tuple[AnyPrompt, ...] | None = None
    kinds: tuple[str, ...] | None = None
    json: str | Path | None = None
    plot: str | Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("max_tokens", 2), ("repeats", 1), ("warmup", 0), ("prompt_chars", 1)):
            check_whole(name, getattr(self, name), least)
        check_batches(self.sizes, self.prompts)
        check_models(self)
        check_device(self.device)
        ParallelConfig(self.tensor_parallel_size, self.pipeline_parallel_size)
        check_seed(self.seed)
        check_trees(self.trees)
        parse_select(self.select)
        check_verification(self.verification)
        if self.kv_cache_memory_bytes is not None:
            parse_size("kv_cache_memory_bytes", self.kv_cache_memory_bytes)
        check_prompts(self.prompts)
        check_kinds(self.kinds, self.prompts)
        self.sampling_params(0)

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
    """Options of the throughput measurement.

    Attributes:
        batch_sizes: Numbers of requests that run together.
    """

    batch_sizes: tuple[int, ...] = BATCH_SIZES
    max_tokens: int = 64

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.batch_sizes


def bench_params(temperature: float, max_tokens: int, seed: int, *, ignore_eos: bool = True) -> SamplingParams:
    """Return the parameters of a request that is measured; the seed wraps around."""
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed & MAX_SEED, ignore_eos=ignore_eos)


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


def check_seed(seed: object) -> None:
    check_whole("seed", seed, 0, MAX_SEED)


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


class HasPrecision(Protocol):
    """Options of the precision of the models that a measurement loads, as `LLM` has them."""

    @property
    def dtype(self) -> str: ...
    @property
    def quantization(self) -> str | None: ...
    @property
    def drafter_quantization(self) -> str | None: ...
    @property
    def kv_cache_dtype(self) -> str: ...


def check_models(options: HasPrecision) -> None:
    check_dtype(options.dtype)
    check_quantization("quantization", options.quantization)
    check_quantization("drafter_quantization", options.drafter_quantization)
    if options.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, not {options.kv_cache_dtype!r}")


def precision_of(options: HasPrecision, dtype: str) -> dict[str, Any]:
    """Return these options as arguments of `LLM`.

    Args:
        dtype: The type that the models are loaded in, which grown ones decide.
    """
    same = ("quantization", "drafter_quantization", "kv_cache_dtype")
    return {"dtype": dtype} | {name: getattr(options, name) for name in same}


def check_trees(trees: Sequence[str]) -> None:
    """Raise a ValueError unless the trees can be the arms that are compared with plain decoding."""
    check_once("trees", trees)
    if any(parse_tree(tree).is_off for tree in trees):
        raise ValueError(f'trees: plain decoding is always measured; leave "{PLAIN}" out')


def check_prompts(prompts: Sequence[AnyPrompt] | None) -> None:
    if prompts is not None and not all(prompts or [()]):
        raise ValueError("prompts: one is empty, or there are none; give at least one, each with a token")


def check_kinds(kinds: Sequence[str] | None, prompts: Sequence[AnyPrompt] | None = None) -> None:
    """Check the requested kinds of chat prompts.

    Raises:
        ValueError: A kind is unknown or given twice, or prompts are given as well.
    """
    if kinds is None:
        return
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"kinds: {unknown[0]!r} is not known; use {', '.join(KINDS)}")
    if not kinds or len(set(kinds)) < len(kinds):
        raise ValueError(f"kinds: {', '.join(kinds) or 'none'} given; give at least one, and none twice")
    if prompts is not None:
        raise ValueError("kinds: prompts are given, and have none; leave one of the two out")


def kinds_for(model: str, kinds: Sequence[str] | None, prompts: Sequence[AnyPrompt] | None = None) -> tuple[str, ...]:
    """Return the kinds of chat prompts that a model is measured on, or none if it continues texts."""
    if kinds is not None:
        return tuple(kinds)
    return KINDS if model == CHAT and prompts is None else ()
