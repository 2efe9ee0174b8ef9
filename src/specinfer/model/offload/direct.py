"""Files read past the page cache: what streams through once a pass would only push other things out of it."""

import contextlib
import errno
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from specinfer.errors import WeightsError

ALIGNMENT = 4096  # of offsets, lengths and memory; that of every disk in use
CHUNK = 4 * 2**20  # bytes read at once: large enough for a disk's full bandwidth


def aligned_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def pages(num_bytes: int) -> Tensor:
    """[at least `num_bytes`] uint8 zeros that begin with a page; given back to the system with the tensor."""
    return torch.frombuffer(mmap.mmap(-1, max(aligned_up(num_bytes), ALIGNMENT)), dtype=torch.uint8)


class DirectFile:
    """A file of weights that must stay what it was when it was opened.

    Raises:
        WeightsError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        try:
            self._descriptor, self._is_direct = _open(path)
            self._identity = _identity(os.fstat(self._descriptor))
        except OSError as error:
            self.close()
            raise WeightsError(f"weights: {path} cannot be opened: {error.strerror}; check the file") from error
        _, self.size, self.modified, _ = self._identity

    def check(self) -> None:
        """Refuses a file that is another one by now.

        Raises:
            WeightsError: It was changed, cut short, replaced or removed.
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
        """Reads `num_bytes` at `offset`, and what lies around them in whole pages, to the start of `into`.

        Args:
            into: [bytes] uint8 that begins with a page, with room for `room_for(num_bytes)`.

        Returns:
            Where in `into` the bytes begin.

        Raises:
            WeightsError: The disk refuses, or the file ends before.
        """
        start = offset // ALIGNMENT * ALIGNMENT
        skipped = offset - start
        wanted, whole = skipped + num_bytes, aligned_up(skipped + num_bytes)
        view = into.numpy().data
        done = 0
        try:
            while done < wanted:
                got = os.preadv(self._descriptor, [view[done:whole]], start + done)
                done += got
                if done < wanted and (
                    got == 0 or done % ALIGNMENT
                ):  # the end of the file, or what direct reads say of it
                    raise WeightsError(
                        f"weights: {self.path} ends {wanted - done} bytes early at {start + done}; "
                        "fetch it again, and load the model again"
                    )
        except OSError as error:
            raise WeightsError(
                f"weights: {self.path} cannot be read at {start + done}: {error.strerror}; check the disk"
            ) from error
        if not self._is_direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, start, whole, os.POSIX_FADV_DONTNEED)
        return skipped

    def close(self) -> None:
        """Nobody may read any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def room_for(num_bytes: int) -> int:
    """Bytes that a read of so many may fill."""
    return aligned_up(num_bytes) + ALIGNMENT


def _open(path: Path) -> tuple[int, bool]:
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | direct)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without
                raise
        else:
            try:
                os.preadv(descriptor, [pages(ALIGNMENT).numpy().data], 0)
                return descriptor, True
            except OSError as error:
                os.close(descriptor)
                if error.errno != errno.EINVAL:
                    raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_dev
