"""Single keys from a terminal, without waiting for Enter."""

import contextlib
import os
import select
import sys
from collections.abc import Iterator

_NAMES = {b"\x1b[C": "right", b"\x1b[D": "left", b"\x1b[H": "home", b"\x1b[F": "end", b"\x1b": "q", b"\x03": "q"}


@contextlib.contextmanager
def single_keys() -> Iterator[bool]:
    """Yield whether single keys can be read; within the block typed keys are not shown."""
    try:
        import termios  # not on every system
        import tty

        before = termios.tcgetattr(sys.stdin)
    except (ImportError, OSError):
        yield False
        return
    try:
        tty.setcbreak(sys.stdin)
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
