"""The terminal: whether there is one, typed lines and single keys, hidden typing, and messages of libraries."""

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

from specinfer.cli.errors import UsageError

_NAMES = {b"\x1b[C": "right", b"\x1b[D": "left", b"\x1b[H": "home", b"\x1b[F": "end", b"\x1b": "q", b"\x03": "q"}


def is_interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def read_input() -> str:
    """Return all of standard input.

    Raises:
        UsageError: It is not text.
    """
    try:
        text = sys.stdin.read()
        text.encode()  # in some locales Python reads any bytes, as lone surrogates
        return text
    except UnicodeError as error:
        raise UsageError("standard input is not UTF-8 text") from error


def typed_lines() -> Iterator[str]:
    """Yield the lines of standard input that are not blank."""
    interactive = is_interactive()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # line editing and history; the import writes to the terminal
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            if interactive:
                print()
            return
        except UnicodeDecodeError as error:
            raise UsageError("standard input is not UTF-8 text") from error
        if line.strip():
            yield line


class _OneLine(logging.Formatter):
    """A log format without tracebacks."""

    def formatException(self, _: Any) -> str:  # noqa: N802  # overrides logging's name
        return ""


def quiet_libraries(*, debug: bool) -> None:
    """Set what libraries may print: all log lines with `debug`, otherwise warnings, and only errors of transformers."""
    if debug:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported, which takes seconds
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("specinfer: warning: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    warnings.simplefilter("ignore")


@contextlib.contextmanager
def single_keys() -> Iterator[bool]:
    """Yield whether single keys can be read; within the block typed keys are not shown."""
    with _changed_mode(buffers=False) as changed:
        yield changed


@contextlib.contextmanager
def hidden_typing() -> Iterator[None]:
    """Do not show what is typed within the block; the next line of input begins with it."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with contextlib.ExitStack() as undo:
        if threading.current_thread() is threading.main_thread():
            # By default the signal would end the process with the terminal as it is.
            undo.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, end))
        undo.enter_context(_changed_mode(buffers=True))
        yield


@contextlib.contextmanager
def _changed_mode(*, buffers: bool) -> Iterator[bool]:
    """Switch off the echo of standard input, and unless it buffers lines these too; yield whether it is a terminal."""
    try:
        import termios  # not on every system

        before = termios.tcgetattr(sys.stdin)
    except Exception:  # no such module, no terminal, or no file: each has its own error
        yield False
        return
    changed = list(before)
    changed[3] &= ~(termios.ECHO if buffers else termios.ECHO | termios.ICANON)
    if not buffers:
        changed[6] = [*before[6]]
        changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
    try:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, changed)
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def read_key(timeout: float | None) -> str | None:
    """Return the next key's name or character, or None if there was none within the timeout in seconds."""
    ready, _, _ = select.select([sys.stdin], [], [], timeout)
    if not ready:
        return None
    typed = os.read(sys.stdin.fileno(), 16)
    if not typed:
        return "q"  # the terminal has been closed
    return _NAMES.get(typed.replace(b"\x1bO", b"\x1b["), typed.decode(errors="replace")[:1])
