"""Threads that read prompts for an event loop, shared evenly by tenants."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from specinfer.core.cpus import usable_cpus
from specinfer.core.errors import EngineDeadError, QueueFullError
from specinfer.core.systems import call_c, lower_thread_priority

T = TypeVar("T")

_LONG = 2**17  # bytes of a request from which on it is read at a lower priority
_NUM_WAITING = 4  # threads for grammars, which wait for the processes that try these first


class ReadPools:
    """Threads for requests of usual length, and others for long texts and for grammars, so that nobody waits for these.

    A megabyte of text takes a second and some 250 MiB to tokenize. So only few of these are read at once, at a lower
    priority than the engine's, and their memory is returned to the system, which the allocator would keep.

    Args:
        max_waiting: Number of actions of one tenant that may wait in each pool.
    """

    def __init__(self, max_waiting: int) -> None:
        cpus = usable_cpus()
        self._short = ReadPool(max_waiting, max(2, min(cpus, 4)))
        self._long = ReadPool(max_waiting, max(1, min(cpus, 8) // 4), lower_thread_priority)
        self._grammars = ReadPool(max_waiting, _NUM_WAITING)
        self._pools = (self._short, self._long, self._grammars)

    async def run(
        self, action: Callable[[], T], tenant: str = "", *, num_bytes: int = 0, has_grammar: bool = False
    ) -> T:
        """Run an action for a request of this many bytes, or one that compiles a grammar; see `ReadPool.run`."""
        if num_bytes >= _LONG:
            return await self._long.run(lambda: _run_and_trim(action), tenant)
        return await (self._grammars if has_grammar else self._short).run(action, tenant)

    @property
    def age(self) -> float:
        """Seconds since the oldest of the running actions began; 0 if there is none."""
        return max(pool.age for pool in self._pools)

    async def close(self, timeout: float) -> bool:
        """Refuse all further actions, and return whether those that run ended in time."""
        return all(await asyncio.gather(*(pool.close(timeout) for pool in self._pools)))


def _run_and_trim(action: Callable[[], T]) -> T:
    try:
        return action()
    finally:
        call_c("malloc_trim", 0)  # of glibc


class ReadPool:
    """Threads that run actions with tokenizers, templates and grammars. All methods belong to one event loop.

    Tenants take turns, and one thread of several is left to the others: prompts of one tenant do not delay another's.
    The tokenizers and grammar libraries release Python's lock while they work.

    Args:
        max_waiting: Number of actions of one tenant that may wait.
        prepare: Function that each thread calls at its start.
    """

    def __init__(self, max_waiting: int, num_threads: int, prepare: Callable[[], None] | None = None) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "specinfer-reader", initializer=prepare)
        self._max_waiting = max_waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next in turn first
        self._num_running: Counter[str] = Counter()  # by tenant
        self._began: dict[Future[Any], float] = {}  # actions that run, and when they began
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
        running = self._threads.submit(action)
        self._began[running] = time.monotonic()
        result = asyncio.wrap_future(running)
        result.add_done_callback(lambda _: self._end(tenant, running))
        return await asyncio.shield(result)  # the thread is taken until the action ends, whoever waits for it

    @property
    def age(self) -> float:
        """Seconds since the oldest of the running actions began; 0 if there is none."""
        return time.monotonic() - min(self._began.values()) if self._began else 0.0

    async def close(self, timeout: float) -> bool:
        """Refuse all further actions, and return whether those that run ended in time."""
        self._is_closed = True
        for turns in self._waiting.values():
            for turn in turns:
                if not turn.done():
                    turn.set_result(None)
        self._threads.shutdown(wait=False, cancel_futures=True)
        _, left = await asyncio.to_thread(wait, list(self._began), timeout)
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
            self._began.pop(running, None)
        self._num_running[tenant] -= 1
        if not self._num_running[tenant]:
            del self._num_running[tenant]
        self._give_turns()
