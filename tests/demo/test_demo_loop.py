"""The demo training loop: it learns, and an interruption changes nothing."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_pair.loop import Budget, LoopConfig, Progress, Windows, fit
from demo_pair.measure import pass_lengths


class Toy(nn.Module):
    """A bigram model with one hidden matrix, so that both optimizers have work."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 32)
        self.hidden = nn.Linear(32, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.linear(self.hidden(self.embed(ids)), self.embed.weight)


TOKENS = torch.arange(4000) * 7 % 16
CONFIG = LoopConfig(
    Budget(tokens=4096), batch_tokens=64, muon_lr=0.02, adam_lr=0.02, warmup_steps=5, lengths=((0.0, 16), (0.5, 32))
)


def train(model: Toy, checkpoint: Path, stop_at_step: int | None = None) -> list[float]:
    def loss_of(windows: Tensor) -> Tensor:
        return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    batch_at = Windows(TOKENS, seed=0).batch
    return [progress.loss for progress in fit(model, loss_of, batch_at, CONFIG, checkpoint, stop_at_step)]


def test_loss_falls(tmp_path: Path) -> None:
    losses = train(Toy(), tmp_path / "checkpoint.pt")
    assert len(losses) == 64
    assert losses[-1] < losses[0] / 2


def test_interrupted_run_equals_whole_run(tmp_path: Path) -> None:
    whole, first, second = Toy(), Toy(), Toy()
    losses = train(whole, tmp_path / "whole.pt")
    begun = train(first, tmp_path / "parts.pt", stop_at_step=23)
    assert begun + train(second, tmp_path / "parts.pt") == losses
    for expected, actual in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_windows_depend_on_seed_and_step_alone() -> None:
    windows = Windows(torch.arange(1000), seed=3)
    batch = windows.batch(5, 4, 10)
    assert torch.equal(batch, Windows(torch.arange(1000), seed=3).batch(5, 4, 10))
    assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)
    assert not torch.equal(batch, Windows(torch.arange(1000), seed=4).batch(5, 4, 10))


def test_one_epoch_deals_each_window_once() -> None:
    windows = Windows(torch.arange(1000), seed=0)
    starts = torch.cat([windows.batch(step, 7, 10)[:, 0] for step in range(14)])  # 98 windows
    assert len(set(starts.tolist())) == 98


def test_budget_of_minutes_counts_training_time() -> None:
    assert Budget(minutes=2).spent(Progress(seconds=30)) == 0.25
    assert Budget(minutes=2).part(0.5).spent(Progress(seconds=90)) == 1.0


@pytest.mark.parametrize(
    ("agrees", "expected"),
    [
        ([True, True, True, False], [3, 1]),  # a chain of 2 taken whole, one token of the pass itself
        ([False, False], [1, 1]),
        ([True, False, False], [2, 1]),
    ],
)
def test_pass_lengths(agrees: list[bool], expected: list[int]) -> None:
    assert pass_lengths(agrees, chain=2) == expected
