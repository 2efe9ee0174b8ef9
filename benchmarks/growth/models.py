"""Copies of models grown to a realistic size.

A grown model generates the same tokens as the small one it was made from, at the cost of its new size. Copies are kept
in the user's cache. A drafter grows in width only, to a hundredth of the target's parameters, so that the ratio of the
two costs is that of real pairs. A head gets layers like the target's, as real heads have. Files grow to files.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.growth.gguf_files import grow_file, grown_bytes
from benchmarks.growth.heads import GROWABLE, grow_head, grown_parameters, head_shape
from benchmarks.growth.targets import grow_folder
from specinfer.bench.loop import Prepare
from specinfer.bench.models import Models
from specinfer.core.files import cache_folder
from specinfer.core.lookups import reserved_names
from specinfer.model.definition import load_config
from specinfer.model.device import DTYPES
from specinfer.model.folder import TOKEN_MAP
from specinfer.model.gguf.folder import weights_file
from specinfer.model.heads.load import find_format
from specinfer.planning.growth_shape import Shape, drafter_shape, parameters_of, shape_for, shape_of

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Growth:
    """Folder to grow, with the shape and the destination of its copy."""

    source: Path
    shape: Shape
    destination: Path
    dtype: torch.dtype
    targets: tuple[Shape, Shape] | None = None  # shapes of a head's target before and after its growth

    @property
    def num_bytes(self) -> int:
        """Bytes of weights to write, or 0 if the copy exists already."""
        if self.destination.exists():
            return 0
        if self.targets is not None:
            return grown_parameters(self.source, self.shape) * self.dtype.itemsize
        if weights_file(self.source) is not None:
            return grown_bytes(self.source, self.shape)
        return parameters_of(self.shape, load_config(self.source)) * self.dtype.itemsize

    def make(self, device: torch.device) -> Path:
        """Make the grown folder with weights computed on a device, unless it exists, and return it."""
        if self.targets is not None:
            return grow_head(self.source, self.destination, *self.targets, dtype=self.dtype)
        if weights_file(self.source) is not None:
            return grow_file(self.source, self.destination, self.shape)
        return grow_folder(self.source, self.destination, self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """Models to grow before a measurement can load them. Growing is slow, planning is not."""

    models: Models
    growths: Mapping[str, Growth]  # by the folder's name in `models`

    def make(self, device: torch.device = _CPU) -> Models:
        made = {name: str(growth.make(device)) for name, growth in self.growths.items()}
        target = str(self.models.target)
        return Models(Path(made.get(target, target)), tuple(made.get(name, name) for name in self.models.drafters))


def plan_growth(models: Models, size: str, dtype: str) -> GrowthPlan:
    """Return a plan to grow the target to `size` ("1b"), its heads with it, and smaller drafters to a hundredth of it.

    Raises:
        ValueError: The size is unknown or not reachable, or a model cannot grow. Nothing was written.
    """
    config, kind = load_config(models.target), DTYPES[dtype]
    assert isinstance(kind, torch.dtype), "auto is for the caller to decide"

    def keeps_width(folder: Path) -> bool | None:
        return True if weights_file(folder) is not None else None

    def growth(folder: Path, shape: Shape, name: str = size, targets: tuple[Shape, Shape] | None = None) -> Growth:
        return Growth(folder, shape, _destination(folder, name, kind), kind, targets)

    try:
        shape = shape_for(size, config, keeps_width=keeps_width(models.target))
        growths = {str(models.target): growth(models.target, shape)}
        for name in models.drafters:
            # A drafter with a token map has a reduced vocabulary, and is not grown.
            if name in reserved_names() or (Path(name) / TOKEN_MAP).is_file():
                continue
            if (head := find_format(Path(name))) is not None:
                if head not in GROWABLE:
                    raise ValueError(f"{name} ({head}) fits the model as it is; leave grow out, or name a small model")
                if len(set(getattr(config, "layer_types", None) or ())) > 1:
                    raise ValueError(f"{name} reads layers of several kinds; leave grow out, or name a small model")
                targets = shape_of(config), shape
                growths[name] = growth(Path(name), head_shape(Path(name), *targets), targets=targets)
            else:
                own, keeps = load_config(Path(name)), keeps_width(Path(name))
                if (wider := drafter_shape(shape, config, own, keeps_width=keeps)) is not None:
                    growths[name] = growth(Path(name), wider, f"{parameters_of(wider, own) / 1e6:.2f}m")
    except ValueError as error:
        raise ValueError(f"grow: {error}") from error
    return GrowthPlan(models, growths)


def growing(size: str | None) -> Prepare | None:
    """Return the function that grows the models of a measurement, or None if they are measured as they are.

    Weights are computed on the device of the measurement: in seconds on a GPU, in minutes on a CPU. The dtype "auto" is
    bfloat16, but of GGUF files their own.
    """
    if size is None:
        return None

    def prepare(models: Models, dtype: str, device: torch.device, report: Callable[[str], None]) -> tuple[Models, str]:
        report(f"growing to {size}")
        made = "bfloat16" if dtype == "auto" else dtype
        is_file = weights_file(models.target) is not None
        return plan_growth(models, size, made).make(device), dtype if is_file else made

    return prepare


def _destination(source: Path, size: str, dtype: torch.dtype) -> Path:
    """Return the folder of a grown copy in the user's cache, one for each source folder, size and dtype."""
    key = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]
    kind = str(dtype).removeprefix("torch.")
    return cache_folder() / f"grown-{source.name}-{size.lower()}-{kind}-{key}"
