"""What a run on streamed targets is asked for, and which batches it runs in which order."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specinfer.bench.inputs import (
    AnyPrompt,
    check_distinct,
    check_dtype,
    check_prompts,
    check_seed,
    check_trees,
    check_whole,
)
from specinfer.bench.peers.names import parse_peer
from specinfer.bench.report import PLAIN
from specinfer.config import OFFLOADS, check_quantization, parse_select, parse_size
from specinfer.errors import check_float
from specinfer.sampling import MAX_SEED, SamplingParams

_MAX_BATCH = 1024
_WARMUP_TOKENS = 12  # said for each prompt by a run that does not count


@dataclass(frozen=True, slots=True)
class OffloadBenchConfig:
    """What to measure. Plain decoding of the streamed target is always one of the arms.

    Attributes:
        model: A local folder, a hub name, or "demo".
        drafters: "auto", or folders, hub names, "ngram" and "suffix".
        trees: Each an arm: "auto", children per level such as "1,1,3,1", or "best-first:64".
        peers: Other engines to measure beside, one request at a time: "accelerate", "accelerate-cpu", "llama.cpp",
            "llama.cpp-draft", each perhaps with a type of weights.
        grow: Size to grow the target to, such as "3b"; drafters grow to a hundredth of that. Llama models only.
        dtype: "auto" is the checkpoint's, or bfloat16 for grown models.
        quantization: "int8", "int4" or "fp8" for the target; None leaves it as it is.
        drafter_quantization: The same for drafters that are models.
        select: Which drafters that are models guess, as the option of this name.
        offload: Where the layers lie that do not stay: "disk", or "cpu", in host memory, for a target on a GPU.
        memory_budget: What our process may hold, and each peer's, in bytes or as "2GiB"; None: a third of the bytes of
            the target's weights.
        offload_folder: Where the packed copy of the layers is kept; None: they are read from the model's own files.
        cap_own: Hold our process to the budget by the operating system too, as the peers.
        check_resident: Load the target whole afterwards, and compare what it says.
        batch_sizes: Numbers of requests that run together.
        temperatures: Each arm runs at each; 0 is greedy.
        num_prompts: Held-out texts for each batch size, in as many batches as they fill; a batch larger than this
            has as many as it holds.
        max_tokens: Tokens said for each, also by peers that speculate; the end-of-text token does not end them.
        peer_tokens: Tokens said by peers that say one a pass.
        repeats: Measured runs of each arm on each batch.
        warmup: Short runs of each arm on the first batch of each size before that, which do not count.
        disk_seconds: How long the disk is read in each of two ways, or copied to the device, before and after each arm.
        prompt_chars: About how long the held-out texts are.
        prompts: Texts or token ids to continue in place of the held-out texts.
        json: File to write the numbers to.
        plot: File to draw them to; its suffix is the format.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    model: str = "demo"
    drafters: str | tuple[str, ...] = "auto"
    trees: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = ()
    grow: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    drafter_quantization: str | None = None
    select: str = "all"
    device: str = "auto"
    offload: str = "disk"
    memory_budget: int | str | None = None
    offload_folder: str | Path | None = None
    cap_own: bool = False
    check_resident: bool = False
    batch_sizes: tuple[int, ...] = (1, 16)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_prompts: int = 4
    max_tokens: int = 32
    peer_tokens: int = 8
    repeats: int = 1
    warmup: int = 1
    disk_seconds: float = 1.0
    seed: int = 0
    prompt_chars: int = 400
    prompts: tuple[AnyPrompt, ...] | None = None
    json: str | Path | None = None
    plot: str | Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("max_tokens", 2), ("peer_tokens", 2), ("repeats", 1), ("warmup", 0),
                            ("prompt_chars", 1)):  # fmt: skip
            check_whole(name, getattr(self, name), least)
        check_distinct("batch_sizes", self.batch_sizes, _MAX_BATCH)
        check_seed(self.seed)
        check_dtype(self.dtype)
        check_quantization("quantization", self.quantization)
        check_quantization("drafter_quantization", self.drafter_quantization)
        check_trees(self.trees)
        parse_select(self.select)
        check_prompts(self.prompts)
        check_float("disk_seconds", self.disk_seconds, 0, 3600, low_open=True)
        if self.offload not in OFFLOADS:
            raise ValueError(f"offload must be one of {', '.join(OFFLOADS)}, not {self.offload!r}")
        if self.memory_budget is not None:
            parse_size("memory_budget", self.memory_budget)
        if self.offload_folder is not None and not str(self.offload_folder):
            raise ValueError("offload_folder: an empty name; name a folder, or leave it out")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            given = ", ".join(map(str, self.temperatures)) or "none"
            raise ValueError(f"temperatures: {given} given; give at least one, and none twice")
        for peer in self.peers:
            parse_peer(peer, "float32", "offload")
        if self.peers and 1 not in self.batch_sizes:
            raise ValueError("peers: they are measured one request at a time; add 1 to batch_sizes, or leave them out")
        if self.prompts is not None and len(self.prompts) < self.largest:
            raise ValueError(
                f"prompts: {len(self.prompts)} given for {self.largest} requests together; give as many, or lower "
                "batch_sizes"
            )
        for temperature in self.temperatures:
            self.sampling_params(0, temperature)

    @property
    def largest(self) -> int:
        return max(self.batch_sizes)

    def sampling_params(self, prompt: int, temperature: float, most: int | None = None) -> SamplingParams:
        """The same for every arm, batch and repeat of a prompt; `most` tokens, if that is fewer."""
        return SamplingParams(
            temperature=temperature,
            max_tokens=self.max_tokens if most is None else min(self.max_tokens, most),
            seed=(self.seed + prompt) & MAX_SEED,
            ignore_eos=True,
        )


class Turn(NamedTuple):
    """One batch that all arms run, one after the other, in this order."""

    repeat: int  # negative: does not count
    temperature: float
    prompts: tuple[int, ...]
    arms: tuple[str, ...]  # peers among them, if it is a batch of one

    @property
    def most_tokens(self) -> int | None:
        """None: as many as are asked for."""
        return None if self.repeat >= 0 else _WARMUP_TOKENS


def schedule(config: OffloadBenchConfig, num_prompts: int, peers: Sequence[str] = ()) -> Iterator[Turn]:
    """All batches at all temperatures, repeat by repeat, so that a machine that slows down slows all of them.

    Peers warm up by themselves.
    """
    own = (PLAIN, *config.trees)
    for repeat in range(-config.warmup, config.repeats):
        for size in config.batch_sizes:
            names = (*own, *peers) if repeat >= 0 and size == 1 else own
            num_batches = math.ceil((config.num_prompts if config.prompts is None else num_prompts) / size)
            for batch in range(num_batches if repeat >= 0 else 1):
                # There are as many prompts as the largest batch holds, so none is in a batch twice.
                prompts = tuple((batch * size + i) % num_prompts for i in range(size))
                for place, temperature in enumerate(config.temperatures):
                    # Each arm comes first in its turn, for any number of batches and repeats.
                    shift = (batch + repeat + place) % len(names)
                    yield Turn(repeat, temperature, prompts, (*names[shift:], *names[:shift]))
