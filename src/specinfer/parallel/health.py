"""Whether the other ranks live: each counts up in the store, from a thread, and looks at who does not.

A process that dies closes its connections, and who waits for it is told by the system. One that hangs, or a machine
that is cut off, is found only because its count stands still.
"""

import contextlib
import ctypes
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
STALE_BEATS = 6  # looks in a row at which a count stood still: 3 seconds
LOADING_BEATS = 60  # while models are loaded: threads may have to wait for native code then
_CUT_OFF_BEATS = 30  # looks in a row without an answer of the store: 15 seconds; rank 0 may only be stopped
_PR_SET_PDEATHSIG = 1


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def error_key(rank: int) -> str:
    """Where a rank that fails says why."""
    return f"error/{rank}"


class Pulse:
    """A thread that counts up for this rank as long as the process runs.

    Args:
        store: A connection of its own.
        lost: Called once, in a thread, when the store cannot be reached any more: rank 0 is gone.
    """

    def __init__(self, store: Any, rank: int, lost: Callable[[str], None]) -> None:
        self._store, self._rank, self._lost = store, rank, lost
        self._num_beats = 0
        self._stopped = threading.Event()
        for work in (self._beat, self._watch):
            threading.Thread(target=work, name=f"specinfer-{work.__name__.strip('_')}", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        try:
            while not self._stopped.is_set():
                self._store.add(_beat_key(self._rank), 1)
                self._num_beats += 1
                self._stopped.wait(BEAT_SECONDS)
        except RuntimeError:
            self._lose("its connection was closed")

    def _watch(self) -> None:
        """The store's own calls have no limit of time. Looks are counted as in `Watch`."""
        last = still = 0
        while not self._stopped.wait(BEAT_SECONDS):
            still = still + 1 if self._num_beats == last else 0
            last = self._num_beats
            if still > _CUT_OFF_BEATS:
                self._lose(f"it has not answered for {_CUT_OFF_BEATS * BEAT_SECONDS:.0f} seconds")

    def _lose(self, why: str) -> None:
        if not self._stopped.is_set():
            self._stopped.set()
            self._lost(f"rank 0 is gone: {why}")


class Watch:
    """Looks whether counts go on. Looks are counted, not seconds: a process that was stopped itself blames nobody."""

    def __init__(self, store: Any, ranks: Sequence[int]) -> None:
        self._store = store
        self._counts = dict.fromkeys(ranks, 0)
        self._still = dict.fromkeys(ranks, 0)
        self.limit = LOADING_BEATS

    def look(self) -> str | None:
        """Once every `BEAT_SECONDS`: what is wrong with a rank; None: nothing."""
        if (said := self.said()) is not None:
            return said
        for rank in self._counts:
            count = self._store.add(_beat_key(rank), 0)
            # One that has not begun to count is on its way; how long that may take is the meeting's concern.
            self._still[rank] = self._still[rank] + 1 if count and count == self._counts[rank] else 0
            self._counts[rank] = count
            if self._still[rank] > self.limit:
                return f"rank {rank} does not answer"
        return None

    def said(self) -> str | None:
        """What a rank that failed has left; those that only met its end leave nothing."""
        for rank in self._counts:
            if self._store.check([error_key(rank)]):
                said: bytes = self._store.get(error_key(rank))
                return f"rank {rank}: {said.decode(errors='replace')}"
        return None


def die_with_parent() -> None:
    """The system kills this process, even a stopped one, when the thread that started it ends. On Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
