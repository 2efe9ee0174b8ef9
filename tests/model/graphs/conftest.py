"""What tests of graphs share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.model.load import LoadedModel, load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded_of(model_folder: Callable[..., Path]) -> Callable[..., LoadedModel]:
    """As transformers has it: native layers read pieces, not layouts."""
    made: dict[str, LoadedModel] = {}

    def loaded(*args: Any, **kwargs: Any) -> LoadedModel:
        key = repr((args, kwargs))
        if key not in made:
            made[key] = load_model(model_folder(*args, **kwargs), torch.float32, CPU, native=False)
        return made[key]

    return loaded
