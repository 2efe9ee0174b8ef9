"""Health checks between ranks: each rank's thread counts up in the store, and rank 0 watches for stopped counts.

A process that dies closes its connections, and the system notifies those that wait for it. A process that hangs, or a
machine that is cut off, is found only because its count stops.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from specinfer.parallel.rendezvous import Store

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
STALE_BEATS = 6  # checks in a row at which a count has not changed: 3 seconds
LOADING_BEATS = 60  # the limit while models are loaded, when threads may have to wait for native code
_CUT_OFF_BEATS = 30  # checks in a row without an answer of the store: 15 seconds; rank 0 may only be suspended


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def error_key(rank: int) -> str:
    """Return the store's key under which a failed rank leaves its error."""
    return f"error/{rank}"


class Heartbeat:
    """A heartbeat: a thread that counts up for this rank as long as the process runs.

    Args:
        store: A separate connection to the store.
        lost: Function called once, in a thread, when the store cannot be reached any more because rank 0 is lost.
    """

    def __init__(self, store: Store, rank: int, lost: Callable[[str], None]) -> None:
        self._store, self._rank, self._lost = store, rank, lost
        self._num_beats = 0
        self._stopped = threading.Event()
        self._reported = threading.Lock()  # taken for good by the thread that reports the loss
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
        """Notice a store that hangs: its own calls have no timeout."""
        last = still = 0
        while not self._stopped.wait(BEAT_SECONDS):
            still = still + 1 if self._num_beats == last else 0
            last = self._num_beats
            if still > _CUT_OFF_BEATS:
                self._lose(f"it has not answered for {_CUT_OFF_BEATS * BEAT_SECONDS:.0f} seconds")

    def _lose(self, reason: str) -> None:
        if not self._stopped.is_set() and self._reported.acquire(blocking=False):
            self._stopped.set()
            self._lost(f"rank 0 is gone: {reason}")


class HeartbeatMonitor:
    """A monitor of the other ranks' counts. It counts checks, not seconds, in case its own process was suspended."""

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self._store = store
        self._counts = dict.fromkeys(ranks, 0)
        self._still = dict.fromkeys(ranks, 0)
        self.limit = LOADING_BEATS

    def check(self) -> str | None:
        """Check the ranks; call it every `BEAT_SECONDS`. Return what is wrong with a rank, or None."""
        if (error := self.reported_error()) is not None:
            return error
        for rank in self._counts:
            count = self._store.add(_beat_key(rank), 0)
            # A rank without a count is still starting; the rendezvous limits how long that may take.
            self._still[rank] = self._still[rank] + 1 if count and count == self._counts[rank] else 0
            self._counts[rank] = count
            if self._still[rank] > self.limit:
                return f"rank {rank} does not answer"
        return None

    def reported_error(self) -> str | None:
        """Return the error that a failed rank has left, or None. Ranks that only noticed another's end leave none."""
        for rank in self._counts:
            if (error := self._store.get(error_key(rank))) is not None:
                return f"rank {rank}: {error}"
        return None
