"""Processes that work on the input of untrusted clients, each with limits on processor time and memory.

A kilobyte can keep native code busy for minutes, take gigabytes, or end it. A process can be killed and replaced, and
takes nothing along.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, TypeVar

from specinfer.core.errors import EngineDeadError
from specinfer.core.systems import STOP_SIGNALS, child_environment

T = TypeVar("T")
_WALL_SECONDS = 20.0  # where processor time is not limited, and on a machine that is overloaded
_START_SECONDS = 120.0  # of a process; imports at a low priority take long there, too
_LENGTH_BYTES = 8  # before each message
_MAX_ANSWER_BYTES = 1 << 28
# Ends that a limit does not cause, though a question may: another process tries it once more.
_FOREIGN_SIGNALS = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSEGV", "SIGTERM")} - {None}


class StartError(RuntimeError):
    """A process that cannot be started."""


class Caller:
    """A client that waits for answers. When it leaves, the process that works for it is killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self.has_left = False

    def run(self, action: Callable[[], T]) -> T:
        """Run an action in this thread; the questions that it asks are the caller's."""
        token = _caller.set(self)
        try:
            return action()
        finally:
            _caller.reset(token)

    def leave(self) -> None:
        """End the work for this caller; actions that ask more raise `EngineDeadError`."""
        with self._lock:
            self.has_left = True
            if self._process is not None:
                self._process.end()

    @contextmanager
    def waits_for(self, process: "_Process") -> Iterator[None]:
        with self._lock:
            self._process = process
            if self.has_left:
                process.end()
        try:
            yield
        finally:
            with self._lock:
                self._process = None

    def check(self) -> None:
        """Raise `EngineDeadError` if the caller has left."""
        if self.has_left:
            raise EngineDeadError("the request was not read to its end")


_caller: ContextVar[Caller] = ContextVar("caller")


class BoundedProcesses:
    """Processes of one kind. Any thread may ask them.

    Args:
        command: Arguments for Python: the module or code, which calls `answer_questions`.
        job: Message that each process reads at its start.
        most: Number of processes at work at once.
        niceness: What is added to it: other processes come first.
    """

    def __init__(self, command: tuple[str, ...], job: bytes, most: int, niceness: int = 0) -> None:
        self._command, self._job = (*command, str(niceness)), job
        self._free = threading.BoundedSemaphore(most)
        self._idle: list[_Process] = []

    def start(self) -> None:
        """Start the first process before it is needed."""
        if not self._idle:
            self._idle.append(self._make())

    def ask(self, question: bytes) -> bytes | None:
        """Return the answer, or None if a process ended at its limits, or twice for another reason.

        Raises:
            StartError: No process can be started.
            EngineDeadError: The caller has left.
        """
        caller = _caller.get(None) or Caller()
        with self._free:
            for _ in range(2):
                caller.check()
                process = self._idle.pop() if self._idle else self._make()
                try:
                    with caller.waits_for(process):
                        answer = process.ask(question)
                except BaseException:
                    process.kill()
                    raise
                if answer is not None:
                    self._idle.append(process)
                    return answer
                process.kill()
                caller.check()
                self._idle.append(self._make())  # makes its preparations before it is needed
                if not process.was_killed:
                    break
        return None

    def close(self) -> None:
        """End the processes; those at work end with their question."""
        while self._idle:
            self._idle.pop().kill()

    def _make(self) -> "_Process":
        return _Process(self._command, self._job)


class _Process:
    def __init__(self, command: tuple[str, ...], job: bytes) -> None:
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
            )
        except OSError as error:
            raise StartError(f"a process for the texts of requests cannot be started: {error}") from error
        self._job: bytes | None = job
        self._is_late = False

    def ask(self, question: bytes) -> bytes | None:
        """Return the answer, or None if the process has ended. The first call waits until it is prepared.

        Raises:
            StartError: It cannot be prepared.
        """
        if self._job is not None:
            if self._exchange(self._job, _START_SECONDS) is None:
                if self.was_killed:
                    return None
                code = self._child.returncode
                raise StartError(f"a process for the texts of requests ended with code {code} at its start")
            self._job = None
        return self._exchange(question)

    @property
    def was_killed(self) -> bool:
        """True if something else than a limit killed the process, which has ended."""
        return -self._child.wait() in _FOREIGN_SIGNALS and not self._is_late

    def _exchange(self, message: bytes, seconds: float = _WALL_SECONDS) -> bytes | None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        timer = threading.Timer(seconds, self.end)
        timer.start()
        try:
            _send(self._child.stdin, message)
            return _receive(self._child.stdout)
        except (OSError, EOFError):  # it ended before it had read or written everything
            return None
        finally:
            timer.cancel()

    def end(self) -> None:
        """Kill the process while a thread waits for its answer."""
        self._is_late = True
        self._child.kill()

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not sent cannot be sent any more
                pipe.close()


def answer_questions(
    prepare: Callable[[bytes], Callable[[bytes], bytes]], seconds: Callable[[int], float], memory_bytes: int
) -> None:
    """Answer questions until the process that asks them has ended; a question beyond its limits ends this one.

    Args:
        prepare: Function of the job that returns the function that answers questions.
        seconds: Function from the bytes of a question to the processor time that it may take.
        memory_bytes: Memory that all questions together may add.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # of a terminal or a service; the process that asks decides
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print
    if hasattr(os, "nice"):
        os.nice(int(sys.argv[-1]))
    answer = prepare(_receive(sys.stdin.buffer))
    _limit_memory(memory_bytes)
    _send(answers, b"")
    with suppress(EOFError):
        while True:
            question = _receive(sys.stdin.buffer)
            _limit_time(seconds(len(question)))
            try:
                result = answer(question)
            finally:
                _limit_time(0)
            _send(answers, result)


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(_LENGTH_BYTES))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    """Return the next message; raise EOFError if the other side has ended."""
    head = pipe.read(_LENGTH_BYTES)
    length = int.from_bytes(head)
    if len(head) < _LENGTH_BYTES or length > _MAX_ANSWER_BYTES:
        raise EOFError
    message = pipe.read(length)
    if len(message) < length:
        raise EOFError
    return message


def _limit_time(seconds: float) -> None:
    """End this process after this much processor time from now on, even in native code; 0 means no limit."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends a process that does not handle it


def _limit_memory(size: int) -> None:
    """Let allocations fail beyond the memory that may be added, where the system can limit address space."""
    if sys.platform == "linux":
        import resource

        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + size
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
