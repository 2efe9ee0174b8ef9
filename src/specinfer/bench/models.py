"""Model folders that a measurement loads: the requested ones, or copies of them grown to a realistic size.

A grown model generates the same tokens as the small one it was made from, at the cost of its new size. Copies are kept
in the user's cache. A drafter grows in width only, to a hundredth of the target's parameters, so that the ratio of the
two costs is that of real pairs. An EAGLE-3 head gets layers like the target's, as real heads have.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specinfer.bench.grow import grow_folder
from specinfer.bench.grow_head import GROWABLE, grow_head, grown_parameters, head_shape
from specinfer.bench.shape import Shape, shape_for, shape_of
from specinfer.core.config import OffloadConfig, parse_drafters
from specinfer.core.files import cache_folder
from specinfer.core.lookups import reserved_names
from specinfer.model.definition import load_config
from specinfer.model.device import DTYPES, find_device
from specinfer.model.folder import TOKEN_MAP, count_parameters
from specinfer.model.heads.load import find_format
from specinfer.policy.offload_choice import usual_copy
from specinfer.setup.model_names import find_drafter, find_target, usual_drafters

_DRAFTER_FRACTION = 0.01
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
        return _num_parameters(self.shape, load_config(self.source)) * self.dtype.itemsize

    def make(self, device: torch.device) -> Path:
        """Make the grown folder with weights computed on a device, unless it exists, and return it."""
        if self.targets is not None:
            return grow_head(self.source, self.destination, *self.targets, dtype=self.dtype)
        return grow_folder(self.source, self.destination, self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Models:
    """Folder of the target, and for each drafter its folder, or a name that stands for none."""

    target: Path
    drafters: tuple[str, ...]

    @property
    def drafter_parameters(self) -> dict[str, int]:
        """Number of parameters of each drafter by its name; 0 for one without weights of its own."""
        return {
            Path(name).name: 0 if name in reserved_names() else count_parameters(Path(name)) for name in self.drafters
        }


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """Models to grow before a measurement can load them. Growing is slow, planning is not."""

    models: Models
    growths: Mapping[str, Growth]  # by the folder's name in `models`

    def make(self, device: torch.device = _CPU) -> Models:
        made = {name: str(growth.make(device)) for name, growth in self.growths.items()}
        target = str(self.models.target)
        return Models(Path(made.get(target, target)), tuple(made.get(name, name) for name in self.models.drafters))


def find_models(
    model: str,
    drafters: str | tuple[str, ...],
    offload: OffloadConfig | None = None,
    quantization: str | None = None,
    device: str = "auto",
) -> Models:
    """Return the folders of the target and its drafters. "auto" chooses the same drafters as `LLM`.

    Args:
        offload: Settings of a streamed target, or None.
        quantization: What the target's weights are rounded to, or None.
        device: Where they are.

    Raises:
        ModelError: A model cannot be found.
        ValueError: The list of drafters is malformed or empty.
    """
    names = parse_drafters(drafters)
    if names == ():
        raise ValueError('drafters: empty, and trees need at least one; use "auto", "ngram" or a model')
    target = find_target(model)
    if names is None:
        offload = offload or OffloadConfig()
        place = find_device(device)
        copy = usual_copy(target, offload, quantization, place)
        names = usual_drafters(model, target, place, small_models=offload.offload is None, copy=copy).names
    folders = tuple(name if name in reserved_names() else str(find_drafter(name)) for name in names)
    return Models(target, folders)


def plan_growth(models: Models, size: str, dtype: str) -> GrowthPlan:
    """Return a plan to grow the target to `size` ("1b"), its heads with it, and smaller drafters to a hundredth of it.

    Raises:
        ValueError: The size is unknown or not reachable, or a model is not a Llama. Nothing was written.
    """
    config, kind = load_config(models.target), DTYPES[dtype]
    assert isinstance(kind, torch.dtype), "auto is for the caller to decide"
    try:
        shape = shape_for(size, config)
        growths = {str(models.target): Growth(models.target, shape, _destination(models.target, size, kind), kind)}
        wanted = _DRAFTER_FRACTION * _num_parameters(shape, config)
        for name in models.drafters:
            # A drafter with a token map has a reduced vocabulary, and is not grown.
            if name in reserved_names() or (Path(name) / TOKEN_MAP).is_file():
                continue
            if (head := find_format(Path(name))) is not None:
                if head not in GROWABLE:
                    raise ValueError(f"{name} ({head}) fits the model as it is; leave grow out, or name a small model")
                targets = shape_of(config), shape
                place = _destination(Path(name), size, kind)
                growths[name] = Growth(Path(name), head_shape(Path(name), *targets), place, kind, targets)
            elif growth := _drafter_growth(Path(name), wanted, kind):
                growths[name] = growth
    except ValueError as error:
        raise ValueError(f"grow: {error}") from error
    return GrowthPlan(models, growths)


def at_size(models: Models, size: str | None, dtype: str, device: torch.device = _CPU) -> tuple[Models, str]:
    """Return the models, grown to `size` if it is given, and the dtype to load them in.

    Args:
        device: Device that computes the new weights. It takes seconds on a GPU and minutes on a CPU.

    Raises:
        ValueError: The models cannot be grown, as for `plan_growth`.
    """
    if size is None:
        return models, dtype
    dtype = "bfloat16" if dtype == "auto" else dtype
    return plan_growth(models, size, dtype).make(device), dtype


def dtype_of(folder: Path, name: str) -> torch.dtype:
    """Return the dtype that a folder's model is loaded in; "auto" is the checkpoint's own."""
    kind = DTYPES[name]
    own = load_config(folder).dtype if kind == "auto" else kind
    return own if isinstance(own, torch.dtype) else torch.float32


def _drafter_growth(folder: Path, wanted: float, dtype: torch.dtype) -> Growth | None:
    """Return how to grow a drafter, or None if it already has `wanted` parameters."""
    config = load_config(folder)
    old = shape_of(config)
    if _num_parameters(old, config) >= wanted:
        return None
    size = f"{math.ceil(wanted / 1e4) / 100:g}m"
    shape = shape_for(size, config, num_layers=old.num_layers)
    return Growth(folder, shape, _destination(folder, size, dtype), dtype)


def _num_parameters(shape: Shape, config: Any) -> int:
    return shape.num_parameters(config.vocab_size, config.head_dim, config.tie_word_embeddings)


def _destination(source: Path, size: str, dtype: torch.dtype) -> Path:
    """Return the folder of a grown copy in the user's cache, one for each source folder, size and dtype."""
    key = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]
    kind = str(dtype).removeprefix("torch.")
    return cache_folder() / f"grown-{source.name}-{size.lower()}-{kind}-{key}"
