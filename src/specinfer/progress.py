"""How far work is that takes long: loading, and timing passes of a target that is streamed."""

from collections.abc import Callable
from typing import TypeAlias

# What is being done, the bytes done of it, and the bytes in all. Called by who does it; it must be quick.
Tell: TypeAlias = Callable[[str, int, int], None]


def gigabytes(num_bytes: float, seconds: float) -> str:
    """How much was read, and how fast."""
    return f"{num_bytes / 1e9:.1f} GB at {num_bytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"
