"""The training loop of all that learns here: drafters that are tuned or served, heads, and the policy network.

What is learned is described by a model, a loss of a batch, the batches, and a learning rate for each step.
`Trainer` takes the steps and `train` runs them. If a batch depends on the number of its step only, a run that resumes
from its `Checkpoint` ends as if it had never stopped.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from specinfer.core.errors import file_error
from specinfer.core.files import write_atomically
from specinfer.learning.examples import DamagedError

B = TypeVar("B")  # a batch
_MAX_GRAD_NORM = 1.0
_LEAST_MIXING = 0.03  # share of the last loss in the running mean


class TrainingError(RuntimeError):
    """An error that stops training; what was saved is intact."""


@contextmanager
def reporting_disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk, and other errors of writing to the folder, into a TrainingError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{folder} cannot be written or read ({file_error(error)}); free some space or repair it, and start again: "
            "what was saved is as it was"
        ) from error


@dataclass(slots=True)
class Progress:
    """The progress of a training; stored in its checkpoint."""

    step: int = 0
    tokens: int = 0  # sum of the sizes of the batches
    seconds: float = 0.0
    loss: float = float("nan")  # running mean, for drafters in nats per token
    rate: float = 0.0  # learning rate of the last step
    grad_norm: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return f"loss {self.loss:.3f}, {self.speed:,.0f} tokens/s" if self.step else ""


class Trainer(Generic[B]):
    """A model in training.

    Args:
        model: The module whose parameters are trained, as far as they take gradients; a checkpoint has its state.
        optimizers: The optimizers of these parameters.
        loss: The loss of a batch, as a scalar from which gradients flow to the parameters.
        mean: The mean of a scalar over all processes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loss: Callable[[B], Tensor],
        mean: Callable[[Tensor], Tensor] = lambda scalar: scalar,
    ) -> None:
        self.model, self.optimizers = model, optimizers
        self.progress = Progress()
        self._loss, self._mean = loss, mean
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]

    def step(self, batch: B, rate: float | None = None) -> float:
        """Take one optimizer step and return the loss.

        If the loss or the gradient is not finite, the weights stay as they are, and the result is NaN.

        Args:
            rate: The learning rate, or None for that of the optimizers.
        """
        with torch.inference_mode(mode=False), torch.enable_grad():
            loss = self._loss(batch)
            loss.backward()
            norm = float(nn.utils.clip_grad_norm_(self._weights, _MAX_GRAD_NORM))
            value = float(self._mean(loss.detach()))
            is_finite = bool(np.isfinite(value) and np.isfinite(norm))
            for optimizer in self.optimizers:
                for group in optimizer.param_groups if rate is not None else ():
                    group["lr"] = rate
                if is_finite:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        self.progress.grad_norm = norm
        return value if is_finite else float("nan")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The file from which a training resumes.

    Attributes:
        settings: The settings of the training; those of a file must be the same but for `save_every`.
        save_every: Seconds between two checkpoints.
        writes: True in the process that writes the file.
    """

    path: Path
    settings: Mapping[str, object]
    save_every: float
    writes: bool = True

    def save(self, trainer: Trainer[Any]) -> None:
        """Write the trainer's state, atomically.

        Raises:
            TrainingError: The file cannot be written; an existing file stays as it was.
        """
        state = {
            "model": trainer.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "progress": asdict(trainer.progress),
            "config": dict(self.settings),
        }

        def write(partial: Path) -> None:
            with partial.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

        try:
            write_atomically(self.path, write)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise TrainingError(
                f"{self.path} cannot be written ({error}); free some space and start again: the last one is intact"
            ) from error

    def restore(self, trainer: Trainer[Any]) -> None:
        """Set the trainer to the state in the file, if there is one.

        Raises:
            DamagedError: The file cannot be read, or belongs to a training with other settings.
        """
        if not self.path.exists():
            return
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            is_same = {**state["config"], "save_every": 0} == {**self.settings, "save_every": 0}
            if is_same:
                trainer.model.load_state_dict(state["model"])
                for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(saved)
                trainer.progress = Progress(**state["progress"])
        except Exception as error:  # a damaged file may raise anything
            raise DamagedError(
                f"{self.path} cannot be read ({type(error).__name__}); delete it to begin anew"
            ) from error
        if not is_same:
            raise DamagedError(f"{self.path} is of a run with other settings; name another folder, or delete it")


def train(
    trainer: Trainer[B],
    batches: Callable[[int], Iterable[tuple[B, int]]],
    num_steps: int,
    rate: Callable[[int], float],
    checkpoint: Checkpoint | None = None,
) -> Iterator[Progress]:
    """Train until `num_steps`, yielding the progress after each step and once at the start.

    Args:
        batches: The batches from a step on, each with its size.
        rate: The learning rate of a step.
        checkpoint: The file to resume from, or None to begin anew and store nothing.

    Raises:
        TrainingError: The loss is not finite, or the checkpoint cannot be written.
        DamagedError: The checkpoint cannot be read, or belongs to another training.
    """
    if checkpoint is not None:
        checkpoint.restore(trainer)
    progress = trainer.progress
    source = iter(batches(progress.step))
    last_save = time.monotonic()
    yield replace(progress)
    while progress.step < num_steps:
        began = time.monotonic()
        batch, size = next(source)
        progress.rate = rate(progress.step)
        loss = trainer.step(batch, progress.rate)
        if np.isnan(loss):
            saved = "nothing was saved yet"
            if checkpoint is not None and checkpoint.path.exists():
                saved = f"the last checkpoint is as it was: {checkpoint.path}"
            raise TrainingError(
                f"the loss or its gradient is not finite at step {progress.step}: "
                f"lower learning_rate, or give more text; {saved}"
            )
        mixing = max(_LEAST_MIXING, 1 / (progress.step + 1))
        progress.loss = loss if progress.step == 0 else progress.loss + mixing * (loss - progress.loss)
        progress.step += 1
        progress.tokens += size
        progress.seconds += time.monotonic() - began
        is_due = checkpoint is not None and time.monotonic() - last_save > checkpoint.save_every
        if checkpoint is not None and (is_due or progress.step == num_steps):
            if checkpoint.writes:
                checkpoint.save(trainer)
            last_save = time.monotonic()
        yield replace(progress)
