"""A progress bar on the terminal while a call of `LLM` runs: the number of finished requests, and tokens per second."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

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
    said_before, read_before = engine.metrics.num_generated, 0 if stream is None else stream.bytes_read
    with progress:
        task = progress.add_task("tokens", total=num_requests, speed="")

        def report(num_ended: int) -> None:
            seconds = progress.tasks[task].elapsed or 1e-9
            speed = f"{(engine.metrics.num_generated - said_before) / seconds:.1f} tokens/s"
            if stream is not None:
                speed += f", read {gigabytes(stream.bytes_read - read_before, seconds)}"
            progress.update(task, completed=num_ended, speed=speed)

        yield report
