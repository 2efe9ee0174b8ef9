"""How fast the disk gives files to programs that read past the page cache: the limit of a pass whose weights lie there.

Sequential direct reads of pieces as large as layers are read in, by one thread and by as many as read layers: which is
faster depends on the device. A disk that is shared gives now more, now less, so each round is kept beside the best.
"""

import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from specinfer.model.offload.direct import CHUNK
from specinfer.model.offload.stream import NUM_READERS

NUM_THREADS = (1, NUM_READERS)
PIECE_BYTES = CHUNK
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_DROP_PAGES = "1"  # of proc(5): the page cache only


class DiskBandwidth:
    """Ways to read these files, and bytes per second of each, round by round.

    Args:
        files: Read from their beginnings to their ends, one after another, again and again; a round goes on where the
            one before stopped, so that no layer below has them at hand.

    Raises:
        OSError: One cannot be opened.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.rates: dict[str, list[float]] = {_name(count): [] for count in NUM_THREADS}
        self._files = [_File(path) for path in files]
        self._places = self._endless_places()
        self._lock = threading.Lock()
        assert any(file.size for file in self._files)

    @property
    def is_direct(self) -> bool:
        """Whether the file system allows direct reads; else the page cache may have had its part."""
        return all(file.is_direct for file in self._files)

    def measure(self, seconds: float) -> float:
        """Each way once more, for so long each; bytes per second of the fastest."""
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
            with mmap.mmap(-1, PIECE_BYTES) as buffer:  # aligned to pages, as direct reads need it
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


class _File:
    """Open for direct reads, or for plain ones where the file system has no others."""

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


def forget_pages(files: Sequence[Path]) -> None:
    """Leaves nothing of these files in the page cache, as far as nobody has them mapped and the system allows it."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # pages not written yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    try:
        DROP_CACHES.write_text(_DROP_PAGES)
    except OSError:  # only an administrator may
        return


def _name(num_threads: int) -> str:
    return f"{num_threads} thread{'s' if num_threads > 1 else ''}"
