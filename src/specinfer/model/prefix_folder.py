"""PrefixFolder: blocks of cached prefixes as files, which outlast the process.

A file is named by the key of its block, a hash of the model, the salt and all tokens up to its end. It is written under
another name and renamed, so processes may share a folder without locks: each reads what others wrote, and a file that
another has removed is a miss. One that is cut, damaged or foreign is removed and named once in the log. The least
recently used files make way for new ones; the time of use is that of the file. A thread writes, so that no step waits
for the disk; where it cannot keep up, or the disk is full, blocks are not kept.
"""

import contextlib
import errno
import logging
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specinfer.core.files import is_private, with_home
from specinfer.model.prefix_file import HEADER_BYTES, Block, DamagedFileError, read_block, write_block

logger = logging.getLogger(__name__)
_FOLDER = "prefixes-1"  # the number is that of the format
_ENDING = ".prefix"
_UNFINISHED = re.compile(rf"\.[0-9a-f]{{64}}{re.escape(_ENDING)}-[0-9]+-[0-9]+")
_OF_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # errors that say nothing about a file
_MAX_PENDING = 64 << 20  # bytes that wait to be written
_PAUSE = 60.0  # seconds without a write after one that failed
_SCAN_AGE = 1.0  # seconds after which other processes may have written or removed much
_STALE = 3600.0  # seconds after which an unfinished file is that of a process that was killed


@dataclass(slots=True)
class _File:
    num_bytes: int
    last_used: int  # in nanoseconds since 1970


class PrefixFolder:
    """A folder of blocks, with a limit on their bytes.

    Raises:
        ValueError: The folder cannot be used; the message names the setting.
    """

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self.path, self.max_bytes = with_home("prefix_cache_dir", folder) / _FOLDER, max_bytes
        self.num_read_tokens = 0  # that requests found here
        self._lock = threading.Lock()  # of all that follows
        self._files: dict[bytes, _File] = {}
        self._pending: dict[bytes, int] = {}  # bytes of blocks that wait, by key
        self._scanned = 0.0
        self._paused_until = 0.0
        self._has_warned: set[str] = set()
        self._jobs: queue.SimpleQueue[Block | Sequence[bytes] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        _make_private(self.path)
        self._scan()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, those of other processes as of the last look."""
        with self._lock:
            return sum(file.num_bytes for file in self._files.values())

    def has(self, key: bytes) -> bool:
        """Return whether there is a block, or will be once what waits is written."""
        with self._lock:
            if key in self._files or key in self._pending:
                return True
        try:
            status = self._path_of(key).stat()
        except OSError:
            return False
        with self._lock:  # another process wrote it
            self._files[key] = _File(status.st_size, status.st_mtime_ns)
        return True

    def will_read(self, keys: Sequence[bytes]) -> None:
        """Let the system begin to read these blocks."""
        if not hasattr(os, "posix_fadvise"):
            return
        for key in keys:
            with contextlib.suppress(OSError), self._path_of(key).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def read(self, key: bytes, num_tokens: int, buffer: memoryview, sizes: tuple[int, int]) -> int | None:
        """Read the body of a block into a buffer.

        Args:
            sizes: Bytes of a body without states, and of the states.

        Returns:
            The `state_end` of the block, or None if it is not there or was refused.
        """
        try:
            return read_block(self._path_of(key), key, num_tokens, buffer, sizes)
        except FileNotFoundError:  # it waits to be written, or another process removed it
            self._forget(key)
            return None
        except DamagedFileError as error:
            fault: object = error
        except OSError as error:
            if error.errno in _OF_PROCESS:
                return None
            fault = f"it cannot be read ({error.strerror})"
        self._warn("damaged", "prefix cache: %s is removed: %s", self._path_of(key), fault)
        self._remove(key)
        return None

    def has_room(self, size: int) -> bool:
        """Return whether a block of this size may wait to be written, or not be kept, without taking much memory."""
        with self._lock:
            return not self._pending or sum(self._pending.values()) + size <= _MAX_PENDING

    @property
    def is_paused(self) -> bool:
        """True after a write that failed: blocks are not kept for a while."""
        return time.monotonic() < self._paused_until

    def put(self, block: Block) -> None:
        """Write a block later."""
        with self._lock:
            self._pending[block.key] = block.body.nbytes
            self._start()
        self._jobs.put(block)

    def use(self, chain: Sequence[bytes]) -> None:
        """Note that the blocks of a chain were used; the first counts as the last used, since others need it."""
        with self._lock:
            self._start()
        self._jobs.put(tuple(chain))

    def close(self, seconds: float = 10.0) -> None:
        """Write what waits, for so long at most, and end the thread. Later blocks start another one."""
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            self._jobs.put(None)
            writer.join(seconds)

    # ------------------------------------------------------------------------------- in the writer's thread

    def _start(self) -> None:
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="prefix-writer", daemon=True)
            self._writer.start()

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not isinstance(job, Block):
                self._touch(job)
                continue
            try:
                self._write(job)
            except OSError as error:
                self._paused_until = time.monotonic() + _PAUSE
                self._warn("full", "prefix cache: %s cannot be written (%s); it is tried again", self.path, error)
            except Exception:
                logger.exception("prefix cache: a block cannot be written")
            finally:
                with self._lock:
                    self._pending.pop(job.key, None)

    def _write(self, block: Block) -> None:
        with self._lock:
            is_useless = block.key in self._files or (block.chain and block.chain[-1] not in self._files)
        size = HEADER_BYTES + block.body.nbytes
        if not is_useless and block.is_sound() and self._make_room(size, {*block.chain, block.key}):
            write_block(self._path_of(block.key), block)
            with self._lock:
                self._files[block.key] = _File(size, time.time_ns())

    def _touch(self, chain: Sequence[bytes]) -> None:
        now = time.time_ns()
        for depth, key in enumerate(chain):
            used = now - depth
            with contextlib.suppress(OSError):
                os.utime(self._path_of(key), ns=(used, used))
            with self._lock:
                if key in self._files:
                    self._files[key].last_used = used

    def _make_room(self, size: int, needed: set[bytes]) -> bool:
        """Remove the least recently used files, but none that is needed; return whether a file of this size fits."""
        if time.monotonic() - self._scanned > _SCAN_AGE or self.num_bytes + size > self.max_bytes:
            self._scan()
        with self._lock:
            excess = sum(file.num_bytes for file in self._files.values()) + size - self.max_bytes
            oldest = sorted((file.last_used, key) for key, file in self._files.items() if key not in needed)
        for _, key in oldest if excess > 0 else ():
            excess -= self._remove(key)
            if excess <= 0:
                break
        return excess <= 0

    # ------------------------------------------------------------------------------- the files

    def _path_of(self, key: bytes) -> Path:
        return self.path / f"{key.hex()}{_ENDING}"

    def _scan(self) -> None:
        """Look at all files, and remove unfinished ones of processes that are gone."""
        files: dict[bytes, _File] = {}
        now = time.time()
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                with contextlib.suppress(OSError, ValueError):
                    status = entry.stat(follow_symlinks=False)
                    if _UNFINISHED.fullmatch(entry.name):
                        if now - status.st_mtime > _STALE:
                            os.unlink(entry.path)
                    elif entry.name.endswith(_ENDING):
                        key = bytes.fromhex(entry.name.removesuffix(_ENDING))
                        files[key] = _File(status.st_size, status.st_mtime_ns)
        with self._lock:
            self._files = files
        self._scanned = time.monotonic()

    def _forget(self, key: bytes) -> int:
        with self._lock:
            file = self._files.pop(key, None)
        return 0 if file is None else file.num_bytes

    def _remove(self, key: bytes) -> int:
        """Remove a file and return its bytes."""
        with contextlib.suppress(OSError):
            self._path_of(key).unlink()
        return self._forget(key)

    def _warn(self, kind: str, text: str, *values: object) -> None:
        """Log a kind of problem once."""
        if kind not in self._has_warned:
            self._has_warned.add(kind)
            logger.warning(text, *values)


def _make_private(path: Path) -> None:
    """Make a folder that only this user can read.

    Raises:
        ValueError: It cannot be made or written, or is that of another user.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()  # a link, which another user may have placed, could lead anywhere
    except OSError as error:
        raise ValueError(
            f"prefix_cache_dir: {path.parent} cannot be used ({error.strerror}); name a folder that can be written"
        ) from error
    if stat.S_ISLNK(status.st_mode):
        raise ValueError(f"prefix_cache_dir: {path} is a link; remove it, and name the folder that it leads to")
    if not is_private(status):
        raise ValueError(
            f"prefix_cache_dir: {path} is open to other users, who could read prompts in it or change them; remove it, "
            "or give it to this user with mode 700"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"prefix_cache_dir: {path} cannot be written; name another folder")
