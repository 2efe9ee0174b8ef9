"""The header of a GGUF file: its metadata, and the place of each tensor. All of it is checked before use.

The library's own reader loops as often as a count in the file claims. This one stops at the end of the file: each item
takes bytes of it, and a size that does not fit into the rest is refused.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from specinfer.core.errors import ModelError
from specinfer.hub.files import fault_of, gguf_parts

_NUMBERS = ("UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "FLOAT32", "BOOL", "UINT64", "INT64", "FLOAT64")
_SCALARS = {GGUFValueType[name]: f"<{code}" for name, code in zip(_NUMBERS, "BbHhIif?Qqd", strict=True)}
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_ALIGNMENT = 2**20
_PLAIN = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
_TYPES = _PLAIN | {
    GGMLQuantizationType[name]
    for name in (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
        *("MXFP4", "NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"),
    )
}


class GgufError(ModelError):
    """Error for a GGUF file that cannot be used.

    Args:
        remedy: Action that the user should take.
    """

    def __init__(self, path: Path, fault: str, remedy: str = "fetch the file again") -> None:
        super().__init__(f"model: {path}: {fault}; {remedy}")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in the file, and its storage format.

    Attributes:
        shape: PyTorch's shape, outermost size first.
        offset: Bytes from the beginning of the file.
        file: The file, which may be another part of a split one.
        factor: Number that all values are multiplied by; files have it as another tensor.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int
    file: Path
    factor: float = 1.0

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The numbers of rows and of blocks in a row, and the bytes of a block."""
        size, num_bytes = GGML_QUANT_SIZES[self.kind]
        return prod(self.shape[:-1]), self.shape[-1] // size, num_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a file.

    Attributes:
        metadata: Values by key; arrays are lists.
        tensors: Places by llama.cpp's names of tensors.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a value of the metadata, or the default.

        Raises:
            GgufError: The value is of another type.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise GgufError(self.path, f"{key} is {str(value)[:40]!r}, which is of the wrong type")
        return value


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a file and of its other parts, without reading any tensor.

    Raises:
        GgufError: The file is not GGUF, is damaged or cut short, or is of an unsupported version or type; or a part is
            missing or no part of it.
    """
    first = _read_part(path)
    count = first.get("split.count", int, 0)
    if count < 2:
        return first
    parts = [path.with_name(name) for name in gguf_parts(path.name)]
    if len(parts) != count or path != parts[0] or first.get("split.no", int, 0) != 0:
        raise GgufError(
            path, f"it is one of {count} parts", f"name the first one, which ends in -00001-of-{count:05d}.gguf"
        )
    tensors = dict(first.tensors)
    for number, part in enumerate(parts[1:], 1):
        other = _read_part(part)
        if (other.get("split.no", int), other.get("split.count", int)) != (number, count):
            raise GgufError(part, f"it is not part {number + 1} of {path.name}", "fetch all parts again")
        if both := sorted(tensors.keys() & other.tensors.keys()):
            raise GgufError(part, f"the tensor {both[0][:80]!r} is in another part, too", "fetch all parts again")
        tensors |= other.tensors
    if first.get("split.tensors.count", int, len(tensors)) != len(tensors):
        raise GgufError(
            path, f"its parts have {len(tensors)} tensors, and not split.tensors.count", "fetch all parts again"
        )
    return GgufHeader(path, first.metadata, tensors)


def _read_part(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24 or file.read(4) != b"GGUF":
                fault = fault_of(path) or "is not a GGUF file; name one, or a model folder"
                raise GgufError(path, *f"it {fault}".split("; ", 1))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise GgufError(path, f"it cannot be read ({error.strerror})", "check its place and permissions") from error
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise GgufError(path, "its header is cut short or damaged") from error


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data)
    version, num_tensors, num_keys = cursor.take("<IQQ")
    if version not in _VERSIONS:
        raise GgufError(
            path, f"version {version} of the format is not read", "convert the model with a newer llama.cpp"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text("replace")
        if key in metadata:
            raise GgufError(path, f"the key {key[:80]!r} is there twice")
        # Names and descriptions may be in any encoding. Those of tokens may not.
        errors = "strict" if key.startswith("tokenizer.") else "replace"
        metadata[key] = cursor.value(path, *cursor.take("<I"), errors=errors)
    alignment = metadata.get("general.alignment", 32)
    if alignment not in {2**i for i in range(_MAX_ALIGNMENT.bit_length())}:
        raise GgufError(path, f"its alignment of {str(alignment)[:40]} is not a power of two")
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.text()
        if name in entries:
            raise GgufError(path, f"the tensor {name[:80]!r} is there twice")
        (num_dims,) = cursor.take("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise GgufError(path, f"the tensor {name[:80]!r} has {num_dims} dimensions")
        entries[name] = (cursor.take(f"<{num_dims}Q")[::-1], *cursor.take("<IQ"))
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _place(path, name, *entry, start, len(data)) for name, entry in entries.items()}
    # Otherwise a small file could have any number of large tensors.
    if sum(place.num_bytes for place in tensors.values()) > len(data):
        raise GgufError(path, "its tensors overlap")
    return GgufHeader(path, metadata, tensors)


def _place(
    path: Path, name: str, shape: tuple[int, ...], number: int, offset: int, start: int, file_size: int
) -> TensorPlace:
    kind = next((kind for kind in _TYPES if kind == number), None)
    if kind is None:
        known = {int(kind): kind.name for kind in GGMLQuantizationType}.get(number, f"number {number}")
        names = ", ".join(sorted(kind.name for kind in _TYPES))
        raise GgufError(
            path, f"the tensor {name[:80]!r} is of type {known}, which is not read", f"take a file of types {names}"
        )
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block or prod(shape) == 0:
        raise GgufError(path, f"the tensor {name[:80]!r} has a shape {list(shape)} that its type cannot have")
    num_bytes = prod(shape) // block * block_bytes
    if start + offset + num_bytes > file_size:
        raise GgufError(path, f"the file ends before the tensor {name[:80]!r} does")
    return TensorPlace(shape, kind, start + offset, num_bytes, path)


class _Cursor:
    """A reader of consecutive values in a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 4  # after the magic number

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return values

    def text(self, errors: str = "strict") -> str:
        return self._texts(1, errors)[0]

    def _texts(self, count: int, errors: str) -> list[str]:
        """Return consecutive strings. A vocabulary has a hundred thousand, and a call for each would take longest.

        Args:
            errors: What to do with bytes that are not UTF-8, as for `bytes.decode`.
        """
        data, at, size, found = self._data, self.at, len(self._data), list[str]()
        read = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + read(data, at)[0]
            if at > size:
                raise struct.error("a string is longer than the file")
            found.append(data[start:at].decode("utf-8", errors))
        self.at = at
        return found

    def value(self, path: Path, kind: int, *, errors: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text(errors)
        if kind == GGUFValueType.ARRAY:
            return self._array(path, *self.take("<IQ"), errors=errors)
        if kind not in _SCALARS:
            raise GgufError(path, f"its metadata has a value of type {kind}, which the format does not have")
        return self.take(_SCALARS[GGUFValueType(kind)])[0]

    def _array(self, path: Path, kind: int, count: int, *, errors: str) -> list[Any]:
        if kind == GGUFValueType.STRING:
            return self._texts(count, errors)
        if kind not in _SCALARS:
            raise GgufError(path, f"its metadata has an array of type {kind}, which is not read")
        form = _SCALARS[GGUFValueType(kind)]
        if count > (len(self._data) - self.at) // struct.calcsize(form):
            raise struct.error("an array is longer than the file")
        return list(self.take(f"<{count}{form[1]}"))
