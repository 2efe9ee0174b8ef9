"""A thread that writes, so that nobody waits for a slow disk, a terminal or a pipe that is not read."""

import queue
import threading
import time
from collections.abc import Callable


class BackgroundWriter:
    """A thread that does what it is given, in order; what does not fit into its bounded queue is dropped and counted.

    Args:
        limit: The number of actions that may wait.

    Attributes:
        num_dropped: The number of actions that were dropped; whoever reports it sets it to 0.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._actions: queue.Queue[Callable[[], None] | None] = queue.Queue(limit)
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """True if nothing waits."""
        return self._actions.empty()

    def put(self, action: Callable[[], None]) -> bool:
        """Give the thread something to do, which must not fail; return False if it was dropped."""
        try:
            self._actions.put_nowait(action)
        except queue.Full:
            self.num_dropped += 1
            return False
        return True

    def flush(self, seconds: float) -> None:
        """Wait for this time until all is done."""
        until = time.monotonic() + seconds
        while self._actions.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.001)

    def close(self) -> None:
        """Wait until all is done, and end the thread."""
        self._actions.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            action()
            self._actions.task_done()
