"""Sizes of the models to measure, and a check that the files fit on the disk to be written first."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.offload.plans import OffloadBenchConfig
from benchmarks.peers.names import LIBRARIES, parse_peer
from benchmarks.peers.race import gguf_place
from specinfer.bench.models import GrowthPlan, Models
from specinfer.core.files import cache_folder
from specinfer.core.lookups import reserved_names
from specinfer.model.folder import count_parameters

_QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.5, "fp8": 1.0}  # approximate bytes of a weight
_DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_GGUF_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
_SPARE_BYTES = 2**28  # left free for other programs
_LEAST_BYTES = 2**20  # smallest file that is useful to time the disk with


class Need(NamedTuple):
    """Bytes that must be written to a folder because of an option."""

    field: str
    place: Path
    num_bytes: int


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def weight_bytes(folder: Path, dtype: str, quantization: str | None) -> int:
    """Return the approximate bytes of all weights in memory; the dtype "auto" is that of the files."""
    if quantization is None and dtype == "auto":
        return _on_disk(folder)
    each = _QUANTIZED_BYTES[quantization] if quantization else _DTYPE_BYTES[dtype]
    return int(each * count_parameters(folder))


def streamed_files(config: OffloadBenchConfig, target: Path) -> list[Path]:
    """Return the files that layers are read from: the packed copy if there is one, else the model's own."""
    copies = [] if config.offload_folder is None else [p for p in Path(config.offload_folder).rglob("*") if p.is_file()]
    large = [path for path in copies if path.stat().st_size >= _LEAST_BYTES]
    return sorted(large) or sorted(copies) or weight_files(target)


def needs_of(config: OffloadBenchConfig, models: Models, plan: GrowthPlan | None, dtype: str) -> list[Need]:
    """Return the files that do not exist yet: grown models, GGUF files, the packed copy.

    Args:
        dtype: Data type that models are loaded in.
    """
    growths = {} if plan is None else plan.growths
    folders = [str(models.target), *(name for name in models.drafters if name not in reserved_names())]
    sizes: dict[Path, int] = {}  # of each model as it will be measured, the target first
    for name in folders:
        growth = growths.get(name)
        folder = Path(name) if growth is None else growth.destination
        sizes[folder] = weight_bytes(folder, dtype, None) if growth is None else growth.num_bytes or _on_disk(folder)
    target = next(iter(sizes))
    needs = [Need("grow", cache_folder(), sum(growth.num_bytes for growth in growths.values()))]
    files: dict[Path, int] = {}
    for name in config.peers:
        peer = parse_peer(name, "bfloat16" if dtype == "auto" else dtype, "offload")
        if LIBRARIES[peer.library].needs_gguf and LIBRARIES[peer.library].missing() is None:
            each = _GGUF_BYTES[peer.weights] / (4 if dtype == "float32" else 2)
            for folder, size in list(sizes.items())[: 2 if peer.has_drafter else 1]:
                if not folder.exists() or not gguf_place(folder, peer.weights).exists():
                    files[folder / peer.weights] = int(each * size)
    needs.append(Need("peers", cache_folder(), sum(files.values())))
    if config.offload_folder is not None and not any(Path(config.offload_folder).glob("*")):
        share = 1.0 if config.quantization is None else _QUANTIZED_BYTES[config.quantization] / 2
        needs.append(Need("offload_folder", Path(config.offload_folder), int(share * sizes[target])))
    return [need for need in needs if need.num_bytes]


def _on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder))


def check_room(needs: Sequence[Need]) -> None:
    """Check that all of these files fit onto the disks.

    Raises:
        ValueError: The files do not fit. The message names the first option that needs too much.
    """
    taken: dict[int, int] = {}
    for need in needs:
        place = next(parent for parent in (need.place.absolute(), *need.place.absolute().parents) if parent.exists())
        device = os.stat(place).st_dev
        free = shutil.disk_usage(place).free - _SPARE_BYTES - taken.get(device, 0)
        if need.num_bytes > free:
            raise ValueError(
                f"{need.field}: {need.num_bytes / 1e9:.1f} GB would be written to {need.place}, and "
                f"{max(free, 0) / 1e9:.1f} GB are free there; free some, or choose another place (XDG_CACHE_HOME "
                "moves what is cached)"
            )
        taken[device] = taken.get(device, 0) + need.num_bytes
