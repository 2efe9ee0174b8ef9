"""Progress of long work: loading, timing the passes of a streamed target, and capturing passes."""

from collections.abc import Callable
from typing import TypeAlias

# Receives the name of the work, the bytes done and the total bytes; for `CAPTURING`, numbers of pass sizes instead.
# It is called by the thread that does the work, and must be quick.
ProgressCallback: TypeAlias = Callable[[str, int, int], None]
CAPTURING = "capturing passes"
DOWNLOADING = "downloading"


def gigabytes(num_bytes: float, seconds: float) -> str:
    """Return the amount read and its rate as text."""
    return f"{num_bytes / 1e9:.1f} GB at {num_bytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"


def how_much(name: str, done: int, total: int, seconds: float) -> str:
    """Return the reported progress as text."""
    if name.startswith(CAPTURING):
        return f"{done} of {total} sizes"
    return f"{gigabytes(done, seconds)}, {total / 1e9:.1f} GB in all"
