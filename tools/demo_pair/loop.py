"""One resumable training loop, used for the target and for the drafter.

The data order is a pure function of (seed, step), and the learning rate a function of the spent part of the budget. So
an interrupted run resumes with the same results.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.core.files import write_atomically

_FINAL_SCALE = 0.02


@dataclass(frozen=True, slots=True)
class Budget:
    """The length of training: wall-clock minutes or tokens, whichever is given."""

    minutes: float | None = None
    tokens: int | None = None

    def spent(self, progress: "Progress") -> float:
        """Return the part of the budget already used, from 0 to 1."""
        if self.tokens is not None:
            return min(1.0, progress.tokens / self.tokens)
        assert self.minutes is not None
        return min(1.0, progress.seconds / (60 * self.minutes))

    def part(self, share: float) -> "Budget":
        if self.tokens is not None:
            return Budget(tokens=round(share * self.tokens))
        assert self.minutes is not None
        return Budget(minutes=share * self.minutes)


@dataclass(slots=True)
class Progress:
    """The progress of a run; stored in its checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")  # running mean


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """The settings of one run that do not depend on the model."""

    budget: Budget
    seed: int = 0
    batch_tokens: int = 8192
    # (from this part of the budget, length): short sequences first, since attention is expensive.
    lengths: tuple[tuple[float, int], ...] = ((0.0, 256), (0.5, 512), (0.9, 1024))
    muon_lr: float = 4e-3
    adam_lr: float = 4e-3
    warmup_steps: int = 60
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    save_every_s: float = 180.0

    def seq_len(self, spent: float) -> int:
        return max(length for start, length in self.lengths if spent >= start)

    def learning_scale(self, step: int, spent: float) -> float:
        """Return the learning rate scale: linear warm-up by step, times linear decay to the end of the budget."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        return warmup * (1.0 - (1.0 - _FINAL_SCALE) * spent)


class Windows:
    """Windows of a token stream, shuffled again in each epoch."""

    def __init__(self, tokens: Tensor, seed: int) -> None:
        self.tokens = tokens  # [num_tokens]
        self.seed = seed

    def batch(self, step: int, num_rows: int, seq_len: int) -> Tensor:
        """Return the windows of one step, [num_rows, seq_len + 1]: a pure function of its arguments."""
        # Each epoch shifts the cuts, so one spare window is kept at the end.
        num_windows = (len(self.tokens) - 1) // seq_len - 1
        assert num_windows > 0, "the corpus is shorter than two windows"
        rows = []
        for index in range(step * num_rows, (step + 1) * num_rows):
            epoch, place = divmod(index, num_windows)
            order, shift = self._epoch(epoch, num_windows, seq_len)
            start = int(order[place]) * seq_len + shift
            rows.append(self.tokens[start : start + seq_len + 1])
        return torch.stack(rows).long()

    def _epoch(self, epoch: int, num_windows: int, seq_len: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(num_windows, generator=generator)
        shift = int(torch.randint(seq_len, (1,), generator=generator))
        return order, shift


def precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return bf16 autocast where the hardware multiplies bf16 natively, and fp32 elsewhere."""
    if device.type == "cuda" or (device.type == "cpu" and _cpu_has_bf16()):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def _cpu_has_bf16() -> bool:
    flags = Path("/proc/cpuinfo")
    return flags.exists() and "avx512_bf16" in flags.read_text()


def optimizers(model: nn.Module, config: LoopConfig) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for the embedding and the norms."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices,
            lr=config.muon_lr,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def save_atomically(value: object, path: Path) -> None:
    write_atomically(path, lambda partial: torch.save(value, partial))


def fit(
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    batch_at: Callable[[int, int, int], Tensor],
    config: LoopConfig,
    checkpoint: Path,
    stop_at_step: int | None = None,
) -> Iterator[Progress]:
    """Train until the budget is spent, yielding after each step.

    `batch_at(step, num_rows, seq_len)` returns the windows, `loss_of(windows)` their mean loss.
    """
    device = next(model.parameters()).device
    model.train()
    optims = optimizers(model, config)
    base_lrs = [group["lr"] for optim in optims for group in optim.param_groups]
    progress = Progress()
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optim, saved in zip(optims, state["optimizers"], strict=True):
            optim.load_state_dict(saved)
        progress = Progress(**state["progress"])

    def save() -> None:
        state = {
            "model": model.state_dict(),
            "optimizers": [optim.state_dict() for optim in optims],
            "progress": {name: getattr(progress, name) for name in Progress.__slots__},
        }
        save_atomically(state, checkpoint)

    last_save = time.monotonic()
    while (spent := config.budget.spent(progress)) < 1.0 and progress.step != stop_at_step:
        began = time.monotonic()
        seq_len = config.seq_len(spent)
        num_rows = max(1, config.batch_tokens // seq_len)
        scale = config.learning_scale(progress.step, spent)
        groups = [group for optim in optims for group in optim.param_groups]
        for group, base_lr in zip(groups, base_lrs, strict=True):
            group["lr"] = base_lr * scale
        loss = loss_of(batch_at(progress.step, num_rows, seq_len).to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=True)
        value = loss.item()
        mixing = max(0.03, 1 / (progress.step + 1))
        before = value if progress.step == 0 else progress.loss
        progress.loss = before + mixing * (value - before)
        progress.step += 1
        progress.tokens += num_rows * seq_len
        progress.seconds += time.monotonic() - began
        yield progress
        if time.monotonic() - last_save > config.save_every_s:
            save()
            last_save = time.monotonic()
    save()
