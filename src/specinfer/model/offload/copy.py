"""A copy of a model's layers in the form used for computing: panels, codes, and weights built from several tensors.

It is written once, a layer at a time, and then read straight into the buffers in place of the model's own files. A JSON
file next to it describes which weights it contains.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from specinfer.core.errors import ModelError, WeightsError
from specinfer.core.systems import lock_file
from specinfer.model.offload.buffer_layout import BufferLayout, LayoutEntry
from specinfer.model.offload.checkpoint import Checkpoint
from specinfer.model.offload.direct import CHUNK, DirectFile, Scratch, evict, pages
from specinfer.model.offload.streamed_layer import Chunk

logger = logging.getLogger(__name__)
_VERSION = 1  # of the format of both files


class CopiedLayer:
    """A layer in a copy."""

    def __init__(self, layout: BufferLayout, file: DirectFile, start: int) -> None:
        self._layout, self._file, self._start = layout, file, start
        self.num_bytes = self.num_read = layout.num_bytes
        self.widest = layout.widest

    def chunks(self, buffer: Tensor) -> list[Chunk]:
        return [partial(self._read, buffer, start) for start in range(0, self.num_bytes, CHUNK)]

    def _read(self, buffer: Tensor, start: int, _scratch: Scratch) -> int:
        size = min(CHUNK, self.num_bytes - start)
        skipped = self._file.read(self._start + start, size, buffer[start : start + size])
        assert skipped == 0
        return size

    def bind(self, buffer: Tensor) -> None:
        self._layout.bind(buffer)

    def check(self) -> None:
        self._file.check()


class Copy:
    """An open copy."""

    def __init__(self, path: Path, layouts: Sequence[BufferLayout]) -> None:
        self._file = DirectFile(path)
        self.layers: list[CopiedLayer] = []
        start = 0
        for layout in layouts:
            self.layers.append(CopiedLayer(layout, self._file, start))
            start += layout.num_bytes

    def close(self) -> None:
        self._file.close()


def open_copy(
    folder: Path,
    checkpoint: Checkpoint,
    identity: Sequence[Any],
    entries: Sequence[Mapping[str, LayoutEntry]],
    layouts: Sequence[BufferLayout],
    real: Callable[[int], Mapping[str, LayoutEntry]],
) -> Copy:
    """Return the copy of a model's layers in a folder; write it first if there is none of these weights.

    Args:
        identity: Values other than the weights that the copy depends on.
        entries: For each layer, its entries in the copy by name.
        real: Returns the same entries of a layer with their weights, and possibly others.

    Raises:
        ModelError: The copy cannot be written, for example because the disk is full. No partial copy is left.
    """
    described = _description(checkpoint, identity, entries)
    place = hashlib.sha256(json.dumps([str(checkpoint.folder.resolve()), *map(str, identity)]).encode()).hexdigest()
    path = folder / f"{checkpoint.folder.name}-{place[:12]}.layers"
    total = sum(layout.num_bytes for layout in layouts)

    def is_there() -> bool:
        is_this = _read(path.with_suffix(".json")) == described
        return is_this and path.is_file() and path.stat().st_size == total

    if not is_there():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(path.with_suffix(".part")) as file:
                if not is_there():  # another process may have written it in the meantime
                    _write(file, path, described, checkpoint, entries, layouts, real, total)
        except OSError as error:
            raise ModelError(f"offload_folder: {folder} cannot be written: {error.strerror}; name another") from error
    try:
        return Copy(path, layouts)
    except WeightsError as error:
        raise ModelError(f"offload_folder: {error}") from error


def _description(
    checkpoint: Checkpoint, identity: Sequence[Any], entries: Sequence[Mapping[str, LayoutEntry]]
) -> dict[str, Any]:
    files = [[file.path.name, file.size, file.modified] for file in checkpoint.shards.files]
    layers = [
        {
            name: [type(entry).__name__, *([str(t.dtype), list(t.shape)] for t in entry.tensors())]
            for name, entry in layer.items()
        }
        for layer in entries
    ]
    return {"version": _VERSION, "files": files, "identity": list(identity), "layers": layers}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[BinaryIO]:
    """Return a context with an empty file that no other process writes; it is removed afterwards unless renamed.

    A file that a killed process left is overwritten.
    """
    while True:
        with path.open("ab", buffering=0) as file:
            _lock(file, path)
            if not _is_at(file, path):  # the last owner has removed or renamed it
                continue
            try:
                file.truncate(0)
                yield file
            finally:
                if _is_at(file, path):
                    path.unlink()
            return


def _lock(file: BinaryIO, path: Path) -> None:
    """Wait until no other process holds the lock."""
    is_reported = False
    with contextlib.suppress(OSError):  # a file system without locks
        while True:
            try:
                return lock_file(file.fileno())
            except BlockingIOError:
                if not is_reported:
                    logger.info("%s is being written by another process, which is waited for", path)
                is_reported = True
                time.sleep(0.1)


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write(
    file: BinaryIO,
    path: Path,
    described: dict[str, Any],
    checkpoint: Checkpoint,
    entries: Sequence[Mapping[str, LayoutEntry]],
    layouts: Sequence[BufferLayout],
    real: Callable[[int], Mapping[str, LayoutEntry]],
    total: int,
) -> None:
    """Write the copy, and give the file its name once it is complete."""
    path.unlink(missing_ok=True)  # of other weights; its space may be needed
    if (free := shutil.disk_usage(path.parent).free) < total:
        raise ModelError(
            f"offload_folder: a copy of the layers takes {total / 2**20:.0f} MiB, and {path.parent} has "
            f"{free / 2**20:.0f}; name another"
        )
    buffer, done = pages(max(layout.num_bytes for layout in layouts)), 0
    for layer, layout in enumerate(layouts):
        found = real(layer)
        buffer.zero_()
        layout.write(buffer, [found[name] for name in entries[layer]])
        del found
        view = memoryview(buffer.numpy().data)[: layout.num_bytes]
        while view:
            view = view[file.write(view) or 0 :]
        done += layout.num_bytes
        os.fsync(file.fileno())
        evict(file.fileno(), 0, done)
        checkpoint.progress("writing a copy", done, total)
    for shard in checkpoint.shards.files:
        shard.check()
    description = path.with_suffix(".json")
    try:
        description.write_text(json.dumps(described), encoding="utf-8")
        os.replace(file.name, path)
    except BaseException:
        description.unlink(missing_ok=True)
        raise
