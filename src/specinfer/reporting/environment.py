"""Environment of a measurement, without which its numbers cannot be compared with others."""

import datetime
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from specinfer.core.systems import peak_memory
from specinfer.model.device import cpu_model
from specinfer.model.folder import count_parameters
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner, TargetRunner


class HasModels(Protocol):
    """The models of an engine: an `LLM`, for instance."""

    @property
    def target(self) -> TargetRunner: ...
    @property
    def small_models(self) -> Mapping[str, ModelRunner]: ...


@dataclass(frozen=True, slots=True)
class Environment:
    """Machine, software and models of one measurement.

    Attributes:
        quantization: Quantization of the target's weights; `drafter_quantization` is that of the model drafters.
        kv_cache_dtype: Type of the keys and values in the caches, or None if it is that of the computation.
        commit: Commit of the checkout this package runs from, with "-dirty" if files differ; None if it is installed.
        num_threads: CPU threads of this process, which is rank 0 if several hold the target.
        peak_memory: Peak memory of this process in bytes, with the weights and caches of every model.
        drafter_parameters: Number of parameters of each drafter by its name; 0 for one without weights next to the
            target's, such as a lookup.
    """

    date: str
    command: str
    commit: str | None
    specinfer: str
    torch: str
    transformers: str
    python: str
    cpu: str
    num_threads: int
    device: str
    dtype: str
    quantization: str | None
    drafter_quantization: str | None
    peak_memory: int
    target_parameters: int
    drafter_parameters: dict[str, int]
    kv_cache_dtype: str | None = None

    @classmethod
    def from_llm(cls, llm: HasModels, drafter_parameters: Mapping[str, int]) -> "Environment":
        """Return the current environment with these models."""
        quantization = next(
            (small.loaded.quantization or small.loaded.stored_types for small in llm.small_models.values()), None
        )
        return cls.from_model(llm.target.loaded, drafter_parameters, quantization)

    @classmethod
    def from_model(
        cls, loaded: LoadedModel, drafter_parameters: Mapping[str, int], drafter_quantization: str | None = None
    ) -> "Environment":
        on_gpu = loaded.device.type == "cuda"
        return cls(
            **surroundings(),
            device=torch.cuda.get_device_name(loaded.device) if on_gpu else loaded.device.type,
            dtype=str(loaded.dtype).removeprefix("torch."),
            quantization=loaded.quantization or loaded.stored_types,
            drafter_quantization=drafter_quantization,
            peak_memory=_peak_memory(loaded.device),
            target_parameters=loaded.num_parameters if loaded.shard.is_whole else count_parameters(loaded.folder),
            drafter_parameters=dict(drafter_parameters),
            kv_cache_dtype=None if loaded.kv_dtype is None else str(loaded.kv_dtype).removeprefix("torch."),
        )

    @property
    def precision(self) -> str:
        """Description of the computation dtype, the quantization of the weights, and the type of keys and values."""
        weights = f" with {self.quantization} weights" if self.quantization else ""
        others = (("drafters", self.drafter_quantization), ("KV cache", self.kv_cache_dtype))
        return self.dtype + weights + "".join(f", {what} {kind}" for what, kind in others if kind)

    @property
    def description(self) -> str:
        """Description of the target, its precision and its device, for titles of plots."""
        return f"{self.target_parameters / 1e6:,.0f} M parameters, {self.precision}, {self.device}"

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def surroundings() -> dict[str, Any]:
    """Return the fields that do not depend on the models."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "specinfer": importlib.metadata.version("specinfer"),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "num_threads": torch.get_num_threads(),
    }


def _peak_memory(device: torch.device) -> int:
    """Return peak memory in bytes: of tensors on a GPU, else of the process including mapped weights."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory()


def _commit() -> str | None:
    # An installed package may be inside another project's checkout, so only <root>/src/specinfer counts.
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=root, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
