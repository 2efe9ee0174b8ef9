"""Progress bars on the terminal: of a call of `LLM`, and of the stages of a long command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from specinfer.core.progress import gigabytes

if TYPE_CHECKING:
    from specinfer.engine.engine import Engine


@contextmanager
def running_bar(engine: "Engine", num_requests: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, and yield a function to call after each step with the number of finished requests."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("requests {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not (show and console.is_terminal),
        transient=True,
    )
    stream = engine.target.loaded.stream
    generated_before, read_before = engine.metrics.num_generated, 0 if stream is None else stream.bytes_read
    with progress:
        task = progress.add_task("tokens", total=num_requests, speed="")

        def report(num_ended: int) -> None:
            seconds = progress.tasks[task].elapsed or 1e-9
            speed = f"{(engine.metrics.num_generated - generated_before) / seconds:.1f} tokens/s"
            if stream is not None:
                speed += f", read {gigabytes(stream.bytes_read - read_before, seconds)}"
            progress.update(task, completed=num_ended, speed=speed)

        yield report


@contextmanager
def stage_bar(console: Console | None) -> Iterator["StageBar"]:
    """Yield a bar for the stages of a long command, shown on a terminal from the first stage on.

    Before it, downloads have bars of their own.
    """
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    try:
        yield StageBar(progress)
    finally:
        progress.stop()


class StageBar:
    """One bar that a command describes stage by stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("loading", total=None)

    def stage(self, description: str, total: int | None = None) -> None:
        """Name the current stage; with `total` its steps are counted anew."""
        self._progress.start()
        if total is None:
            self._progress.update(self._task, description=description)
        else:
            self._progress.update(self._task, description=description, total=total, completed=0)

    def advance(self, steps: int = 1) -> None:
        self._progress.advance(self._task, steps)

    def report_bytes(self, name: str, done: int, total: int) -> None:
        """Show how much of a streamed target is read; a `ProgressCallback`."""
        self.stage(f"{name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")


class StageProgress:
    """A display of the stages of a run: as a bar on a terminal, otherwise as a line now and then."""

    _EVERY = 0.1  # share of a stage between two lines

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[details]}"), console=console,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._task = TaskID(0)  # the first call begins a task
        self._name, self._shown = "", 0.0

    def __enter__(self) -> "StageProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, name: str, done: int, total: int, details: str = "") -> None:
        """Show how much of a stage is done; the first call with another name begins it."""
        if name != self._name:
            self._name, self._shown = name, 0.0
            self._task = self._bar.add_task(name, total=total, details="")
            self._print(f"{name}: {total}")
        self._bar.update(self._task, completed=done, details=details)
        if done >= self._shown + self._EVERY * total or done == total > self._shown:
            self._shown = done
            self._print(f"{name}: {done} of {total}{', ' if details else ''}{details}")

    def _print(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True)
