"""Files: texts that settings name, the folder of the cache, and writes that are complete or do not happen."""

import contextlib
import os
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from specinfer.core.systems import lock_file

_LOCK = ".lock"  # held while a temporary folder is used
_YOUNG = 60.0  # seconds; a younger folder may not be locked yet


def cache_folder() -> Path:
    """Return SpecInfer's folder in the user's cache, which XDG_CACHE_HOME may move. It need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specinfer"


def with_home(name: str, path: str | Path) -> Path:
    """Return a path that a setting names, with the home folder in the place of ~ at its beginning.

    Raises:
        ValueError: There is no such user; the message names the setting.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name}: {str(path)!r:.200} names the home folder of no user; give the full path") from error


def write_atomically(path: Path, write: Callable[[Path], object], *, is_shared: bool = False) -> None:
    """Call `write` with a name next to `path`, and move what it wrote into place.

    Args:
        is_shared: Others may write the file at the same time; the last one wins. Otherwise the next write overwrites
            one that was interrupted.

    Raises:
        OSError: The file cannot be written; an existing file stays as it was.
    """
    suffix = f"{os.getpid()}-{threading.get_ident()}" if is_shared else "partial"
    partial = path.with_name(f".{path.name}-{suffix}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_text(name: str, path: str | Path) -> str:
    """Return the text of a file that a setting names.

    Raises:
        ValueError: It cannot be read, or is not text; the message names the setting.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {path} is not UTF-8 text") from error


def is_private(status: os.stat_result) -> bool:
    """Return whether a path of this `lstat` is a folder, and no link, that only this user can enter."""
    is_own = not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o077)
    return stat.S_ISDIR(status.st_mode) and is_own


class TemporaryFolder:
    """A private folder, removed when it is closed or when the process ends.

    What a process that was killed has left is removed when the next folder of its kind is made.

    Args:
        kind: Word for its name.
    """

    def __init__(self, kind: str) -> None:
        prefix = f"specinfer-{kind}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_LOCK}"):
            with contextlib.suppress(OSError):  # it is in use, another's, or gone
                _remove_unused(left)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        lock_file(lock)
        self._end = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        self._end()


def _remove_unused(lock_path: Path) -> None:
    """Remove the folder of a lock that nobody holds.

    Raises:
        OSError: It is in use, or another user's.
    """
    lock = os.open(lock_path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    try:
        lock_file(lock)
        if time.time() - os.fstat(lock).st_mtime > _YOUNG:
            shutil.rmtree(lock_path.parent)  # follows no links
    finally:
        os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
