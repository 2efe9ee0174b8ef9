"""Time spent in single calls of native code, in which no other thread of Python can run."""

import sys
import time
from collections.abc import Callable
from typing import Any


def longest_native_call(action: Callable[[], Any]) -> float:
    """Processor time of the longest such call, in seconds; one that gives up the lock meanwhile counts, too."""
    began: list[float] = []
    longest = 0.0

    def watch(_: Any, event: str, __: Any) -> None:
        nonlocal longest
        if event == "c_call":
            began.append(time.thread_time())
        elif event in ("c_return", "c_exception") and began:
            longest = max(longest, time.thread_time() - began.pop())

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return longest
