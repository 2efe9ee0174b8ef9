"""Muon in float32: the steps of PyTorch's, which rounds to bfloat16 on the way."""

from typing import Any

import pytest
import torch

from specinfer.learning.optimizers import FloatMuon


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
