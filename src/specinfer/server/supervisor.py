"""The parent of the server: it keeps the port open, and starts the server again when it dies.

Native code can end its process at any time, by a fault in a kernel or for lack of memory. So the command forks before
it imports anything heavy: the child loads the model and serves, and the parent waits. One pipe takes the signals that
stop the server to the child, another its states to the parent, which passes them on to systemd. Until the child accepts
connections, the parent answers them. States go to systemd by sd_notify(3): datagrams to the socket that it names.
"""

import contextlib
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from specinfer.core.systems import die_with_parent, stop_signals
from specinfer.server.json_lines import JSONLine
from specinfer.server.unavailable import UnavailableResponder


def notify(message: str) -> None:
    """Send a message such as READY=1 to systemd, if this process runs as its service."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place or not hasattr(socket, "AF_UNIX"):
        return
    if place.startswith("@"):
        place = "\0" + place[1:]  # a name in the abstract namespace
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(message.encode(), place)


def watchdog_seconds() -> float | None:
    """Return half the time after which systemd takes this process for hung, or None if it does not watch."""
    micros = os.environ.get("WATCHDOG_USEC", "")
    if not micros.isdecimal() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(micros) / 2e6


logger = logging.getLogger(__name__)

_STEADY_SECONDS = 60.0  # a server that was ready for longer did not fail because of its start
_MAX_FAILURES = 8  # in a row, with 0, 1, 2, 4, 8, 16 and 30 seconds between them
_MAX_DELAY = 30.0
ACCEPTING = "ACCEPTING=1"  # the child's state from when it accepts connections; the others are in the words of systemd
_LINE = "%(levelname)s %(asctime)s %(name)s: %(message)s"
_TICK = 0.25  # between two looks at clients that are slow
HEARTBEAT = 5.0  # seconds between two reports of a child that is well


def is_supported() -> bool:
    """Return whether this system has what a supervisor needs. On macOS frameworks fail in a process that was forked."""
    return hasattr(os, "fork") and sys.platform != "darwin"


class ParentProcess:
    """The supervisor as the server sees it: signals come from it, and states go to it.

    Signals of a terminal reach both processes. The server obeys only its parent, so that each counts once.

    Attributes:
        last_end: How the server before this one ended, or "" for the first one.
        delay: Seconds to wait before the model is loaded.
        ready_at: When the server will probably be ready, by `time.monotonic`, or None if that is not known.
    """

    def __init__(self, signals: int, states: int, last_end: str, delay: float, ready_at: float | None) -> None:
        self._signals, self._states = signals, states
        self.last_end, self.delay, self.ready_at = last_end, delay, ready_at
        self._stop: Callable[[int], object] = lambda _: os._exit(0)  # nothing is served yet
        threading.Thread(target=self._listen, name="specinfer-parent", daemon=True).start()

    def on_stop(self, stop: Callable[[int], object]) -> None:
        """Call this function, in another thread, with the number of each signal that comes from now on."""
        self._stop = stop

    def report(self, state: str) -> None:
        """Report `ACCEPTING`, or a state in the words of systemd."""
        with contextlib.suppress(OSError):  # the parent is gone, and this process is about to end
            os.write(self._states, f"{state}\n".encode())

    def _listen(self) -> None:
        while number := os.read(self._signals, 1):
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._stop(number[0])
        os._exit(1)  # the parent is gone


def supervise(
    serve: Callable[[ParentProcess], int],
    listener: socket.socket,
    *,
    has_tls: bool = False,
    log_format: str = "text",
    max_silence: float = 300.0,
) -> int:
    """Run a function in a child process, again whenever that dies, and return the exit code of the last one.

    The function returns its exit code; an exception of the function leaves `supervise` in the child. The listener is
    closed as soon as no further child will need it.

    Args:
        has_tls: Connections are encrypted, so they wait for the child.
        log_format: Format of log lines, as of `logs.configure`.
        max_silence: Seconds without a report after which a child that was ready is killed, and followed by another.
    """
    formatter = JSONLine() if log_format == "json" else logging.Formatter(_LINE)
    return _Supervisor(listener, has_tls, formatter, max_silence).run(serve)


class _Supervisor:
    """The parent, from the first child to the end of the last."""

    def __init__(
        self, listener: socket.socket, has_tls: bool, formatter: logging.Formatter, max_silence: float
    ) -> None:
        self._listener, self._has_tls, self._formatter = listener, has_tls, formatter
        self._max_silence = max_silence
        self._unavailable = UnavailableResponder(listener)
        self._woken, self._waking = os.pipe()
        for end in (self._woken, self._waking):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        self._stop_signals = stop_signals()
        for number in (*self._stop_signals, signal.SIGCHLD):
            signal.signal(number, _ignore)  # its number arrives in the pipe
        self._child = self._signals = self._states = -1
        self._begun = 0.0  # when the child begins to load
        self._ready_since: float | None = None
        self._load_seconds: float | None = None  # of the last child that was ready
        self._has_served = self._is_stopping = False
        self._num_failures = 0

    def run(self, serve: Callable[[ParentProcess], int]) -> int:
        last_end, delay = "", 0.0
        while True:
            parent = self._fork(last_end, delay)
            if parent is not None:
                return serve(parent)
            code = self._wait(last_end)
            if self._is_final(code):
                return code if code >= 0 else 128 - code
            last_end, delay = _describe(code), min(2.0 ** (self._num_failures - 2), _MAX_DELAY)
            delay = delay if self._num_failures > 1 else 0.0
            wait = f" in {delay:g} s" if delay else ""
            lost = "its requests are lost, and the model is loaded again"
            self._log(logging.ERROR, f"the engine {last_end}; {lost}{wait}")
            notify(f"STATUS=the engine {last_end} and is being loaded again")

    def _fork(self, last_end: str, delay: float) -> ParentProcess | None:
        """Start a child; return its parent in the child, and None in the parent.

        Raises:
            RuntimeError: No process can be started.
        """
        signals, self._signals = os.pipe()
        self._states, states = os.pipe()
        os.set_blocking(self._states, False)
        self._begun, self._ready_since = time.monotonic() + delay, None
        with contextlib.suppress(OSError):
            sys.stdout.flush()  # what stays in the buffer would be written twice
        signal.pthread_sigmask(signal.SIG_BLOCK, self._stop_signals)
        try:
            self._child = os.fork()
        except OSError as error:
            raise RuntimeError(f"no process can be started for the engine: {error.strerror}") from error
        if self._child:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._stop_signals)
            os.close(signals)
            os.close(states)
            self._unavailable.is_open = not self._has_tls
            return None
        self._unavailable.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._woken, self._waking, self._signals, self._states):
            os.close(end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._stop_signals)
        os.environ.pop("WATCHDOG_PID", None)  # the watchdog's messages come from here
        die_with_parent()  # the pipe ends then, too; but native code may keep the thread that reads it waiting
        return ParentProcess(signals, states, last_end, delay, self._ready_at)

    @property
    def _ready_at(self) -> float | None:
        return None if self._load_seconds is None else self._begun + self._load_seconds

    def _wait(self, last_end: str) -> int:
        """Pass signals and states on until the child has ended; return its exit code, or minus its signal."""
        pipes: set[int] = {self._woken, self._states}
        seconds, silence = watchdog_seconds(), 0.0
        code = None
        while code is None:
            sockets = self._unavailable.sockets
            patience = min(HEARTBEAT, self._max_silence, math.inf if seconds is None else seconds)
            patience = min(patience, _TICK) if sockets else patience
            watched: list[int | socket.socket] = [*pipes, *sockets]
            begun = time.monotonic()
            readable, _, _ = select.select(watched, (), (), patience)
            # No longer than it waited: the parent may have been suspended, and the child with it.
            silence += min(time.monotonic() - begun, patience)
            if self._states in readable or self._ready_since is None:
                silence = 0.0
            elif silence >= self._max_silence:
                self._log(logging.ERROR, f"the engine has not reported for {silence:.0f} s, and is killed")
                os.kill(self._child, signal.SIGKILL)
                silence = 0.0
            if sockets:
                self._unavailable.serve(readable, last_end, self._ready_at)
            if self._woken in readable:
                for number in os.read(self._woken, 256):
                    if number in self._stop_signals:
                        self._pass_on(number)
            if self._states in readable and not self._take_states():
                pipes.discard(self._states)
            if self._ready_since is None and seconds is not None:
                notify("WATCHDOG=1")  # loading may take longer than the watchdog waits
            code = self._exit_code()
        self._take_states()
        os.close(self._signals)
        os.close(self._states)
        return code

    def _pass_on(self, number: int) -> None:
        self._is_stopping, self._unavailable.is_open = True, False
        self._listener.close()  # the port closes with the child's
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._signals, bytes([number]))

    def _take_states(self) -> bool:
        """Read the states that the child has reported; return False if there will be none any more."""
        try:
            text = os.read(self._states, 4096)
        except BlockingIOError:
            return True
        for state in text.decode().split():
            if state == ACCEPTING:
                self._unavailable.is_open = False
                continue
            if state == "READY=1":
                self._ready_since, self._has_served = time.monotonic(), True
                self._load_seconds = self._ready_since - self._begun
                notify("STATUS=serving")
            if state != "STOPPING=1" or self._is_stopping:  # a failed engine ends, but the service does not
                notify(state)
        return bool(text)

    def _exit_code(self) -> int | None:
        """Collect processes that have ended, also those that lost their parent; return the child's code if it has."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    return os.waitstatus_to_exitcode(ended[1])
        return None

    def _is_final(self, code: int) -> bool:
        """Return whether no other child follows one that ended with this code."""
        if self._is_stopping or code == 0 or (code > 0 and not self._has_served):
            return True  # it was stopped, or has reported what is wrong with the model or a setting
        served = 0.0 if self._ready_since is None else time.monotonic() - self._ready_since
        self._num_failures = 1 if served > _STEADY_SECONDS else self._num_failures + 1
        if self._num_failures < _MAX_FAILURES:
            return False
        rest = f"{_MAX_FAILURES} failed in a row, and the server ends"
        self._log(logging.CRITICAL, f"the engine {_describe(code)}; {rest}")
        return True

    def _log(self, level: int, text: str) -> None:
        """Write a line like those of the server's log, if that needs no waiting for whoever reads the log."""
        line = self._formatter.format(logging.LogRecord(__name__, level, "", 0, text, (), None)) + "\n"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed
            if select.select((), (sys.stderr,), (), 0)[1]:
                os.write(sys.stderr.fileno(), line.encode())


def _ignore(*_: object) -> None:
    """Handle a signal; one that is ignored would be ignored by all programs that are started, too."""


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"ended by {name}" + (" (which the system sends if memory runs out)" if name == "SIGKILL" else "")
