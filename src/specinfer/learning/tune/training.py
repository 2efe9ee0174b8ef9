"""Training of one drafter, in a loop whose data order and learning rate depend on the step only.

So an interrupted run resumes from its last checkpoint with the same results. accelerate handles devices, half precision
and several processes.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn

from specinfer.core.errors import file_error
from specinfer.core.files import write_atomically
from specinfer.core.noise import derive_seed
from specinfer.learning.distillation import draft_logits_of, restrict, training_loss
from specinfer.learning.examples import Batch, DamagedError, TrainingExample, collate
from specinfer.learning.optimizers import FloatMuon
from specinfer.learning.tune.boosting import Predictions, residual_logprobs, token_weights

_WARMUP = 0.03  # part of all steps
_FINAL = 0.02  # part of the learning rate
_MAX_GRAD_NORM = 1.0
_SORTED_STEPS = 16
_NOT_HIDDEN = ("embed", "lm_head", "wte", "wpe", "pairs", "confidence")  # in the names of matrices


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


@dataclass(slots=True)
class Progress:
    """The progress of a run; stored in its checkpoint."""

    step: int = 0
    tokens: int = 0  # tokens read, without padding
    seconds: float = 0.0
    loss: float = float("nan")  # running mean, nats per token
    rate: float = 0.0  # learning rate of the last step
    grad_norm: float = 0.0


def learning_rate_for(num_parameters: int) -> float:
    """Return a common learning rate for a model of this size: large models take smaller steps."""
    return min(4e-3, 4e-3 * math.sqrt(1e6 / num_parameters))


def fit(
    accelerator: Accelerator,
    model: nn.Module,
    examples: Sequence[TrainingExample],
    before: Sequence[Sequence[Predictions]],
    config: TrainingConfig,
    checkpoint: Path,
    token_map: torch.Tensor | None = None,
) -> Iterator[Progress]:
    """Train the model in place, yielding after each step and once at the start.

    Args:
        before: For each example the predictions of the drafters before; empty for the first, which weights all tokens
            alike.
        token_map: [mapped] int64 the only tokens that it is to predict, or None for all.

    Raises:
        TrainingError: The loss is not finite, or a checkpoint cannot be written.
        DamagedError: The checkpoint cannot be read, or belongs to another run.
    """
    optimizers = make_optimizers(model, config.learning_rate, accelerator.device)
    progress = _restore(checkpoint, model, optimizers, config) if checkpoint.exists() else Progress()
    prepared, *optimizers = accelerator.prepare(draft_logits_of(model, token_map), *optimizers)
    order = _Order(examples, config)
    last_save = time.monotonic()
    yield replace(progress)
    prepared.train()
    while progress.step < config.num_steps:
        began = time.monotonic()
        torch.manual_seed(derive_seed(config.seed, progress.step) % 2**32)  # for dropout, if there is any
        rows = order.rows(progress.step)
        mine = rows[accelerator.process_index :: accelerator.num_processes] or rows[:1]
        batch, weights = _example_batch(examples, before, mine, config.depth)
        batch = batch.to(accelerator.device)
        weights = None if weights is None else weights.to(accelerator.device)
        if token_map is not None:
            vocab_size = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
            batch, mass = restrict(batch, token_map.to(accelerator.device), vocab_size)
            weights = mass if weights is None else weights * mass
        progress.rate = config.learning_rate * _schedule(progress.step, config.num_steps)
        loss, progress.grad_norm = _optimize(accelerator, prepared, optimizers, batch, weights, progress.rate)
        if not np.isfinite(loss) or not np.isfinite(progress.grad_norm):
            kept = f"the last checkpoint is as it was: {checkpoint}" if checkpoint.exists() else "nothing was saved yet"
            raise TrainingError(
                f"the loss is not finite at step {progress.step}: lower learning_rate, or give more text; {kept}"
            )
        mixing = max(0.03, 1 / (progress.step + 1))
        progress.loss = loss if progress.step == 0 else progress.loss + mixing * (loss - progress.loss)
        progress.step += 1
        progress.tokens += sum(len(examples[row].tokens) for row in rows)
        progress.seconds += time.monotonic() - began
        if progress.step == config.num_steps or time.monotonic() - last_save > config.save_every:
            if accelerator.is_main_process:
                _save(checkpoint, model, optimizers, progress, config)
            last_save = time.monotonic()
        yield replace(progress)
    accelerator.wait_for_everyone()


def _optimize(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Batch,
    weights: torch.Tensor | None,
    rate: float,
) -> tuple[float, float]:
    """Run one optimizer step, unless the loss or the gradient is not finite, and return the loss and gradient norm."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
    with accelerator.autocast():
        logits = model(batch)
    loss = training_loss(logits, batch, weights)
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
    mean = float(accelerator.reduce(loss.detach(), reduction="mean"))
    grad_norm = float(norm) if norm is not None else 0.0
    if np.isfinite(mean) and np.isfinite(grad_norm):
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return mean, grad_norm


def make_optimizers(model: nn.Module, learning_rate: float, device: torch.device) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices, and AdamW for what reads or writes tokens, vectors, norms and biases."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_hidden = parameter.ndim == 2 and not any(part in name for part in _NOT_HIDDEN)
        (matrices if is_hidden else others).append(parameter)
    found: list[torch.optim.Optimizer] = []
    if matrices:
        kind = FloatMuon if device.type == "cpu" else torch.optim.Muon
        found.append(kind(matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    found.append(torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0))
    return found


def _schedule(step: int, num_steps: int) -> float:
    """Return the learning rate scale: linear warm-up, then linear decay."""
    warmup = min(1.0, (step + 1) / max(_WARMUP * num_steps, 1.0))
    return warmup * (1.0 - (1.0 - _FINAL) * step / num_steps)


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
        found = []
        for index in range(step * self._rows, (step + 1) * self._rows):
            epoch, place = divmod(index, self._num)
            if epoch not in self._epochs:
                generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch) % 2**63)
                self._epochs = {epoch - 1: self._epochs.get(epoch - 1, [])}  # a step may begin in the epoch before
                shuffled = torch.randperm(self._num, generator=generator).tolist()
                size = _SORTED_STEPS * self._rows
                windows = (shuffled[start : start + size] for start in range(0, self._num, size))
                self._epochs[epoch] = [i for part in windows for i in sorted(part, key=self._lengths.__getitem__)]
            found.append(self._epochs[epoch][place])
        return found


def _example_batch(
    examples: Sequence[TrainingExample], before: Sequence[Sequence[Predictions]], rows: Sequence[int], depth: int
) -> tuple[Batch, torch.Tensor | None]:
    batch = collate([examples[row] for row in rows])
    if not before:
        return batch, None
    weights = np.concatenate([token_weights(before[row], depth) for row in rows])
    distributions = np.concatenate([residual_logprobs(examples[row], before[row], depth) for row in rows])
    return replace(batch, top_logprobs=torch.from_numpy(distributions)), torch.from_numpy(weights)


def _save(path: Path, model: nn.Module, optimizers: Sequence[Any], progress: Progress, config: TrainingConfig) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
        "config": asdict(config),
    }

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    try:
        write_atomically(path, write)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise TrainingError(
            f"{path} cannot be written ({error}); free some space and start again: the last one is intact"
        ) from error


def _restore(
    path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: TrainingConfig
) -> Progress:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        is_same = {**state["config"], "save_every": 0} == {**asdict(config), "save_every": 0}
        if is_same:
            model.load_state_dict(state["model"])
            for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            return Progress(**state["progress"])
    except Exception as error:  # a damaged file may raise anything
        raise DamagedError(f"{path} cannot be read ({type(error).__name__}); delete it to begin anew") from error
    raise DamagedError(f"{path} is of a run with other settings; name another folder, or delete it")
