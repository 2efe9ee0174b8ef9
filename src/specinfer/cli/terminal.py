"""Standard input, output and error: whether they are a terminal, typed lines, and messages of libraries."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from specinfer.cli.commands import UsageError


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


def typed_lines(mark: str = "> ") -> Iterator[str]:
    """Yield the lines of standard input that are not blank."""
    interactive = is_interactive()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # line editing and history; the import writes to the terminal
    while True:
        try:
            line = input(mark if interactive else "")
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
