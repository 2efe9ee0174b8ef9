"""Files of weights, read past the page cache where data that is used once per pass would evict other data from it."""

import contextlib
import errno
import mmap
import os
import threading
from pathlib import Path

import torch
from torch import Tensor

from specinfer.core.errors import WeightsError

ALIGNMENT = 4096  # of offsets, lengths and memory; enough for common disks
CHUNK = 4 * 2**20  # bytes read at a time, large enough for a disk's full bandwidth

_READ = os.O_RDONLY | getattr(os, "O_BINARY", 0)


def aligned_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def pages(num_bytes: int) -> Tensor:
    """Return page-aligned uint8 zeros, at least `num_bytes`; the system gets the memory back with the tensor."""
    return torch.frombuffer(mmap.mmap(-1, max(aligned_up(num_bytes), ALIGNMENT)), dtype=torch.uint8)


class Scratch:
    """A thread's own memory, reused from read to read."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def get(self, num_bytes: int) -> Tensor:
        """Return page-aligned uint8 memory of at least `num_bytes`, which may have old contents."""
        if len(self._memory) < num_bytes:
            self._memory = pages(num_bytes)
        return self._memory


class DirectFile:
    """A file of weights that must not change after it was opened.

    Args:
        is_cached: Whether it is read through the page cache, because weights that stay in memory are read only once.

    Attributes:
        alignment: Number of bytes that reads begin and end at a multiple of.

    Raises:
        WeightsError: The file cannot be opened.
    """

    def __init__(self, path: Path, *, is_cached: bool = False) -> None:
        self.path = path
        self.alignment = 1 if is_cached else ALIGNMENT
        self._descriptor, self._seeking = -1, threading.Lock()
        try:
            self._descriptor, is_direct = (os.open(path, _READ), False) if is_cached else _open(path)
            self._is_evicted = not is_cached and not is_direct
            self._identity = _identity(os.fstat(self._descriptor))
        except OSError as error:
            self.close()
            raise WeightsError(f"weights: {path} cannot be opened: {error.strerror}; check the file") from error
        _, self.size, self.modified, _ = self._identity

    def check(self) -> None:
        """Refuse a file that has changed since it was opened.

        Raises:
            WeightsError: The file was changed, cut short, replaced or removed.
        """
        try:
            found = _identity(os.stat(self.path))
        except OSError as error:
            raise WeightsError(
                f"weights: {self.path} is gone ({error.strerror}); put it back, or load the model again"
            ) from error
        if found != self._identity:
            raise WeightsError(
                f"weights: {self.path} was changed while the model runs; put the old file back, or load the model again"
            )

    def read(self, offset: int, num_bytes: int, into: Tensor) -> int:
        """Read `num_bytes` at `offset`, with the rest of their pages, to the start of `into`.

        Args:
            into: [bytes] uint8, page-aligned, with room for `padded_size(num_bytes)`; if cached for `num_bytes`.

        Returns:
            The index in `into` where the bytes begin.

        Raises:
            WeightsError: The disk reports an error, or the file ends before.
        """
        skipped = offset % self.alignment
        start, wanted = offset - skipped, skipped + num_bytes
        whole = -(-wanted // self.alignment) * self.alignment
        view = into.numpy().data
        done = 0
        try:
            while done < wanted:
                got = self._read_at(start + done, view[done:whole])
                done += got
                if done < wanted and (
                    got == 0 or done % self.alignment
                ):  # the end of the file, or a direct read that reports it
                    raise WeightsError(
                        f"weights: {self.path} ends {wanted - done} bytes early at {start + done}; "
                        "fetch it again, and load the model again"
                    )
        except OSError as error:
            raise WeightsError(
                f"weights: {self.path} cannot be read at {start + done}: {error.strerror}; check the disk"
            ) from error
        if self._is_evicted:
            evict(self._descriptor, start, whole)
        return skipped

    def read_bytes(self, offset: int, num_bytes: int, scratch: Scratch) -> Tensor:
        """Return [num_bytes] uint8, valid until the next read into the same scratch memory; raises as `read`."""
        staging = scratch.get(padded_size(num_bytes))
        skipped = self.read(offset, num_bytes, staging)
        return staging[skipped : skipped + num_bytes]

    def _read_at(self, offset: int, into: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._descriptor, [into], offset)
        with self._seeking:  # Windows: all threads share one position
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            data = os.read(self._descriptor, len(into))
        into[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the file. It cannot be read afterwards."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def evict(descriptor: int, start: int, num_bytes: int) -> None:
    """Advise the system that these bytes of a file need not stay in memory, where it takes such advice."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)


def padded_size(num_bytes: int) -> int:
    """Return the bytes that a read of `num_bytes` may fill."""
    return aligned_up(num_bytes) + ALIGNMENT


def _open(path: Path) -> tuple[int, bool]:
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            descriptor = os.open(path, _READ | direct)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: a file system without direct reads
                raise
        else:
            try:
                os.preadv(descriptor, [pages(ALIGNMENT).numpy().data], 0)
                return descriptor, True
            except OSError as error:
                os.close(descriptor)
                if error.errno != errno.EINVAL:
                    raise
    return os.open(path, _READ), False


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_dev
