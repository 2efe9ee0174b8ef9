"""A copy of a model's layers as they are computed with: panels, codes, what was put together from several tensors.

Written once, a layer at a time, and read instead of the model's own files, straight into the buffers. A file of JSON
beside it says of which weights it is.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from specinfer.errors import ModelError, WeightsError
from specinfer.model.offload.checkpoint import Checkpoint
from specinfer.model.offload.direct import CHUNK, DirectFile, pages
from specinfer.model.offload.image import LayerImage, Part
from specinfer.model.offload.stream import Chunk, Room

_VERSION = 1  # of the form of both files


class CopiedLayer:
    """A layer in a copy."""

    def __init__(self, image: LayerImage, file: DirectFile, start: int) -> None:
        self._image, self._file, self._start = image, file, start
        self.num_bytes = self.num_read = image.num_bytes
        self.widest = image.widest

    def chunks(self, buffer: Tensor) -> list[Chunk]:
        return [partial(self._read, buffer, start) for start in range(0, self.num_bytes, CHUNK)]

    def _read(self, buffer: Tensor, start: int, _room: Room) -> int:
        size = min(CHUNK, self.num_bytes - start)
        skipped = self._file.read(self._start + start, size, buffer[start : start + size])
        assert skipped == 0
        return size

    def bind(self, buffer: Tensor) -> None:
        self._image.bind(buffer)

    def check(self) -> None:
        self._file.check()


class Copy:
    """An open copy."""

    def __init__(self, path: Path, images: Sequence[LayerImage]) -> None:
        self._file = DirectFile(path)
        self.layers: list[CopiedLayer] = []
        start = 0
        for image in images:
            self.layers.append(CopiedLayer(image, self._file, start))
            start += image.num_bytes

    def close(self) -> None:
        self._file.close()


def open_copy(
    folder: Path,
    checkpoint: Checkpoint,
    identity: Sequence[Any],
    parts: Sequence[Mapping[str, Part]],
    images: Sequence[LayerImage],
    real: Callable[[int], Mapping[str, Part]],
) -> Copy:
    """The copy of a model's layers in a folder; written first, if there is none of these weights.

    Args:
        identity: What the copy depends on beside the weights.
        parts: Of each layer by name what is in the copy.
        real: The same parts of a layer, and perhaps others, with their weights.

    Raises:
        ModelError: It cannot be written, for instance because the disk is full; nothing is left of it.
    """
    described = _description(checkpoint, identity, parts)
    place = hashlib.sha256(json.dumps([str(checkpoint.folder.resolve()), *map(str, identity)]).encode()).hexdigest()
    path = folder / f"{checkpoint.folder.name}-{place[:12]}.layers"
    total = sum(image.num_bytes for image in images)
    if _read(path.with_suffix(".json")) != described or not path.is_file() or path.stat().st_size != total:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(path, described, checkpoint, parts, images, real, total)
        except OSError as error:
            raise ModelError(f"offload_folder: {folder} cannot be written: {error.strerror}; name another") from error
    try:
        return Copy(path, images)
    except WeightsError as error:
        raise ModelError(f"offload_folder: {error}") from error


def _description(
    checkpoint: Checkpoint, identity: Sequence[Any], parts: Sequence[Mapping[str, Part]]
) -> dict[str, Any]:
    files = [[file.path.name, file.size, file.modified] for file in checkpoint.shards.files]
    layers = [
        {
            name: [type(part).__name__, *([str(t.dtype), list(t.shape)] for t in part.tensors())]
            for name, part in layer.items()
        }
        for layer in parts
    ]
    return {"version": _VERSION, "files": files, "identity": list(identity), "layers": layers}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _write(
    path: Path,
    described: dict[str, Any],
    checkpoint: Checkpoint,
    parts: Sequence[Mapping[str, Part]],
    images: Sequence[LayerImage],
    real: Callable[[int], Mapping[str, Part]],
    total: int,
) -> None:
    """Under another name until it is whole."""
    path.unlink(missing_ok=True)  # of other weights; its room may be needed
    if (free := shutil.disk_usage(path.parent).free) < total:
        raise ModelError(
            f"offload_folder: a copy of the layers takes {total / 2**20:.0f} MiB, and {path.parent} has "
            f"{free / 2**20:.0f}; name another"
        )
    handle, partial_name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            buffer, done = pages(max(image.num_bytes for image in images)), 0
            for layer, image in enumerate(images):
                found = real(layer)
                buffer.zero_()
                image.write(buffer, [found[name] for name in parts[layer]])
                del found
                view = memoryview(buffer.numpy().data)[: image.num_bytes]
                while view:
                    view = view[file.write(view) or 0 :]
                done += image.num_bytes
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, done, os.POSIX_FADV_DONTNEED)
                checkpoint.tell("writing a copy", done, total)
        for shard in checkpoint.shards.files:
            shard.check()
        os.replace(partial_name, path)
        path.with_suffix(".json").write_text(json.dumps(described), encoding="utf-8")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial_name)
        raise
