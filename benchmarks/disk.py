"""Bandwidth of direct reads from the disk, and of copies from host memory to a device: the limits of streamed passes.

Reads are sequential, in chunks of the size used for layers. They run with one thread, and with the number of threads
that reads layers: which is faster depends on the device. The bandwidth of a shared disk varies, so the result of each
round is kept in addition to the best.
"""

import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from specinfer.model.offload.direct import CHUNK, pages
from specinfer.model.offload.stream import NUM_READERS
from specinfer.model.offload.transfer import DeviceTransfer

NUM_THREADS = (1, NUM_READERS)
PIECE_BYTES = CHUNK
_COPIES = 8  # copies of each of the two buffers between readings of the clock


class DiskBandwidth:
    """Bytes per second of several ways to read these files, by round.

    Args:
        files: Files to read from beginning to end, one after another, again and again. A round continues where the
            previous one stopped, so that no lower layer has the data cached.

    Raises:
        OSError: A file cannot be opened.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.rates: dict[str, list[float]] = {_name(count): [] for count in NUM_THREADS}
        self._files = [_File(path) for path in files]
        self._places = self._endless_places()
        self._lock = threading.Lock()
        assert any(file.size for file in self._files)

    @property
    def is_direct(self) -> bool:
        """True if the file system allows direct reads. Otherwise the page cache may have helped."""
        return all(file.is_direct for file in self._files)

    def measure(self, seconds: float) -> float:
        """Measure each way for the given number of seconds, and return the bytes per second of the fastest."""
        for count in NUM_THREADS:
            self.rates[_name(count)].append(self._read(count, seconds))
        return max(rates[-1] for rates in self.rates.values())

    def close(self) -> None:
        for file in self._files:
            os.close(file.descriptor)

    def _read(self, num_threads: int, seconds: float) -> float:
        started = time.perf_counter()
        end, counts, errors = started + seconds, [0] * num_threads, []

        def work(number: int) -> None:
            with mmap.mmap(-1, PIECE_BYTES) as buffer:  # aligned to pages, as direct reads require
                try:
                    while True:
                        with self._lock:
                            file, offset = next(self._places)
                        counts[number] += file.read(buffer, offset)
                        if time.perf_counter() > end:
                            return
                except OSError as error:
                    errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return sum(counts) / (time.perf_counter() - started)

    def _endless_places(self) -> "Iterator[tuple[_File, int]]":
        for file in itertools.cycle([file for file in self._files if file.size]):
            for offset in range(0, file.size, PIECE_BYTES):
                yield file, offset


class LinkBandwidth:
    """Bytes per second of copies from host memory to a device: the limit of a pass whose weights are on the host.

    Copies from pinned memory run back to back in one stream, as the copies of streamed layers do.
    """

    def __init__(self, link: DeviceTransfer, num_bytes: int = 64 * 2**20) -> None:
        self._link, self._num_bytes, self._way = link, num_bytes, f"{num_bytes / 2**20:g} MiB"
        self._pairs = [(pages(num_bytes), link.buffer(num_bytes)) for _ in range(2)]
        for host, _ in self._pairs:
            host.fill_(1)  # pages that were never written may all map to one
            link.pin(host)
        self.rates: dict[str, list[float]] = {self._way: []}

    @property
    def is_direct(self) -> bool:
        """True, since no cache is in between."""
        return True

    def measure(self, seconds: float) -> float:
        """Copy for about the given number of seconds, and return the bytes per second."""
        started, num_copied, spent = time.perf_counter(), 0, 0.0
        while not num_copied or time.perf_counter() < started + seconds:
            copies = [self._link.copy(host, there, None) for _ in range(_COPIES) for host, there in self._pairs]
            copies[-1].done.synchronize()
            spent += copies[0].started.elapsed_time(copies[-1].done) / 1000
            num_copied += len(copies)
        self.rates[self._way].append(num_copied * self._num_bytes / spent)
        return self.rates[self._way][-1]

    def close(self) -> None:
        """Release the memory."""
        self._link.finish()
        for host, _ in self._pairs:
            self._link.unpin(host)
        self._pairs = []


class _File:
    """File that is open for direct reads, or for plain reads if the file system has no direct ones."""

    def __init__(self, path: Path) -> None:
        try:
            self.descriptor, self.is_direct = os.open(path, os.O_RDONLY | os.O_DIRECT), True
        except OSError:
            self.descriptor, self.is_direct = os.open(path, os.O_RDONLY), False
        self.size = os.fstat(self.descriptor).st_size

    def read(self, buffer: mmap.mmap, offset: int) -> int:
        if not self.is_direct:
            os.posix_fadvise(self.descriptor, offset, PIECE_BYTES, os.POSIX_FADV_DONTNEED)
        return os.preadv(self.descriptor, [buffer], offset)


def _name(num_threads: int) -> str:
    return f"{num_threads} thread{'s' if num_threads > 1 else ''}"
