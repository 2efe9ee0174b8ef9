"""How far work is that takes long: loading, timing passes of a target that is streamed, and capturing passes."""

from collections.abc import Callable
from typing import TypeAlias

# What is being done, the bytes done of it, and the bytes in all; of `CAPTURING` sizes of passes instead. Called by who
# does it; it must be quick.
ProgressCallback: TypeAlias = Callable[[str, int, int], None]
CAPTURING = "capturing passes"


def gigabytes(num_bytes: float, seconds: float) -> str:
    """How much was read, and how fast."""
    return f"{num_bytes / 1e9:.1f} GB at {num_bytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"


def how_much(name: str, done: int, total: int, seconds: float) -> str:
    """What was told, in words."""
    if name.startswith(CAPTURING):
        return f"{done} of {total} sizes"
    return f"{gigabytes(done, seconds)}, {total / 1e9:.1f} GB in all"
