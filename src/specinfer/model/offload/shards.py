"""The place of each weight in a model's files: those of safetensors, or one GGUF file; and scales for keys and values.

A safetensors file consists of eight bytes with the header's length, a JSON header with each tensor's type, shape and
place, and the data.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.model.gguf.config import gguf_sources
from specinfer.model.gguf.folder import weights_file
from specinfer.model.gguf.weights import GgufSource, JoinedSource
from specinfer.model.kv_tensors import LayerShape
from specinfer.model.offload.direct import CHUNK, DirectFile, Scratch, pages
from specinfer.model.offload.meta_weights import Cut
from specinfer.model.quantized.sources import DecodedSource, is_quantized, with_decoded
from specinfer.model.stacked_source import StackedSource
from specinfer.ops import QuantizedWeight
from specinfer.ops.kv_types import KVScales

_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_WHOLE = "model.safetensors"
_INDEX = re.compile(r".+\.safetensors\.index(\.\w+)?\.json")  # also of another precision, such as fp16
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
_LARGE = 2**16
_MAX_HEADER = 100 * 10**6  # as in the format's own reader


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor in a file, or some of its columns.

    Attributes:
        num_bytes: Bytes read for it.
        columns: Columns that it consists of, or None for all. Rows are always read whole.
    """

    file: DirectFile
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    columns: range | None = None

    @property
    def has_codes(self) -> bool:
        return False

    def codes(self) -> tuple[str, QuantizedWeight]:
        raise AssertionError("it has none")

    outline = codes

    def read(self) -> Tensor:
        """Read the whole tensor.

        Raises:
            WeightsError: The file cannot be read.
        """
        result = _allocate(self.num_bytes)
        if self.file.alignment == 1:
            self.file.read(self.offset, self.num_bytes, result)
            return result.view(self.dtype).view(self.shape)
        scratch = Scratch()
        for start in range(0, self.num_bytes, CHUNK):
            size = min(CHUNK, self.num_bytes - start)
            result[start : start + size] = self.file.read_bytes(self.offset + start, size, scratch)
        return result.view(self.dtype).view(self.shape)

    def rows(self, rows: range) -> "Source":
        """Return some of the rows as a source of their own."""
        row_bytes = self.num_bytes // self.shape[0]
        size = len(rows) * row_bytes
        return Source(self.file, self.offset + rows.start * row_bytes, (len(rows), *self.shape[1:]), self.dtype, size)

    def parts(self, cut: Cut | None) -> "list[Source] | None":
        """Return the sources of the parts that a cut leaves, or None if they are neither rows nor one column range."""
        if cut is None:
            return [self]
        if cut.dim == 0:
            return [self.rows(part) for part in cut.ranges]
        if len(self.shape) == 2 and len(cut.ranges) == 1:
            return [replace(self, shape=cut.shape(self.shape), columns=cut.ranges[0])]
        return None

    def read_part(self, cut: Cut) -> Tensor:
        """Read a part of the tensor without keeping the rest in memory; if the cut is by rows, only they are read.

        Raises:
            WeightsError: The file cannot be read.
        """
        shape = cut.shape(self.shape)
        result = _allocate(torch.Size(shape).numel() * self.dtype.itemsize).view(self.dtype).view(shape)
        done = 0
        if cut.dim == 0:
            for part in cut.ranges:
                result[done : done + len(part)] = self.rows(part).read()
                done += len(part)
            return result
        step = max(CHUNK * self.shape[0] // self.num_bytes, 1)
        for done in range(0, self.shape[0], step):
            rows = range(done, min(done + step, self.shape[0]))
            result[rows.start : rows.stop] = cut.taken_from(self.rows(rows).read())
        return result


def read_part(source: Any, cut: Cut | None) -> Tensor:
    """Read a source, or the part of it that a cut leaves; parts of quantized weights are cut once they are decoded.

    Raises:
        WeightsError: The file cannot be read.
    """
    if cut is None:
        whole: Tensor = source.read()
        return whole
    return source.read_part(cut) if isinstance(source, Source) else cut.taken_from(source.read())


def parts_of(source: Any, cut: Cut | None) -> list[Source] | None:
    """Return the sources of the parts that a cut leaves, as they are used for computing; None where there are none."""
    return source.parts(cut) if isinstance(source, Source) else None


def _allocate(num_bytes: int) -> Tensor:
    """Return [num_bytes] uint8 memory; a large one is freed to the system, not kept by the C library."""
    return pages(num_bytes)[:num_bytes] if num_bytes >= _LARGE else torch.empty(num_bytes, dtype=torch.uint8)


class Shards:
    """A model folder's weights by name, none of them read yet.

    Args:
        dtype: Type that quantized weights are decoded to, or None for the file's own.
        is_cached: False for files that are read again for each pass, past the page cache.

    Raises:
        ModelError: A file is not a safetensors or GGUF file, or the index names a missing one.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None, *, is_cached: bool = True) -> None:
        self.sources: dict[str, Source | GgufSource | JoinedSource | DecodedSource | StackedSource] = {}
        self.files: list[DirectFile] = []
        try:
            if (gguf := weights_file(folder)) is not None:
                self.files.append(DirectFile(gguf, is_cached=is_cached))
                self.sources |= gguf_sources(gguf, dtype)
                return
            for path in weight_paths(folder):
                file = DirectFile(path, is_cached=is_cached)
                self.files.append(file)
                self.sources |= _sources(file)
            self.sources = with_decoded(self.sources, folder, dtype)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self.files:
            file.close()


def has_safetensors(folder: Path) -> bool:
    """Return whether the folder's weights are safetensors with the tensors of the model, which are not quantized."""
    return weights_file(folder) is None and not is_quantized(folder)


def has_usual_names(folder: Path) -> bool:
    """Return whether transformers finds the folder's safetensors by their names."""
    return (folder / _WHOLE).is_file() or (folder / f"{_WHOLE}.index.json").is_file()


def weight_paths(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: the usual one, those that the index names, or the only ones.

    Raises:
        ModelError: The folder has none, several of which any may be meant, or not all that the index or their names
            ask for.
    """
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    names = sorted(path.name for path in folder.iterdir())
    indexes = [name for name in names if _INDEX.fullmatch(name)]
    usual = [name for name in indexes if name == f"{_WHOLE}.index.json"]
    if len(found := usual or indexes) == 1:
        return _present([folder / name for name in _indexed(folder / found[0])], "the index names it")
    files = [name for name in names if name.endswith(".safetensors")]
    if part := _PART.fullmatch(files[0]) if files else None:
        parts = [f"{part[1]}-{i:05d}-of-{part[2]}.safetensors" for i in range(1, int(part[2]) + 1)]
        if set(files) <= set(parts):
            return _present([folder / name for name in parts], "the other parts are there")
    if len(files) != 1:
        what = f"several files of weights, {', '.join(files[:3])}, and no index" if files else "no safetensors files"
        raise ModelError(f"model: {folder} has {what}; leave one, or name it {_WHOLE}")
    return [folder / files[0]]


def _indexed(index: Path) -> list[str]:
    """Return the names of the files in an index, without folders."""
    try:
        names = {Path(name).name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"model: {index} is damaged; fetch the model again") from error
    if not names:
        raise ModelError(f"model: {index} names no files; fetch the model again")
    return sorted(names)


def _present(files: list[Path], why: str) -> list[Path]:
    for file in files:
        if not file.is_file():
            raise ModelError(f"model: {file} is missing, though {why}; fetch the model again")
    return files


def _sources(file: DirectFile) -> dict[str, Source]:
    try:
        header, start = _header(file)
        return {name: _source(file, entry, start) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model: {file.path} is not a safetensors file that can be read: {error}") from error


def _header(file: DirectFile) -> tuple[dict[str, Any], int]:
    scratch = Scratch()
    size = int.from_bytes(file.read_bytes(0, 8, scratch).numpy().tobytes(), "little")
    if not 0 < size <= min(_MAX_HEADER, file.size - 8):
        raise ValueError("its header has no length that can be")
    return json.loads(file.read_bytes(8, size, scratch).numpy().tobytes()), 8 + size


def _source(file: DirectFile, entry: dict[str, Any], start: int) -> Source:
    dtype, shape = _DTYPES.get(entry["dtype"]), tuple(map(int, entry["shape"]))
    begin, end = entry["data_offsets"]
    if dtype is None:
        raise ValueError(f"type {entry['dtype']} is not known here")
    if end - begin != torch.Size(shape).numel() * dtype.itemsize or not 0 <= begin <= end <= file.size - start:
        raise ValueError("a tensor's place does not fit its shape")
    return Source(file, start + begin, shape, dtype, end - begin)


# `kv_scale` is the older name, of both. It may be of the attention, or of a linear layer in it.
_NAME = re.compile(r"\blayers\.(\d+)\.(?:\w+\.)+(k|v|kv)_scale")


def with_scales(shapes: Sequence[LayerShape], folder: Path, layers: range) -> tuple[LayerShape, ...]:
    """Return the shapes of these layers with the scales of a checkpoint; where it has none, they are 1.

    Raises:
        ModelError: A scale is not a single number above 0.
    """
    if len(shapes) != len(layers) or not is_quantized(folder):
        return tuple(shapes)
    found: dict[int, dict[str, float]] = {}
    with Shards(folder) as shards:
        for name, source in shards.sources.items():
            if (match := _NAME.fullmatch(name.removeprefix("model."))) is None or int(match[1]) not in layers:
                continue
            numbers = source.read().flatten().float()
            if len(numbers) != 1:
                raise ModelError(f"model: {name} has {len(numbers)} numbers, and only one for a whole layer is read")
            scale = float(numbers[0])
            if scale > 0 and math.isfinite(scale):  # others stand for none
                found.setdefault(int(match[1]), {})[match[2]] = scale
    return tuple(
        replace(shape, scales=_scales(found[layer])) if layer in found else shape
        for shape, layer in zip(shapes, layers, strict=True)
    )


def _scales(found: dict[str, float]) -> KVScales:
    """Return a layer's scales; one alone is that of keys and of values."""
    key, value = (found.get(kind, found.get("kv")) for kind in ("k", "v"))
    return KVScales(key or value or 1.0, value or key or 1.0)
