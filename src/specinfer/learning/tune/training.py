"""Tuning of one drafter with the training loop: the order of the examples, their weights, and the learning rate.

All of it depends on the number of the step only. accelerate handles devices, half precision and several processes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from specinfer.core.noise import derive_seed
from specinfer.learning.batches import Batch, collate
from specinfer.learning.examples import TrainingExample
from specinfer.learning.loop import Checkpoint, Progress, Trainer, train
from specinfer.learning.optimizers import make_optimizers
from specinfer.learning.trainable import TrainableDrafter
from specinfer.learning.tune.boosting import Predictions, residual_logprobs, token_weights

_WARMUP = 0.03  # part of all steps
_FINAL = 0.02  # part of the learning rate
_SORTED_STEPS = 16
_CURVES = ("loss", "learning rate", "gradient norm", "tokens per second")
Weighted = tuple[Batch, Tensor | None]  # a batch, and the weights of its output tokens


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Settings for the tuning of one drafter.

    Attributes:
        num_steps: The number of optimizer steps.
        batch_tokens: The number of tokens of prompts and outputs in a step.
        learning_rate: The highest learning rate, of the matrices' Muon steps, which are scaled like Adam's, and of
            Adam.
        depth: The length of the chains that are merged, which is how far the token weights look.
        save_every: Seconds between checkpoints.
    """

    num_steps: int
    batch_tokens: int = 4096
    learning_rate: float = 2e-3
    depth: int = 8
    seed: int = 0
    save_every: float = 30.0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up, then linear decay."""
        warmup = min(1.0, (step + 1) / max(_WARMUP * self.num_steps, 1.0))
        return self.learning_rate * (warmup * (1.0 - (1.0 - _FINAL) * step / self.num_steps))


def fit(
    accelerator: Accelerator,
    drafter: TrainableDrafter,
    examples: Sequence[TrainingExample],
    before: Sequence[Sequence[Predictions]],
    config: TrainingConfig,
    checkpoint: Path,
) -> Iterator[Progress]:
    """Train the drafter in place, yielding after each step and once at the start; errors are those of `train`.

    Args:
        before: For each example the predictions of the drafters before; empty for the first, which weights all tokens
            alike.
    """
    order = _Order(examples, config)
    prepared = accelerator.prepare(drafter.to(accelerator.device))
    prepared.train()

    def batches(first: int) -> Iterator[tuple[Weighted, int]]:
        for step in count(first):
            torch.manual_seed(derive_seed(config.seed, step) % 2**32)  # for dropout, and for the places of blocks
            rows = order.rows(step)
            mine = rows[accelerator.process_index :: accelerator.num_processes] or rows[:1]
            batch, weights = _example_batch(examples, before, mine, config.depth)
            moved = batch.to(accelerator.device), None if weights is None else weights.to(accelerator.device)
            yield moved, sum(len(examples[row].tokens) for row in rows)

    def loss(weighted: Weighted) -> Tensor:
        batch, weights = weighted
        return drafter.loss(prepared(batch), batch, weights)

    optimizers = make_optimizers(drafter.stored, config.learning_rate, accelerator.device)
    trainer = Trainer(drafter.stored, optimizers, loss, lambda value: accelerator.reduce(value, reduction="mean"))
    saved = Checkpoint(checkpoint, asdict(config), config.save_every, writes=accelerator.is_main_process)
    yield from train(trainer, batches, config.num_steps, config.rate, saved)
    accelerator.wait_for_everyone()


def with_curves(steps: Iterator[Progress], folder: Path | None) -> Iterator[Progress]:
    """Yield the steps of a drafter, and write their TensorBoard curves to the folder, or nowhere if it is None.

    Files are made at the first step, so a drafter that was already finished leaves none.
    """
    yield (start := next(steps))
    if folder is None:
        yield from steps
        return
    writer: Any = None
    try:
        for progress in steps:
            if writer is None:
                from torch.utils.tensorboard import SummaryWriter

                # Steps after the checkpoint that a run resumes from were written before it was interrupted.
                writer = SummaryWriter(str(folder), purge_step=start.step + 1)
            values = (progress.loss, progress.rate, progress.grad_norm, progress.speed)
            for name, value in zip(_CURVES, values, strict=True):
                writer.add_scalar(name, value, progress.step)
            yield progress
    finally:
        if writer is not None:
            writer.close()


def _example_batch(
    examples: Sequence[TrainingExample], before: Sequence[Sequence[Predictions]], rows: Sequence[int], depth: int
) -> Weighted:
    batch = collate([examples[row] for row in rows])
    if not before:
        return batch, None
    weights = np.concatenate([token_weights(before[row], depth) for row in rows])
    distributions = np.concatenate([residual_logprobs(examples[row], before[row], depth) for row in rows])
    return replace(batch, top_logprobs=torch.from_numpy(distributions)), torch.from_numpy(weights)


class _Order:
    """The examples of each step: each once per epoch, in a new random order every time.

    Examples of several steps together are sorted by length, so that a batch has little padding.
    """

    def __init__(self, examples: Sequence[TrainingExample], config: TrainingConfig) -> None:
        self._num = len(examples)
        self._lengths = [len(example.tokens) for example in examples]
        mean = sum(self._lengths) / self._num
        self._rows = min(max(round(config.batch_tokens / mean), 1), self._num)
        self._seed = config.seed
        self._epochs: dict[int, list[int]] = {}

    def rows(self, step: int) -> list[int]:
        """Return the numbers of the examples of a step."""
        rows = []
        for index in range(step * self._rows, (step + 1) * self._rows):
            epoch, place = divmod(index, self._num)
            if epoch not in self._epochs:
                # A step may begin in the epoch before.
                self._epochs = {epoch - 1: self._epochs.get(epoch - 1, []), epoch: self._epoch(epoch)}
            rows.append(self._epochs[epoch][place])
        return rows

    def _epoch(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch) % 2**63)
        shuffled = torch.randperm(self._num, generator=generator).tolist()
        size = _SORTED_STEPS * self._rows
        windows = (shuffled[start : start + size] for start in range(0, self._num, size))
        return [row for window in windows for row in sorted(window, key=self._lengths.__getitem__)]
