"""EngineThread: an engine stepped by its own thread, for callers in other threads.

Only that thread uses the engine. Actions of other threads are put into an inbox and run between two steps. While there
is nothing to do, the time can be given to other work, one slice at a time.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from specinfer.core.request import Fault, Request
from specinfer.engine.engine import Engine

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # without work before idle time begins: the next request of a single caller comes sooner
_REST_SECONDS = 0.005
WATCH_SECONDS = 2.0  # between two calls of `watch` under load


class IdleWork(Protocol):
    """Interface of work for the engine's thread in idle time. After a failure it is not called again."""

    def work(self) -> bool:
        """Do one short slice. Return False if there is nothing left until the engine has run again."""
        ...

    def watch(self) -> None:
        """Do short, urgent work. Called between two steps now and then while there is no idle time."""
        ...


class _Action(NamedTuple):
    """An action that another thread asked for."""

    run: Callable[[], None]
    only_adds: bool  # requests, which a pass can take whose trees are drafted


class EngineThread:
    """A thread that steps an engine while it has work.

    Args:
        engine: The engine to step.
        deliver: Function called in the engine's thread with the requests that emitted tokens or ended. It must not
            block.
        died: Function called there once if the engine fails as a whole; all its requests have ended by then.
        idle: Work for idle time; a new request waits for at most one slice of it.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[Sequence[Request]], None],
        died: Callable[[], None],
        idle: IdleWork | None = None,
    ) -> None:
        self._engine = engine
        engine.host.take_arrivals = self._take_arrivals
        self._deliver = deliver
        self._died = died
        self._idle = idle
        self._last_watch = time.monotonic()
        self._inbox: deque[_Action] = deque()
        self._wake = threading.Condition()
        self._stopping = self._has_ended = False
        self._step_start: float | None = None
        self.error: BaseException | None = None
        # A daemon, so that a step that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="specinfer-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Let the thread end all requests and then itself, and do not wait for it."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def stop(self, timeout: float) -> bool:
        """End all requests and then the thread; return whether that took less than `timeout` seconds."""
        self.ask_to_stop()
        if self.has_started:
            self._thread.join(timeout)
        return self.has_stopped

    @property
    def has_started(self) -> bool:
        return self._thread.ident is not None

    @property
    def has_stopped(self) -> bool:
        return not self._thread.is_alive()

    @property
    def step_seconds(self) -> float:
        """Seconds since the current step began; 0 between steps."""
        start = self._step_start
        return 0.0 if start is None else time.monotonic() - start

    def add(self, requests: Sequence[Request]) -> bool:
        """Queue requests; they start at the next step with capacity for them. Return False if the thread has ended."""

        def queue() -> None:
            for request in requests:
                self._engine.add(request)

        return self._call(queue, only_adds=True)

    def abort(self, requests: Sequence[Request], error: str | None = None) -> bool:
        """End requests before the next step, except those that ended already. Return False if the thread has ended."""

        def end() -> None:
            ending = [request for request in requests if not request.is_finished]
            for request in ending:
                self._engine.abort(request, error)
            self._deliver(ending)

        return self._call(end)

    def _call(self, action: Callable[[], None], *, only_adds: bool = False) -> bool:
        """Run an action between two steps or at the end of the thread. Return False if the thread has ended.

        One that only adds requests may run before the pass of a step, if nothing else was asked before.
        """
        with self._wake:
            if self._has_ended:
                return False
            self._inbox.append(_Action(action, only_adds))
            self._wake.notify()
        return True

    def _run(self) -> None:
        try:
            while self._do_what_was_asked():
                self._end_overdue()
                self._step_start = time.monotonic()
                requests = self._engine.step()
                self._step_start = None
                self._deliver(requests)
                self._watch()
                if not requests and self._engine.scheduler.grammar_turns.is_resting:
                    self._rest()
        except BaseException as error:
            logger.critical("the engine failed and takes no more requests", exc_info=error)
            self.error = error
        self._step_start = None
        self._end_all("the engine failed" if self.error is not None else "the engine was stopped")
        if self.error is not None:
            self._died()

    def _do_what_was_asked(self) -> bool:
        """Wait for work and run the actions in the inbox. Return False if the thread is to end."""
        if not self._wait(IDLE_SECONDS if self._idle is not None else None):
            while not self._is_awaited() and self._work_idly():
                self._last_watch = time.monotonic()
            self._wait(None)
        while self._inbox:  # one by one: if one fails, the ends of the later ones can still be reported
            self._inbox.popleft().run()
        return not self._stopping

    def _take_arrivals(self) -> None:
        """Add the requests that arrived, up to the first action of another kind: these keep their order."""
        while self._inbox and self._inbox[0].only_adds:
            self._inbox.popleft().run()

    def _is_awaited(self) -> bool:
        return bool(self._inbox or self._stopping or self._engine.has_work)

    def _wait(self, seconds: float | None) -> bool:
        """Return whether there is something to do within this many seconds; None for no limit."""
        with self._wake:
            return self._wake.wait_for(self._is_awaited, seconds)

    def _rest(self) -> None:
        """Wait a moment, or until something is asked: all running requests may have to wait for their turn."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._stopping, _REST_SECONDS)

    def _work_idly(self) -> bool:
        """Do one slice of idle work, and return whether there is more."""
        try:
            return self._idle is not None and self._idle.work()
        except Exception:
            self._give_up_idle_work()
            return False

    def _watch(self) -> None:
        if self._idle is None or time.monotonic() - self._last_watch < WATCH_SECONDS:
            return
        try:
            self._idle.watch()
        except Exception:
            self._give_up_idle_work()
        self._last_watch = time.monotonic()

    def _give_up_idle_work(self) -> None:
        """Stop the idle work. Called while its exception is handled."""
        logger.exception("what is done in idle time failed, and is done no more; requests are served as before")
        self._idle = None

    def _end_overdue(self) -> None:
        now = time.monotonic()
        requests = list(self._engine.scheduler.requests())
        late = [request for request in requests if request.deadline < now]
        unstarted = [
            request
            for request in requests
            if request.start_deadline < now <= request.deadline and request.times.scheduled is None
        ]
        for request in late:
            self._engine.abort(request, "the request took longer than it was given", Fault.LATE_END)
        for request in unstarted:
            message = "the request waited longer than it was given; try again later"
            self._engine.abort(request, message, Fault.LATE_START)
        if late or unstarted:
            self._deliver([*late, *unstarted])

    def _end_all(self, error: str) -> None:
        """End every request, running, waiting or in the inbox, with this error, so that no caller waits forever."""
        with self._wake:
            self._has_ended = True
        while self._inbox:
            try:
                self._inbox.popleft().run()
            except Exception:
                logger.exception("what was asked of the engine could not be done in order")
        ending = list(self._engine.scheduler.requests())
        for request in ending:
            try:
                self._engine.abort(request, error, Fault.STOPPED)
            except Exception:
                logger.exception("request %s could not be ended in order", request.request_id)
        self._deliver(ending)
