"""Options of the plan. Nothing here needs torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specinfer.bench.options import (
    AnyPrompt,
    SharedSettings,
    bench_params,
    check_whole,
    parse_numbers,
)
from specinfer.core.config import DType, KVCacheDType, Offload, OffloadConfig, Quantization, check_device
from specinfer.core.options import check_settings, setting, setting_of
from specinfer.core.sampling import SamplingParams
from specinfer.engine_args import EngineArgs

MAX_RANKS = 8


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Published peak rates of a GPU.

    Attributes:
        bandwidth: Bytes of memory per second.
        flops: Dense bfloat16 operations per second.
        memory: Bytes.
        num_cores: Multiprocessors.
        has_dependent_launches: Whether a kernel can launch during the one before (compute capability 9.0 and higher).
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    num_cores: int
    has_dependent_launches: bool = True


ACCELERATORS = {
    "a100": Accelerator("NVIDIA A100 SXM 80 GB", 2.04e12, 312e12, 80e9, 108, has_dependent_launches=False),
    "h100": Accelerator("NVIDIA H100 SXM", 3.35e12, 989e12, 80e9, 132),
    "h200": Accelerator("NVIDIA H200 SXM", 4.8e12, 989e12, 141e9, 132),
    "4090": Accelerator("NVIDIA GeForce RTX 4090", 1.01e12, 165e12, 24e9, 128, has_dependent_launches=False),
    "5090": Accelerator("NVIDIA GeForce RTX 5090", 1.79e12, 210e12, 32e9, 170),
}


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """Options of the plan.

    Attributes:
        batch_sizes: Numbers of requests that run together.
        prompts: Texts or token ids to continue in place of the held-out texts.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    model: str = "demo"
    drafters: str | tuple[str, ...] = setting_of(EngineArgs, "drafters")
    acceptance: tuple[float, ...] | None = setting(
        None,
        "Speculation",
        "Acceptance rates of the first, second, ... child of a node, such as 0.7,0.1,0.05. (default: measured)",
        metavar="P,P",
        read=lambda text: parse_numbers("acceptance", text),
    )
    num_prompts: int = setting(
        10, "Sampling", "Number of chat prompts, or of held-out texts, for measuring acceptance.", low=1
    )
    max_tokens: int = setting(48, "Sampling", "Number of tokens to generate for each prompt.", low=2)
    temperature: float = setting(0.0, "Sampling", "Temperature; 0 is greedy.")
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    remeasure: bool = setting(False, "Speculation", "Measure costs again instead of using those of the last 30 days.")
    dtype: DType = setting_of(EngineArgs, "dtype")
    quantization: Quantization | None = setting_of(EngineArgs, "quantization")
    drafter_quantization: Quantization | None = setting_of(EngineArgs, "drafter_quantization")
    drafter_token_map: int | str | Path = setting_of(EngineArgs, "drafter_token_map")
    drafter_window: str = setting_of(EngineArgs, "drafter_window")
    kv_cache_dtype: KVCacheDType = setting_of(EngineArgs, "kv_cache_dtype")
    batch_invariant: bool = setting_of(EngineArgs, "batch_invariant")
    device: str = setting(
        "auto",
        "Model",
        "Device of the models: auto, cpu, cuda, cuda:1, ...; or a GPU that need not be here, for which the plan is "
        f"computed from its published rates: {', '.join(ACCELERATORS)}.",
    )
    grow: str | None = setting(
        None,
        "Model",
        "Number of parameters that the target is taken to have on a GPU that need not be here, such as 7b: "
        "Llama, Qwen 2 and 3, Gemma 3.",
        metavar="SIZE",
    )
    context: int = setting(
        1024,
        "Model",
        "Tokens in the KV cache of each request, for a GPU that need not be here.",
        low=1,
        high=2**20,
    )
    offload: Offload | None = setting_of(EngineArgs, "offload")
    memory_budget: int | str | None = setting_of(EngineArgs, "memory_budget")
    offload_folder: str | None = setting_of(EngineArgs, "offload_folder")
    seed: int = setting_of(SharedSettings, "seed")
    prompts: tuple[AnyPrompt, ...] | None = None
    json: str | Path | None = setting_of(SharedSettings, "json")
    plot: str | Path | None = setting_of(SharedSettings, "plot")

    def __post_init__(self) -> None:
        check_settings(self)
        for size in self.batch_sizes or (0,):
            check_whole("batch_sizes", size, 1, 4096)
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
