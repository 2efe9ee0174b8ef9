"""Files: texts that settings name, the folder of the cache, and writes that are complete or do not happen."""

import os
import threading
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """Return SpecInfer's folder in the user's cache, which XDG_CACHE_HOME may move. It need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specinfer"


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
