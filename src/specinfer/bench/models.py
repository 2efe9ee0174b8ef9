"""Which folders a measurement loads: those asked for, or copies of them grown to a realistic size.

A grown model says the same as the small one it came from, at the cost of its new size. Copies are kept
in the user's cache. A drafter grows in width only, to a hundredth of the target's parameters, so that the
ratio of the two costs is that of real pairs.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specinfer.config import parse_drafters
from specinfer.drafters import LOOKUPS
from specinfer.model.definition import load_config
from specinfer.model.device import DTYPES
from specinfer.model.folder import TOKEN_MAP, weight_shapes
from specinfer.model.grow import grow_folder
from specinfer.model.shape import Shape, shape_for, shape_of
from specinfer.model_names import find_drafter, find_target, usual_drafters
from specinfer.places import cache_folder

_DRAFTER_FRACTION = 0.01
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Growth:
    """A folder to be grown, to which shape, and where the copy goes."""

    source: Path
    shape: Shape
    destination: Path
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its weights; 0 if they are there already."""
        if self.destination.exists():
            return 0
        return _num_parameters(self.shape, load_config(self.source)) * self.dtype.itemsize

    def make(self, device: torch.device) -> Path:
        """The grown folder, its weights made on a device; at once if it was made before."""
        return grow_folder(self.source, self.destination, self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Models:
    """The target's folder, and for each drafter its folder, "ngram" or "suffix"."""

    target: Path
    drafters: tuple[str, ...]

    @property
    def drafter_parameters(self) -> dict[str, int]:
        """Folder name of each small model -> its parameters."""
        folders = [Path(name) for name in self.drafters if name not in LOOKUPS]
        return {folder.name: count_parameters(folder) for folder in folders}


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """What must be grown before these models can be loaded; growing is slow, planning is not."""

    models: Models
    growths: Mapping[str, Growth]  # folder name in `models` -> how it grows

    def make(self, device: torch.device = _CPU) -> Models:
        made = {name: str(growth.make(device)) for name, growth in self.growths.items()}
        target = str(self.models.target)
        return Models(Path(made.get(target, target)), tuple(made.get(name, name) for name in self.models.drafters))


def find_models(model: str, drafters: str | tuple[str, ...]) -> Models:
    """Folders of the target and its drafters; "auto" drafters are chosen as `LLM` chooses them.

    Raises:
        ModelError: One cannot be found.
        ValueError: The list of drafters is malformed or empty.
    """
    names = parse_drafters(drafters)
    if names == ():
        raise ValueError('drafters: empty, and trees need at least one; use "auto", "ngram" or a model')
    names = usual_drafters(model) if names is None else names
    folders = tuple(name if name in LOOKUPS else str(find_drafter(name)) for name in names)
    return Models(find_target(model), folders)


def plan_growth(models: Models, size: str, dtype: str) -> GrowthPlan:
    """How to grow the target to `size` ("1b"), and each smaller drafter to a hundredth of that.

    Raises:
        ValueError: The size is not known or not reachable, or a model is no Llama; nothing was written.
    """
    config, kind = load_config(models.target), DTYPES[dtype]
    assert isinstance(kind, torch.dtype), "auto is for the caller to decide"
    try:
        shape = shape_for(size, config)
        growths = {str(models.target): Growth(models.target, shape, _destination(models.target, size, kind), kind)}
        wanted = _DRAFTER_FRACTION * _num_parameters(shape, config)
        for name in models.drafters:
            # One with a token map was made small for its vocabulary, and stays as it is.
            if name in LOOKUPS or (Path(name) / TOKEN_MAP).is_file():
                continue
            if growth := _drafter_growth(Path(name), wanted, kind):
                growths[name] = growth
    except ValueError as error:
        raise ValueError(f"grow: {error}") from error
    return GrowthPlan(models, growths)


def at_size(models: Models, size: str | None, dtype: str, device: torch.device = _CPU) -> tuple[Models, str]:
    """The models grown to `size`, if there is one, and the dtype to load them in.

    Args:
        device: Where new weights are made; a GPU does in seconds what takes a CPU minutes.

    Raises:
        ValueError: As for `plan_growth`.
    """
    if size is None:
        return models, dtype
    dtype = "bfloat16" if dtype == "auto" else dtype
    return plan_growth(models, size, dtype).make(device), dtype


def dtype_of(folder: Path, name: str) -> torch.dtype:
    """What a model of this folder is loaded in; "auto" is the checkpoint's own."""
    kind = DTYPES[name]
    own = load_config(folder).dtype if kind == "auto" else kind
    return own if isinstance(own, torch.dtype) else torch.float32


def _drafter_growth(folder: Path, wanted: float, dtype: torch.dtype) -> Growth | None:
    """None if the drafter already has that many parameters."""
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
    """In the user's cache; one place for each source folder, size and dtype."""
    key = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]
    kind = str(dtype).removeprefix("torch.")
    return cache_folder() / f"grown-{source.name}-{size.lower()}-{kind}-{key}"


def count_parameters(folder: Path) -> int:
    """Counted in the headers of the weight files, where a tied matrix stands once."""
    return sum(map(math.prod, weight_shapes(folder).values()))
