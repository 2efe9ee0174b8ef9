"""Triton's cache of compiled kernels, for disks that become full: Triton writes files to compile, during passes too."""

from pathlib import Path
from typing import Any

from triton.runtime.cache import FileCacheManager

from specinfer.ops.triton import temporary_folder


class SpareCache(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """The files of one kernel; those that cannot be written to the usual folder are in a temporary one."""

    key: str
    cache_dir: str

    def __init__(self, key: str, **options: bool) -> None:
        try:
            super().__init__(key, **options)
        except OSError as error:
            self._move(error)

    def put(self, data: Any, filename: str, **options: bool) -> str:
        """Write a file and return its path."""
        try:
            return str(super().put(data, filename, **options))
        except OSError as error:
            self._move(error)
        return str(super().put(data, filename, **options))

    def _move(self, error: OSError) -> None:
        """Write to a temporary folder from now on; files that are in the usual one stay there."""
        folder = temporary_folder(Path(self.cache_dir).parent, error) / self.key
        folder.mkdir(exist_ok=True)
        self.cache_dir, self.lock_path = str(folder), str(folder / "lock")
