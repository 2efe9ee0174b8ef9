"""The settings of a target that all ranks share, and the loading of one rank's shard."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from specinfer.core.config import EngineConfig, OffloadConfig, check_quantization
from specinfer.core.parallel_config import Place
from specinfer.core.progress import ProgressCallback
from specinfer.model.device import DTYPES, check_gpu, find_device, find_kv_dtype
from specinfer.model.folder import TOKEN_MAP
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.offload.budget import Budget, PassCapacity, settle, usual_budget
from specinfer.parallel.group import ShardSpec
from specinfer.parallel.ranks import Connections


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """A target and its limits, in a form that can be sent between processes.

    Attributes:
        folder: Path on this machine.
        device: Name as on the command line.
        limits: Limits of the cache, for each rank.
        copies: The target's own copies that draft, by names of `SELF_DRAFTERS`.
        kv_cache_dtype: Type of keys and values, one of `config.KV_CACHE_DTYPES`.
        enforce_eager: True to capture no passes.
        batch_invariant: True to compute each row with one order of sums, see `model/invariance.py`.

    Raises:
        ValueError: A field has an invalid value.
    """

    folder: str
    dtype: str
    device: str
    quantization: str | None
    offload: OffloadConfig
    limits: EngineConfig
    copies: tuple[str, ...] = ()
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        check_quantization("quantization", self.quantization)

    def as_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        if self.offload.offload_folder is not None:
            fields["offload"]["offload_folder"] = str(self.offload.offload_folder)
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "TargetConfig":
        offload, limits = OffloadConfig(**fields["offload"]), EngineConfig(**fields["limits"])
        return cls(**(fields | {"offload": offload, "limits": limits, "copies": tuple(fields["copies"])}))

    def wanted(self) -> dict[str, str]:
        """Return the values that must be the same on all ranks, by option name; folders and budgets may differ."""
        return {
            "model": digest(Path(self.folder)),
            "dtype": self.dtype,
            "device": torch.device(find_device(self.device)).type,
            "quantization": str(self.quantization),
            "kv_cache_dtype": self.kv_cache_dtype,
            "offload": str(self.offload.offload),
            "copies of the target": ", ".join(self.copies),
            "enforce_eager": str(self.enforce_eager),
            "batch_invariant": str(self.batch_invariant),
            "version of specinfer": installed_version(),
        }


def installed_version() -> str:
    """Return the version of this package."""
    try:
        return metadata.version("specinfer")
    except metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


def digest(folder: Path) -> str:
    """Return a digest that differs between models, without reading their weights."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    files = (*folder.glob("*.safetensors"), *folder.glob("*.gguf"))
    sizes = sorted((file.name, file.stat().st_size) for file in files)
    maps = [file.read_text(encoding="utf-8") for file in folder.glob(TOKEN_MAP)]
    text = json.dumps([config, sizes, *maps], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def rank_device(name: str, place: Place) -> torch.device:
    """Return the device of one of the ranks of a machine, which share its GPUs evenly.

    Raises:
        ValueError: There is no such device, or it names one GPU for several ranks.
    """
    device = find_device(name)
    if device.type == "cpu" or place.local_size == 1:
        return device
    if device.index is not None:
        raise ValueError(f'device: {name!r} is one GPU, and {place.local_size} ranks run here; say "cuda"')
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())


def load_shard(
    settings: TargetConfig, shard: ShardSpec, place: Place, progress: ProgressCallback | None = None
) -> LoadedModel:
    """Load one rank's shard; raises as `load_model` does."""
    return load_model(
        Path(settings.folder), DTYPES[settings.dtype], rank_device(settings.device, place), settings.quantization,
        offload=settings.offload, progress=progress, shard=shard, kv_dtype=find_kv_dtype(settings.kv_cache_dtype),
        num_sharing=place.local_size, max_model_len=settings.limits.max_model_len,
        batch_invariant=settings.batch_invariant,
    )  # fmt: skip


def connect_devices(settings: TargetConfig, connections: Connections, place: Place) -> None:
    """Let the GPUs of ranks connect before models are loaded, once it is known that they compute.

    Raises:
        ValueError: This rank's does not.
    """
    connections.connect(check_gpu(rank_device(settings.device, place)))


def with_rank_budget(settings: TargetConfig, place: Place) -> TargetConfig:
    """Return the settings with a memory budget if the target is streamed: ranks share what one process would take."""
    offload = settings.offload
    if offload.offload is None or offload.memory_budget is not None:
        return settings
    device = rank_device(settings.device, place)
    budget = usual_budget(device, num_sharing(device, place))
    return dataclasses.replace(settings, offload=dataclasses.replace(offload, memory_budget=budget))


def num_sharing(device: torch.device, place: Place) -> int:
    """Return the number of ranks that share a device's memory."""
    return place.local_size if device.type == "cpu" else -(-place.local_size // torch.cuda.device_count())


def settle_shard(target: LoadedModel, budget: Budget, cache_bytes: int, limits: EngineConfig) -> PassCapacity:
    """Keep as many layers of a streamed target in memory as the budget allows, see `settle`."""
    assert target.stream is not None
    known = limits.max_num_batched_tokens
    row = target.model.floats_per_token if isinstance(target.model, FusedDecoder) else None
    return settle(budget, target.stream, cache_bytes, known, limits.max_num_seqs, target.vocab_size, row)
