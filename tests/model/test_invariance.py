"""Batch invariance: which models are accepted, and which are refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specinfer.core.errors import ModelError
from specinfer.model.load import load_model

CPU = torch.device("cpu")


def test_native_layers_are_accepted_on_cpus(model_folder: Callable[..., Path]) -> None:
    assert load_model(model_folder("llama"), torch.float32, CPU, batch_invariant=True).batch_invariant


def test_families_without_native_layers_are_refused_on_cpus(model_folder: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="batch_invariant: family 'gemma2' runs as transformers defines it"):
        load_model(model_folder("gemma2"), torch.float32, CPU, batch_invariant=True)
