"""Threads that read prompts, or wait for processes that do, shared evenly by tenants."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from specinfer.core.bounded_process import Caller
from specinfer.core.errors import EngineDeadError, QueueFullError
from specinfer.core.systems import usable_cpus

T = TypeVar("T")

_LONG_BYTES = 1 << 17  # of a request from which on it is read apart from others
_NUM_WAITING = 4  # threads for grammars
_GRACE = 0.5  # seconds that the work for a caller who has left goes on: a process takes as long to start


class ReadPools:
    """Threads for requests of usual length, and others for long texts and for grammars, so that nobody waits for these.

    Args:
        max_waiting: Number of actions of one tenant that may wait in each pool.
    """

    def __init__(self, max_waiting: int) -> None:
        cpus = usable_cpus()
        self._short = ReadPool(max_waiting, max(2, min(cpus, 4)))
        self._long = ReadPool(max_waiting, max(1, min(cpus, 8) // 4))
        self._grammars = ReadPool(max_waiting, _NUM_WAITING)
        self._pools = (self._short, self._long, self._grammars)

    async def run(
        self,
        action: Callable[[], T],
        tenant: str = "",
        *,
        num_bytes: int = 0,
        has_grammar: bool = False,
        is_brief: bool = False,
    ) -> T:
        """Run an action for a request of this many bytes, or one that compiles a grammar; see `ReadPool.run`.

        One that `is_brief` takes less time than a thread's turn, and runs in the event loop.
        """
        if is_brief:
            await asyncio.sleep(0)  # it takes turns with everything else
            return action()
        pool = self._long if num_bytes >= _LONG_BYTES else self._grammars if has_grammar else self._short
        return await pool.run(action, tenant)

    @property
    def age(self) -> float:
        """Seconds since the oldest of the running actions began; 0 if there is none."""
        return max(pool.age for pool in self._pools)

    async def close(self, timeout: float) -> bool:
        """Refuse all further actions, and return whether those that run ended in time."""
        return all(await asyncio.gather(*(pool.close(timeout) for pool in self._pools)))


class ReadPool:
    """Threads that run actions with tokenizers, templates and grammars. All methods belong to one event loop.

    Tenants take turns, and one thread of several is left to the others: prompts of one tenant do not delay another's.

    Args:
        max_waiting: Number of actions of one tenant that may wait.
    """

    def __init__(self, max_waiting: int, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "specinfer-reader")
        self._max_waiting = max_waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next in turn first
        self._num_running: Counter[str] = Counter()  # by tenant
        self._running: dict[Future[Any], tuple[float, Caller]] = {}  # actions, and when they began
        self._is_closed = False

    async def run(self, action: Callable[[], T], tenant: str = "") -> T:
        """Run an action in one of the threads when it is the tenant's turn. A caller that leaves loses its turn.

        Raises:
            QueueFullError: Too many actions of this tenant wait.
            EngineDeadError: The pool is closed.
        """
        waiting = self._waiting.setdefault(tenant, deque())
        if len(waiting) >= self._max_waiting:
            raise QueueFullError(f"{len(waiting)} prompts wait to be read already; try again later")
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(turn, tenant)
            else:  # its turn came at the same moment
                self._end(tenant)
            raise
        if self._is_closed:
            raise EngineDeadError("the engine has ended")
        caller = Caller()
        running = self._threads.submit(caller.run, action)
        self._running[running] = time.monotonic(), caller
        result = asyncio.wrap_future(running)

        def ended(_: asyncio.Future[T]) -> None:
            self._end(tenant, running)
            if not result.cancelled():
                result.exception()  # asyncio logs one that nobody has asked for, such as a caller that has left

        result.add_done_callback(ended)
        try:
            return await asyncio.shield(result)  # the thread is taken until the action ends, whoever waits for it
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(_GRACE, caller.leave)
            raise

    @property
    def age(self) -> float:
        """Seconds since the oldest of the running actions began; 0 if there is none."""
        return time.monotonic() - min(began for began, _ in self._running.values()) if self._running else 0.0

    async def close(self, timeout: float) -> bool:
        """Refuse all further actions, and return whether those that run ended in time."""
        self._is_closed = True
        for turns in self._waiting.values():
            for turn in turns:
                if not turn.done():
                    turn.set_result(None)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for _, caller in self._running.values():
            caller.leave()
        _, left = await asyncio.to_thread(wait, list(self._running), timeout)
        return not left

    def _give_turns(self) -> None:
        """Let as many actions begin as there are threads for."""
        most = max(self._num_threads - 1, 1)
        while self._num_running.total() < self._num_threads:
            tenant = next((name for name in self._waiting if self._num_running[name] < most), None)
            if tenant is None:
                return
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind all others
            if not turn.done():
                self._num_running[tenant] += 1
                turn.set_result(None)

    def _forget(self, turn: "asyncio.Future[None]", tenant: str) -> None:
        turns = self._waiting.get(tenant, deque())
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._waiting.pop(tenant, None)

    def _end(self, tenant: str, running: Future[Any] | None = None) -> None:
        """Note that an action has ended."""
        if running is not None:
            self._running.pop(running, None)
        self._num_running[tenant] -= 1
        if not self._num_running[tenant]:
            del self._num_running[tenant]
        self._give_turns()
