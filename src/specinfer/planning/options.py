"""Options of the plan. Nothing here needs torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specinfer.bench.options import AnyPrompt, bench_params, check_models, check_seed, check_whole
from specinfer.core.config import OffloadConfig, check_device
from specinfer.core.sampling import SamplingParams

MAX_RANKS = 8


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Published peak rates of a GPU.

    Attributes:
        bandwidth: Bytes of memory per second.
        flops: Dense bfloat16 operations per second.
        memory: Bytes.
        has_dependent_launches: Whether a kernel can launch during the one before (compute capability 9.0 and higher).
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    has_dependent_launches: bool = True


ACCELERATORS = {
    "a100": Accelerator("NVIDIA A100 SXM 80 GB", 2.04e12, 312e12, 80e9, has_dependent_launches=False),
    "h100": Accelerator("NVIDIA H100 SXM", 3.35e12, 989e12, 80e9),
    "h200": Accelerator("NVIDIA H200 SXM", 4.8e12, 989e12, 141e9),
    "4090": Accelerator("NVIDIA GeForce RTX 4090", 1.01e12, 165e12, 24e9, has_dependent_launches=False),
    "5090": Accelerator("NVIDIA GeForce RTX 5090", 1.79e12, 210e12, 32e9),
}


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """Options of the plan.

    Attributes:
        model: A local folder, a hub name, or "demo".
        drafters: "auto", or folders, hub names, "ngram" and "suffix".
        acceptance: Probability that the first, second, ... proposed token at a node is the target's, or None to
            measure it.
        num_prompts: Held-out texts to measure acceptance on.
        max_tokens: Tokens generated for each text.
        temperature: Sampling temperature of these tokens; 0 is greedy.
        batch_sizes: Numbers of requests that run together.
        device: Device of the models, or one of `ACCELERATORS`, for which the plan follows from its published rates.
        grow: With such a GPU, number of parameters that the target is taken to have, such as "7b", or None.
        context: With such a GPU, number of tokens in the KV cache of each request.
        quantization: "int8", "int4" or "fp8" for the target, or None for no quantization.
        drafter_quantization: The same for draft models.
        kv_cache_dtype: Type of keys and values, one of `KV_CACHE_DTYPES`.
        offload: "disk" or "cpu", from which the target's layers are streamed, or None for no offloading.
        memory_budget: With `offload`, memory that the process may use, in bytes or as "2GiB", or None for most of the
            available memory.
        offload_folder: With `offload`, folder for a packed copy of the layers.
        remeasure: Whether to time passes again and ignore cached costs.
        prompts: Texts or token ids to continue in place of the held-out texts.
        json: File to write the numbers to.
        plot: File to draw the plot to. Its suffix is the format.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    model: str = "demo"
    drafters: str | tuple[str, ...] = "auto"
    acceptance: tuple[float, ...] | None = None
    num_prompts: int = 4
    max_tokens: int = 48
    temperature: float = 0.0
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    remeasure: bool = False
    dtype: str = "auto"
    quantization: str | None = None
    drafter_quantization: str | None = None
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    grow: str | None = None
    context: int = 1024
    offload: str | None = None
    memory_budget: int | str | None = None
    offload_folder: str | None = None
    seed: int = 0
    prompts: tuple[AnyPrompt, ...] | None = None
    json: str | Path | None = None
    plot: str | Path | None = None

    def __post_init__(self) -> None:
        check_whole("num_prompts", self.num_prompts, 1)
        check_whole("max_tokens", self.max_tokens, 2)
        check_seed(self.seed)
        for size in self.batch_sizes or (0,):
            check_whole("batch_sizes", size, 1, 4096)
        check_models(self)
        check_whole("context", self.context, 1, 2**20)
        check_device(self.device, ACCELERATORS)
        if self.device not in ACCELERATORS:
            if self.grow is not None:
                raise ValueError(f"grow: it needs the name of a GPU as device: {', '.join(ACCELERATORS)}")
        elif self.offload is not None:
            raise ValueError(f"offload: it is not predicted for device {self.device!r}; leave it out")
        OffloadConfig(self.offload, self.memory_budget, self.offload_folder)
        if self.acceptance is not None:
            _check_acceptance(self.acceptance)
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        return bench_params(self.temperature, self.max_tokens, self.seed)


def _check_acceptance(chances: Sequence[float]) -> None:
    usable = 1 <= len(chances) <= MAX_RANKS and all(0 <= chance <= 1 for chance in chances)
    if not usable or sum(chances) > 1 + 1e-9:
        raise ValueError(
            f"acceptance: {', '.join(map(str, chances)) or 'nothing'} given; give chances of the first to at most the "
            f"{MAX_RANKS}th guess, each from 0 to 1 and together at most 1, such as 0.7,0.1,0.05"
        )
