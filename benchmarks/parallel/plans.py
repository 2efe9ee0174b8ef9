"""Configuration of a run on split targets, and the order of its batches."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specinfer.bench.loop import batches
from specinfer.bench.options import (
    PLAIN,
    AnyPrompt,
    bench_params,
    check_batches,
    check_models,
    check_once,
    check_prompts,
    check_seed,
    check_trees,
    check_whole,
    rotated,
)
from specinfer.core.config import parse_select
from specinfer.core.sampling import SamplingParams
from specinfer.planning.network import Link, parse_rate, parse_seconds

_MAX_RANKS = 16  # all of them run on this machine
_WARMUP_TOKENS = 12  # generated for each prompt by a warm-up run
_SPLIT = re.compile(r"([0-9]{1,2})x([0-9]{1,2})")
NUM_HOSTS = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """The place where an arm runs: one process, or a split over a link with a given latency.

    Attributes:
        latency: Latency of the link as given in the options, or "" if the run sets up no link.
    """

    tensor: int = 1
    pipeline: int = 1
    latency: str = ""

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def split(self) -> str:
        return f"{self.tensor}x{self.pipeline}"

    @property
    def name(self) -> str:
        if self.num_ranks == 1:
            return "whole"
        return f"{self.split} {self.latency}".strip()


WHOLE = Setting()


@dataclass(frozen=True, slots=True)
class ParallelBenchConfig:
    """Options of the benchmark. Plain decoding and the target in one process are always measured.

    Attributes:
        model: A local folder, a hub name, or "demo".
        drafters: "auto", or folders, hub names, "ngram" and "suffix".
        trees: Trees, each of which is an arm: "auto", children per level such as "1,1,3,1", or "best-first:64".
        splits: Tensor ranks x stages, such as "2x1" and "1x2".
        namespaces: Whether ranks are spread over two hosts made of network namespaces. Otherwise all of them run on
            this machine without a link between them.
        link_latencies: One-way latencies of the link between the hosts, such as "1ms".
        link_bandwidth: Bandwidth of each direction of the link.
        grow: Size to grow the target to, such as "1b"; drafters grow to a hundredth of that. Llama models only.
        dtype: "auto" for the checkpoint's dtype, or bfloat16 for grown models.
        quantization: "int8", "int4" or "fp8" for the target, or None for no quantization.
        drafter_quantization: The same for draft models.
        kv_cache_dtype: Data type of the keys and values in the caches, one of `KV_CACHE_DTYPES`.
        select: Selection of the draft models that propose tokens, as in the option of this name.
        threads: Threads of each process, including the one with the whole target, or None for the number of cores
            divided by the ranks of the first split.
        batch_sizes: Numbers of requests that run together.
        temperatures: Temperatures at which each arm runs; 0 is greedy.
        num_prompts: Held-out texts for each batch size, in as many batches as they fill. A batch size larger than this
            uses as many texts as the batch holds.
        max_tokens: Tokens generated for each prompt. The end-of-text token does not end the output.
        repeats: Measured runs of each arm on each batch.
        warmup: Short runs of each arm on the first batch of each size before the measured ones.
        prompt_chars: Approximate length of the held-out texts in characters.
        prompts: Texts or token ids to continue in place of the held-out texts.
        json: File to write the numbers to.
        plot: File to draw the plot to. Its suffix is the format.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    model: str = "demo"
    drafters: str | tuple[str, ...] = "auto"
    trees: tuple[str, ...] = ("auto",)
    splits: tuple[str, ...] = ("2x1", "1x2")
    namespaces: bool = True
    link_latencies: tuple[str, ...] = ("1ms", "5ms")
    link_bandwidth: str = "1Gbit"
    grow: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    drafter_quantization: str | None = None
    kv_cache_dtype: str = "auto"
    select: str = "all"
    threads: int | None = None
    batch_sizes: tuple[int, ...] = (1, 4)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_prompts: int = 4
    max_tokens: int = 48
    repeats: int = 1
    warmup: int = 1
    seed: int = 0
    prompt_chars: int = 400
    prompts: tuple[AnyPrompt, ...] | None = None
    json: str | Path | None = None
    plot: str | Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("max_tokens", 2), ("repeats", 1), ("warmup", 0), ("prompt_chars", 1)):
            check_whole(name, getattr(self, name), least)
        if self.threads is not None:
            check_whole("threads", self.threads, 1, 1024)
        check_batches(self.batch_sizes, self.prompts)
        check_models(self)
        check_seed(self.seed)
        check_trees(self.trees)
        parse_select(self.select)
        check_prompts(self.prompts)
        parse_rate("link_bandwidth", self.link_bandwidth)
        for name in ("splits", "link_latencies", "temperatures"):
            check_once(name, getattr(self, name))
        for split in self.splits:
            tensor, pipeline = parse_split(split)
            if self.namespaces and tensor * pipeline % NUM_HOSTS:
                raise ValueError(f"splits: {split} has a number of ranks that two hosts cannot share; make it even")
        for latency in self.link_latencies:
            parse_seconds("link_latencies", latency)
        for temperature in self.temperatures:
            self.sampling_params(0, temperature)

    @property
    def largest(self) -> int:
        return max(self.batch_sizes)

    @property
    def settings(self) -> list[Setting]:
        """Settings to measure: one process first, then for each latency all splits."""
        latencies = self.link_latencies if self.namespaces else ("",)
        splits = [parse_split(split) for split in self.splits]
        return [WHOLE, *(Setting(*split, latency) for latency in latencies for split in splits)]

    def link(self, setting: Setting) -> Link | None:
        """Return the link between the hosts, or None where the run sets up no link."""
        if not setting.latency:
            return None
        rate = parse_rate("link_bandwidth", self.link_bandwidth)
        return Link(parse_seconds("link_latencies", setting.latency), rate)

    def sampling_params(self, prompt: int, temperature: float, most: int | None = None) -> SamplingParams:
        """Return the sampling parameters of a prompt, the same for every arm, batch and repeat.

        Args:
            most: Limit of `max_tokens`, or None for no other limit.
        """
        most = self.max_tokens if most is None else min(self.max_tokens, most)
        return bench_params(temperature, most, self.seed + prompt)


def parse_split(text: str) -> tuple[int, int]:
    """Return (tensor ranks, stages) of a split such as "2x1".

    Raises:
        ValueError: The text is not a split, or has a single rank, or needs too many processes.
    """
    found = _SPLIT.fullmatch(text)
    tensor, pipeline = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 2 <= tensor * pipeline <= _MAX_RANKS:
        raise ValueError(
            f"splits: {text!r} cannot be measured; give tensor ranks x stages of 2 to {_MAX_RANKS} ranks in all, such "
            "as 2x1 or 1x2"
        )
    return tensor, pipeline


class Turn(NamedTuple):
    """One batch, which all settings run one after the other, each with all arms in this order."""

    repeat: int  # negative for warm-up
    temperature: float
    prompts: tuple[int, ...]
    settings: tuple[Setting, ...]
    trees: tuple[str, ...]

    @property
    def most_tokens(self) -> int | None:
        """Limit of the tokens of each prompt, or None for the configured number."""
        return None if self.repeat >= 0 else _WARMUP_TOKENS


def schedule(config: ParallelBenchConfig, num_prompts: int) -> Iterator[Turn]:
    """Yield all batches at all temperatures, repeat by repeat, so that a slower machine affects all of them alike."""
    trees, settings = (PLAIN, *config.trees), tuple(config.settings)
    count = config.num_prompts if config.prompts is None else num_prompts
    for repeat in range(-config.warmup, config.repeats):
        for size in config.batch_sizes:
            for number, prompts in enumerate(batches(count, size, num_prompts)):
                if repeat < 0 < number:
                    continue
                for place, temperature in enumerate(config.temperatures):
                    shift = number + repeat + place
                    yield Turn(repeat, temperature, prompts, rotated(settings, shift), rotated(trees, shift))
