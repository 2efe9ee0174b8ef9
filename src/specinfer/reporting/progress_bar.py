"""Progress bars on the terminal: of a call of `LLM`, and of the stages of a long command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specinfer.core.progress import gigabytes
from specinfer.engine.engine import Engine


@contextmanager
def running_bar(engine: Engine, num_requests: int, *, show: bool) -> Iterator[Callable[[int], None]]:
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
    """Yield a bar for the stages of a long command, which is shown only if the console is a terminal."""
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield StageBar(progress)


class StageBar:
    """One bar that a command describes stage by stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("loading", total=None)

    def stage(self, description: str, total: int | None = None, completed: int = 0) -> None:
        """Name the current stage; with `total` its steps are counted anew, from `completed` on."""
        if total is None:
            self._progress.update(self._task, description=description)
        else:
            self._progress.update(self._task, description=description, total=total, completed=completed)

    def advance(self, steps: int = 1) -> None:
        self._progress.advance(self._task, steps)

    def report_bytes(self, name: str, done: int, total: int) -> None:
        """Show how much of a streamed target is read; a `ProgressCallback`."""
        self.stage(f"{name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")
