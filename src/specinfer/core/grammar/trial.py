"""Trials of grammars from strangers: another process compiles each one first, with limits on time and memory.

A constraint of a kilobyte can take minutes and gigabytes to compile, in native code that cannot be interrupted; a
process can be killed. Only what passes its trial is compiled where the engine runs.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from specinfer.core.grammar.matcher import STACK_BYTES, fault, make_tokenizer

CPU_SECONDS = 0.25  # of one trial; schemas of real tools take a tenth of that
MEMORY_BYTES = 512 << 20  # that one trial may add
COMMAND = ("-m", "specinfer.core.grammar.trial")
_WALL_SECONDS = 20.0  # where processor time is not limited, and on a machine that is overloaded
_NICENESS = 5  # added: the engine's threads come first
_MAX_PROCESSES = 2  # a trial at its limit does not delay another
# Ends that a limit does not cause, though a grammar may: another process tries it once more.
_FOREIGN_SIGNALS = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSEGV", "SIGTERM")} - {None}


class GrammarTrials:
    """Processes that try to compile grammars. Any thread may use them.

    Args:
        tokenizer: Text of the tokenizer.json.
        num_tokens: Number of tokens of llguidance's tokenizer.
        end_token: Token that marks the end of the text.
    """

    def __init__(self, tokenizer: str, num_tokens: int, end_token: int) -> None:
        self._job = json.dumps([tokenizer, num_tokens, end_token])
        self._free = threading.BoundedSemaphore(_MAX_PROCESSES)
        self._idle = [_Process(self._job)]

    def fault(self, kind: str, text: str) -> str | None:
        """Return what is wrong with the text of a constraint and what to change, or None if nothing is.

        Raises:
            RuntimeError: No process for trials can be started.
        """
        with self._free:
            for _ in range(2):
                process = self._idle.pop() if self._idle else _Process(self._job)
                try:
                    answer = process.ask([kind, text])
                except BaseException:
                    process.kill()
                    raise
                if answer is not None:
                    self._idle.append(process)
                    found: str | None = answer[0]
                    return found
                process.kill()
                self._idle.append(_Process(self._job))  # reads the tokenizer before it is needed
                if not process.was_killed:
                    break
        return (
            f"takes more than {CPU_SECONDS:g} s or {MEMORY_BYTES >> 20} MiB to compile; have fewer patterns, "
            "repetitions and alternatives"
        )

    def close(self) -> None:
        """End the processes; those at work end with their trial."""
        while self._idle:
            self._idle.pop().kill()


class _Process:
    """One process for trials, one line of JSON for each question and each answer."""

    def __init__(self, job: str) -> None:
        home = str(Path(__file__).parents[3])  # the package that runs here, wherever it was found
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH", ""))))
        self._child = subprocess.Popen(
            [sys.executable, "-P", *COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
        )
        self._job: str | None = job
        self._is_late = False

    def ask(self, question: list[str]) -> list[str | None] | None:
        """Return the answer, or None if the process has ended. The first call waits until it has read the tokenizer.

        Raises:
            RuntimeError: It cannot read the tokenizer.
        """
        if self._job is not None:
            if self._exchange(self._job) is None:
                if self.was_killed:
                    return None
                code = self._child.returncode
                raise RuntimeError(f"a process for trials of grammars ended with code {code} at its start")
            self._job = None
        return self._exchange(json.dumps(question))

    @property
    def was_killed(self) -> bool:
        """True if something else than a limit killed the process, which has ended."""
        return -self._child.wait() in _FOREIGN_SIGNALS and not self._is_late

    def _exchange(self, line: str) -> list[str | None] | None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        timer = threading.Timer(_WALL_SECONDS, self._end_late)
        timer.start()
        try:
            self._child.stdin.write(line.encode() + b"\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except OSError:  # it ended before it had read everything
            return None
        finally:
            timer.cancel()
        return json.loads(answer) if answer.endswith(b"\n") else None

    def _end_late(self) -> None:
        self._is_late = True
        self._child.kill()

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not sent cannot be sent any more
                pipe.close()


def _serve() -> None:
    """Answer questions from standard input until it ends. A trial at its limit ends the process."""
    lines = iter(sys.stdin.buffer.readline, b"")
    text, num_tokens, end_token = json.loads(next(lines))
    tokenizer = make_tokenizer(text, num_tokens, end_token)
    _limit_memory()
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    print("[]", flush=True)
    for line in lines:
        kind, constraint = json.loads(line)
        _limit_time(CPU_SECONDS)
        try:
            found = fault(tokenizer, end_token, kind, constraint)
        finally:
            _limit_time(0)
        print(json.dumps([found]), flush=True)


def _limit_time(seconds: float) -> None:
    """End this process after this much processor time from now on, even in native code; 0 means no limit."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends a process that does not handle it


def _limit_memory() -> None:
    """Let allocations fail beyond the memory that a trial may add, where the system can limit address space."""
    if sys.platform == "linux":
        import resource

        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = size + 2 * STACK_BYTES + MEMORY_BYTES  # the last trial's stack may still be there
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    _serve()
