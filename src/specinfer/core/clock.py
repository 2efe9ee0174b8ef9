"""Time since the epoch as requests have it: a step of the system's clock changes no duration or deadline."""

import time

_EPOCH = time.time() - time.monotonic()


def epoch_seconds() -> float:
    """Return the seconds since the epoch, by the system's clock at the start of this process, counted evenly since."""
    return _EPOCH + time.monotonic()
