"""Growth of a GGUF file, whose codes stay as they are: the same text, to the bit, at the cost of a larger file.

Width and heads stay the same, so no norm computes anything else. Blocks of zeros are added where a matrix writes to the
residual, and copies of the matrix's own blocks, in random order, elsewhere. Files are written a tensor at a time.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.growth.targets import check_contains, place_grown, places_in
from specinfer.model.definition import load_config
from specinfer.model.gguf.config import read_config
from specinfer.model.gguf.folder import WEIGHTS, weights_file
from specinfer.model.gguf.header import GgufHeader, TensorPlace, read_header
from specinfer.model.gguf.writing import write_file
from specinfer.planning.growth_shape import Shape, shape_of

_NAME = re.compile(r"blk\.(\d+)\.(.+)")
_RESIDUAL_WRITERS = ("attn_output", "ffn_down")
_CHANGED = {"num_hidden_layers", "intermediate_size", "layer_types"}  # fields of config.json that may change
_LEFT_OUT = ("general.architecture", "split.")  # the writer's own, and what a file of one part has no use for
_Codes = npt.NDArray[np.uint8]  # [rows, blocks, bytes of a block]


def grow_file(source: Path, destination: Path, shape: Shape, *, seed: int = 0) -> Path:
    """Grow the file that a model folder stands for into a folder with the grown file; see `grow_folder`.

    Raises:
        ValueError: The file cannot grow to this shape, or the destination was not written by growth.
    """
    file, config = weights_file(source), load_config(source)
    assert file is not None
    old = shape_of(config)
    check_contains(shape, old)
    if replace(shape, num_layers=0, intermediate_size=0) != replace(old, num_layers=0, intermediate_size=0):
        raise ValueError(f"{file}: GGUF files grow in layers and MLPs alone; keep width and heads")
    layers = _templates(places_in(config, shape.num_layers), shape.num_layers)

    def write(fresh: Path) -> None:
        header = read_header(file)
        growth = _Growth(header, shape, old, layers, np.random.default_rng(seed))
        tensors = list(growth.tensors())
        arch, places = header.metadata["general.architecture"], {name: place for name, place, _ in tensors}
        data = (growth.codes(place, source) for _, place, source in tensors)
        write_file(fresh / WEIGHTS, arch, growth.metadata(), places, data)
        fields, before = read_config(read_header(fresh / WEIGHTS)), read_config(header)
        if wrong := [name for name in before if name not in _CHANGED and fields.get(name) != before[name]]:
            raise ValueError(f"{file}: with {shape.num_layers} layers {wrong[0]} is another; name another size")
        (fresh / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

    return place_grown(source, destination, {"shape": asdict(shape), "seed": seed}, write)


def grown_bytes(source: Path, shape: Shape) -> int:
    """Return the bytes of the tensors of a grown file."""
    file, config = weights_file(source), load_config(source)
    assert file is not None
    header, layers = read_header(file), _templates(places_in(config, shape.num_layers), shape.num_layers)
    growth = _Growth(header, shape, shape_of(config), layers, np.random.default_rng(0))
    return sum(math.prod(place.blocks) for _, place, _ in growth.tensors())


def _templates(places: list[int], num_layers: int) -> list[tuple[int, bool]]:
    """Return for each new layer the old one whose tensors it has or imitates, and whether it is that one."""
    nearest = [min(range(len(places)), key=lambda old: abs(places[old] - new)) for new in range(num_layers)]
    return [(old, places[old] == new) for new, old in enumerate(nearest)]


class _Growth:
    """The tensors of a grown file, in the order of the file."""

    def __init__(
        self, header: GgufHeader, shape: Shape, old: Shape, layers: list[tuple[int, bool]], random: np.random.Generator
    ) -> None:
        self._header, self._shape, self._old, self._layers, self._random = header, shape, old, layers, random

    def metadata(self) -> dict[str, Any]:
        """Return the source's metadata with the new sizes; what it lists by layer follows the layers."""
        arch, num_old = self._header.metadata["general.architecture"], self._old.num_layers
        found = {}
        for key, value in self._header.metadata.items():
            is_by_layer = key.startswith(f"{arch}.") and isinstance(value, list) and len(value) == num_old
            found[key] = [value[old] for old, _ in self._layers] if is_by_layer else value
        sizes = {"block_count": self._shape.num_layers, "feed_forward_length": self._shape.intermediate_size}
        found |= {f"{arch}.{name}": size for name, size in sizes.items()}
        return {key: value for key, value in found.items() if not key.startswith(_LEFT_OUT)}

    def tensors(self) -> Iterator[tuple[str, TensorPlace, "_Source"]]:
        """Yield each tensor's name and its place, of which the shape and the type count, and what it is made of."""
        inside: dict[int, dict[str, TensorPlace]] = {}
        for name, place in self._header.tensors.items():
            if (match := _NAME.fullmatch(name)) is None:
                yield name, place, _Source(place, False, True)
            else:
                inside.setdefault(int(match[1]), {})[match[2]] = place
        for number, (old, is_old) in enumerate(self._layers):
            for name, place in inside[old].items():
                writes = name.startswith(_RESIDUAL_WRITERS)
                yield f"blk.{number}.{name}", self._grown(name, place), _Source(place, writes, is_old)

    def _grown(self, name: str, place: TensorPlace) -> TensorPlace:
        change, shape = self._shape.intermediate_size - self._old.intermediate_size, place.shape
        if name.startswith("ffn_down."):
            shape = (*shape[:-1], shape[-1] + change)
        elif name.startswith(("ffn_gate.", "ffn_up.")):
            shape = (shape[0] + change, *shape[1:])
        return replace(place, shape=shape)

    def codes(self, place: TensorPlace, source: "_Source") -> _Codes:
        """Return the codes of a tensor."""
        old = source.codes()
        if old.shape == place.blocks and source.is_kept:
            return old
        if source.writes_residual:
            new = np.zeros(place.blocks, np.uint8)
        else:
            picked = (self._random.integers(size, size=place.blocks[:2]) for size in old.shape[:2])
            new = old[tuple(picked)]
        if source.is_kept:
            new[: old.shape[0], : old.shape[1]] = old
        return new


class _Source:
    """The tensor that a new one contains or imitates.

    Args:
        writes_residual: Whether what is added must be zeros.
        is_kept: Whether the new tensor contains it.
    """

    def __init__(self, place: TensorPlace, writes_residual: bool, is_kept: bool) -> None:
        self._place, self.writes_residual, self.is_kept = place, writes_residual, is_kept

    def codes(self) -> _Codes:
        place = self._place
        data = np.fromfile(place.file, np.uint8, place.num_bytes, offset=place.offset)
        return data.reshape(place.blocks)
