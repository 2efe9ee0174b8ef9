"""Files that are written completely or not at all."""

import os
import threading
from collections.abc import Callable
from pathlib import Path


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
