"""TensorBoard curves of a tuning run: loss, learning rate, gradient norm, tokens per second."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specinfer.learning.tune.training import Progress


class TensorBoardLog:
    """The curves of one drafter.

    Files are made at its first step, so a drafter that was already finished leaves none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._began_at: int | None = None

    def note(self, progress: Progress) -> None:
        if self._began_at is None:
            self._began_at = progress.step
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Steps after the checkpoint that a run resumes from were noted before it was interrupted.
            self._writer = SummaryWriter(str(self._folder), purge_step=self._began_at + 1)
        for name, value in (
            ("loss", progress.loss),
            ("learning rate", progress.rate),
            ("gradient norm", progress.grad_norm),
            ("tokens per second", progress.tokens / max(progress.seconds, 1e-9)),
        ):
            self._writer.add_scalar(name, value, progress.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@contextmanager
def open_tensorboard(folder: Path | None) -> Iterator[TensorBoardLog | None]:
    """Open a log in that folder, or yield None without a folder."""
    tensorboard_log = None if folder is None else TensorBoardLog(folder)
    try:
        yield tensorboard_log
    finally:
        if tensorboard_log is not None:
            tensorboard_log.close()
