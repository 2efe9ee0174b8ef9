"""Progress of loading a model, and of a slow model that reads a prompt."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from specinfer.core.progress import ProgressCallback, gigabytes, how_much, unit_of

if TYPE_CHECKING:
    from specinfer.llm import LLM

_BAR_WIDTH = 30
_LOG_SECONDS = 10.0  # time between log lines
LONG = 1.0  # seconds of a stage that has a line of its own


@contextmanager
def loading_bar(console: Console, what: str) -> Iterator[ProgressCallback]:
    """Show a status line on a terminal, and a bar once bytes are reported; elsewhere a line for each slow stage."""
    if not console.is_terminal:
        with LoadingLog(lambda line: console.print(Text(f"specinfer: {line}"))) as log:
            yield log
        return
    with console.status(what) as status:
        name_before, started = "", 0.0

        def progress(name: str, done: int, total: int) -> None:
            nonlocal name_before, started
            if name != name_before:
                name_before, started = name, time.monotonic()
            line = Table.grid(padding=(0, 1))
            read = how_much(name, done, total, time.monotonic() - started)
            line.add_row(what, ProgressBar(total or None, done, width=_BAR_WIDTH), f"{name}: {read}" if done else name)
            status.update(line)

        yield progress


class LoadingLog:
    """A log of the progress of loading: a line now and then, and one for each stage that took long.

    Args:
        write: Function that writes a line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._name, self._started, self._next = "", 0.0, 0.0
        self._counts = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self("", 0, 0)

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if name != self._name:
            if self._name and not self._counts and now - self._started >= LONG:
                self._write(f"{self._name}: {now - self._started:.1f} s")
            self._name, self._started, self._next = name, now, now + _LOG_SECONDS
            self._counts = total > 0
        elif total and (now >= self._next or (done >= total and now - self._started >= LONG)):
            self._next = now + _LOG_SECONDS
            read = "read " if unit_of(name) is None else ""
            self._write(f"{name}: {read}{how_much(name, done, total, now - self._started)}")


class FirstToken:
    """The progress of a streamed target with a prompt; computed again whenever it is drawn."""

    def __init__(self, llm: "LLM") -> None:
        stream = llm.target.loaded.stream
        assert stream is not None
        self._llm, self._stream = llm, stream
        self._before, self._started = stream.bytes_read, time.monotonic()

    def __rich__(self) -> Text:
        read = gigabytes(self._stream.bytes_read - self._before, time.monotonic() - self._started)
        running = list(self._llm.engine.scheduler.running)
        known = sum(request.num_computed for request in running)
        total = sum(len(request.prompt_ids) for request in running)
        return Text(f"reading the prompt: {known} of {total} tokens · {read}")
