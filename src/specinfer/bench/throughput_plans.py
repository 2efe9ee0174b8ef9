"""Configuration of a throughput run, and the order of its batches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specinfer.bench.chat_prompts import check_kinds
from specinfer.bench.inputs import (
    AnyPrompt,
    check_distinct,
    check_dtype,
    check_prompts,
    check_seed,
    check_trees,
    check_whole,
)
from specinfer.bench.report import PLAIN
from specinfer.core.config import check_quantization, parse_select
from specinfer.core.parallel_config import ParallelConfig
from specinfer.core.sampling import MAX_SEED, SamplingParams

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_MAX_BATCH = 1024


@dataclass(frozen=True, slots=True)
class ThroughputConfig:
    """Options of the benchmark. Plain decoding is always measured.

    Attributes:
        model: A local folder, a hub name, or "demo".
        drafters: "auto", or folders, hub names, "ngram" and "suffix".
        trees: Trees, each of which is an arm: "auto", children per level such as "1,1,3,1", or "best-first:16".
        grow: Size to grow the target to, such as "1b"; drafters grow to a hundredth of that. Llama models only.
        dtype: "auto" for the checkpoint's dtype, or bfloat16 for grown models.
        quantization: "int8", "int4" or "fp8" for the target, or None for no quantization.
        drafter_quantization: The same for draft models.
        select: Selection of the draft models that propose tokens, as in the option of this name.
        scheduler: Scheduler file written by `specinfer tune --policy`, which then chooses for the tree "auto".
        tensor_parallel_size, pipeline_parallel_size: Ranks that the target is split over, all on this machine.
        batch_sizes: Numbers of requests that run together.
        num_prompts: Held-out texts or chat prompts for each batch size, in as many batches as they fill. A batch size
            larger than this uses as many prompts as the batch holds.
        max_tokens: Tokens generated for each prompt. The end-of-text token does not end the output, but answers to
            chat prompts are no longer than those of plain decoding.
        kinds: Kinds of chat prompts to answer. With None, the prompts are of all kinds if the model is "demo-chat",
            and otherwise texts to continue.
        temperature: Sampling temperature; 0 is greedy.
        repeats: Measured runs of each arm on each batch.
        warmup: Unmeasured runs of each arm on the first batch of each size before the measured ones.
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
    grow: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    drafter_quantization: str | None = None
    select: str = "all"
    scheduler: str | Path | None = None
    device: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    num_prompts: int = 8
    max_tokens: int = 64
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
        check_distinct("batch_sizes", self.batch_sizes, _MAX_BATCH)
        check_seed(self.seed)
        check_dtype(self.dtype)
        ParallelConfig(self.tensor_parallel_size, self.pipeline_parallel_size)
        check_quantization("quantization", self.quantization)
        check_quantization("drafter_quantization", self.drafter_quantization)
        check_trees(self.trees)
        parse_select(self.select)
        check_prompts(self.prompts)
        check_kinds(self.kinds, self.prompts)
        if self.prompts is not None and len(self.prompts) < self.largest:
            raise ValueError(
                f"prompts: {len(self.prompts)} given for {self.largest} requests together; give as many, or lower "
                "batch_sizes"
            )
        self.sampling_params(0)

    @property
    def largest(self) -> int:
        return max(self.batch_sizes)

    def sampling_params(self, prompt: int) -> SamplingParams:
        """Return the sampling parameters of a prompt, the same for every arm, batch and repeat."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=(self.seed + prompt) & MAX_SEED,
            ignore_eos=True,
        )


class Turn(NamedTuple):
    """One batch, which all arms run one after the other in this order."""

    repeat: int  # negative for warm-up
    prompts: tuple[int, ...]
    arms: tuple[str, ...]


def schedule(config: ThroughputConfig, num_prompts: int) -> Iterator[Turn]:
    """Yield all batches of all sizes, repeat by repeat, so that a slower machine affects all sizes alike."""
    names = (PLAIN, *config.trees)
    for repeat in range(-config.warmup, config.repeats):
        for size in config.batch_sizes:
            num_batches = math.ceil((config.num_prompts if config.prompts is None else num_prompts) / size)
            for batch in range(num_batches if repeat >= 0 else 1):
                # There are at least as many prompts as the largest batch holds, so a batch has no prompt twice.
                prompts = tuple((batch * size + i) % num_prompts for i in range(size))
                # Adding the repeat changes the order from repeat to repeat for any number of batches.
                shift = (batch + repeat) % len(names)
                yield Turn(repeat, prompts, (*names[shift:], *names[:shift]))
