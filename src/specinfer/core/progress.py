"""Progress of long work: loading, timing the passes of a streamed target, compiling kernels, and capturing passes."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

# Receives the name of the work, the bytes done and the total bytes; for names in `UNITS`, numbers of these instead.
# It is called by the thread that does the work, and must be quick.
ProgressCallback: TypeAlias = Callable[[str, int, int], None]
CAPTURING = "capturing passes"
COMPILING = "compiling kernels"
ACCEPTANCE = "measuring acceptance"
UNITS = {CAPTURING: "sizes", COMPILING: "kernels", ACCEPTANCE: "tokens"}  # by the first words of a name
DOWNLOADING = "downloading"


def gigabytes(num_bytes: float, seconds: float) -> str:
    """Return the amount read and its rate as text."""
    return f"{num_bytes / 1e9:.1f} GB at {num_bytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"


def begin(progress: ProgressCallback | None, name: str) -> None:
    """Report the beginning of work that counts nothing."""
    if progress is not None:
        progress(name, 0, 0)


def progress_of(progress: ProgressCallback | None, name: str) -> Callable[[int, int], None]:
    """Return a callback of the numbers done and in all, for work with this name."""
    return (lambda done, total: None) if progress is None else partial(progress, name)


def unit_of(name: str) -> str | None:
    """Return what the progress of a name counts, or None for bytes."""
    return next((unit for work, unit in UNITS.items() if name.startswith(work)), None)


def how_much(name: str, done: int, total: int, seconds: float) -> str:
    """Return the reported progress as text."""
    if (unit := unit_of(name)) is not None:
        return f"{done} of {total} {unit}"
    return f"{gigabytes(done, seconds)}, {total / 1e9:.1f} GB in all"
