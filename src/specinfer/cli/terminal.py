"""The streams of this process: whether a person sits at them, what is typed, and who may write to them."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from specinfer.cli.commands import UsageError


def is_interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def typed_lines(mark: str = "> ") -> Iterator[str]:
    """Lines typed or piped in that are not blank, to the end of input."""
    interactive = is_interactive()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # line editing and history; writes to the terminal when imported
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
    """Leaves tracebacks out."""

    def formatException(self, _: Any) -> str:  # noqa: N802  # overrides logging's name
        return ""


def quiet_libraries(*, debug: bool) -> None:
    """Sets what may be written beside our own messages: with `debug` everything, else our warnings."""
    if debug:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        return
    from transformers.utils import logging as transformers_logging

    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("specinfer: warning: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
