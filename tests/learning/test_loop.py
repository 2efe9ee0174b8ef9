"""The training loop: resumed runs end as whole ones, and what is not finite changes nothing; and Muon in float32."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specinfer.learning.examples import DamagedError
from specinfer.learning.loop import Checkpoint, Progress, Trainer, TrainingError, train
from specinfer.learning.optimizers import FloatMuon

STEPS = 12


def _trainer() -> Trainer[Tensor]:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    return Trainer(model, [torch.optim.AdamW(model.parameters())], lambda batch: model(batch).square().mean())


def _batches(first: int, bad_step: int | None = None) -> Iterator[tuple[Tensor, int]]:
    for step in count(first):
        batch = torch.randn((4, 3), generator=torch.Generator().manual_seed(step))
        yield batch * torch.nan if step == bad_step else batch, 4


def _steps(trainer: Trainer[Tensor], path: Path, bad_step: int | None = None, **settings: object) -> Iterator[Progress]:
    checkpoint = Checkpoint(path, {"seed": 0, "save_every": 0} | settings, save_every=0.0)
    return train(trainer, lambda first: _batches(first, bad_step), STEPS, lambda step: 0.1 / (step + 1), checkpoint)


@pytest.mark.parametrize("stop", [0, 1, 5, STEPS])
def test_a_training_that_is_stopped_and_resumed_ends_as_a_whole_one(stop: int, tmp_path: Path) -> None:
    whole, stopped, resumed = _trainer(), _trainer(), _trainer()
    losses = [progress.loss for progress in _steps(whole, tmp_path / "whole.pt")][1:]
    weights = [trainer.model.state_dict()["weight"] for trainer in (whole, stopped)]
    assert weights[0].norm() < 0.8 * weights[1].norm(), "it learns"
    for progress in _steps(stopped, tmp_path / "stopped.pt"):
        if progress.step == stop:
            break
    again = list(_steps(resumed, tmp_path / "stopped.pt", save_every=30))
    assert [progress.step for progress in again] == list(range(stop, STEPS + 1))
    assert again[-1].tokens == 4 * STEPS
    assert again[-1].loss == losses[-1]
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


def test_a_loss_that_is_not_finite_ends_the_training_and_changes_nothing(tmp_path: Path) -> None:
    trainer = _trainer()
    with pytest.raises(TrainingError, match=r"not finite at step 3: .*the last checkpoint is as it was: .*a\.pt"):
        list(_steps(trainer, tmp_path / "a.pt", bad_step=3))
    assert trainer.progress.step == 3
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(state["model"]["weight"], trainer.model.state_dict()["weight"])
    assert len(list(_steps(_trainer(), tmp_path / "a.pt"))) == STEPS - 3 + 1


def test_checkpoints_of_other_trainings_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    list(_steps(_trainer(), path))
    with pytest.raises(DamagedError, match="other settings"):
        next(_steps(_trainer(), path, seed=1))
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-50], b"\xff" * 300):
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=r"a\.pt cannot be read"):
            next(_steps(_trainer(), path))


@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
def test_steps_are_those_of_pytorch_but_for_its_rounding(shape: tuple[int, int]) -> None:
    source = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=source)
    parameters = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [kind([one], **options) for kind, one in zip((torch.optim.Muon, FloatMuon), parameters, strict=True)]
    for _ in range(3):
        gradient = torch.randn(shape, generator=source)
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    theirs, ours = (one.detach() - start for one in parameters)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02
    states = [optimizer.state_dict()["state"][0]["momentum_buffer"] for optimizer in optimizers]
    torch.testing.assert_close(*states)
