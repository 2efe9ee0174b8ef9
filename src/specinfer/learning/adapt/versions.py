"""Versions of a drafter on disk: ordinary Hugging Face folders next to one another, each written atomically.

A folder is named by the checksum of the drafter it came from and a number, `0123456789ab-000003`, and contains a list
of checksums of its own files. The drafter's own folder is only read.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from specinfer.core.files import TemporaryFolder
from specinfer.core.systems import lock_file

logger = logging.getLogger(__name__)
RECORD = "adapted.json"
_PARTIAL = ".partial-"
_PRIVATE = 0o700  # weights reveal something about the traffic they were trained on


class AdaptationFolder:
    """The folder of adapted drafters: the user's folder, for one engine at a time, or a temporary one.

    Args:
        drafters: The drafters' own folders, which are only read.

    Raises:
        ValueError: The user's folder cannot be used; the message says why.
    """

    def __init__(self, folder: str | Path | None, drafters: Sequence[Path] = ()) -> None:
        if folder is None:
            temporary = TemporaryFolder("adapt")
            self.path = temporary.path
            self._end: Callable[[], object] = temporary.close
            return
        self.path = Path(folder).expanduser()
        if self.path.resolve() in {drafter.resolve() for drafter in drafters}:
            raise ValueError(f"adapt_dir: {self.path} is a drafter's own folder; name another")
        try:
            self.path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ValueError(
                f"adapt_dir: {self.path} cannot be written ({error.strerror}); name a folder that can"
            ) from error
        try:
            lock_file(lock)
        except OSError as error:
            os.close(lock)
            raise ValueError(f"adapt_dir: {self.path} is in use by another engine; name another folder") from error
        self._end = weakref.finalize(self, partial(os.close, lock))

    def close(self) -> None:
        """Unlock the user's folder, or remove the temporary one."""
        self._end()


class Versions:
    """Adapted versions of one drafter, the newest last.

    Args:
        root: The folder that contains them.
        origin: The folder of the drafter itself.
    """

    def __init__(self, root: Path, origin: Path) -> None:
        self._root = root
        self.origin = origin
        weights = [*origin.glob("*.safetensors"), *origin.glob("*.gguf")] or [*origin.glob("*.bin")]
        self._sum = _digest(sorted([origin / "config.json", *weights]))
        for left in root.glob(f"{_PARTIAL}*"):  # left by a process that was killed
            shutil.rmtree(left, ignore_errors=True)

    def stored(self) -> Iterator[Path]:
        """Yield intact versions, the newest first; damaged ones are skipped with a warning."""
        for folder in reversed(self._folders()):
            if self._is_whole(folder):
                yield folder
            else:
                logger.warning("adapt_dir: %s is damaged and skipped; it can be deleted", folder)

    def write(self, save: Callable[[Path], None]) -> Path:
        """Create a folder with what `save` writes into it; it becomes a version only with `store`.

        Raises:
            OSError, SafetensorError: The folder cannot be written; nothing is left of it.
        """
        written = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self._root))
        try:
            save(written)
            files = {file.name: _digest([file]) for file in sorted(written.iterdir())}
            (written / RECORD).write_text(
                json.dumps({"origin": self._sum, "files": files}, indent=2) + "\n", encoding="utf-8"
            )
        except BaseException:
            self.drop(written)
            raise
        return written

    def store(self, written: Path) -> Path:
        """Make it the newest version, atomically, and return its new path."""
        number = max((int(folder.name[-6:]) for folder in self._folders()), default=0) + 1
        return written.rename(self._root / f"{self._sum[:12]}-{number:06d}")

    def drop(self, folder: Path) -> None:
        """Remove a version; never the drafter itself."""
        if folder.parent == self._root:
            shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return sorted(self._root.glob(f"{self._sum[:12]}-" + "[0-9]" * 6))

    def _is_whole(self, folder: Path) -> bool:
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            files = record["files"]
            return record["origin"] == self._sum and all(_digest([folder / name]) == files[name] for name in files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False


def _digest(files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            total.update(hashlib.file_digest(content, "sha256").digest())
    return total.hexdigest()
