"""A tiny target and its weights, of as many layers as `LAYERS` of a module says, which tests of drafters share."""

from pathlib import Path
from typing import Any

import pytest

from tiny import make_model, save_model


@pytest.fixture(scope="module")
def num_layers(request: pytest.FixtureRequest) -> int:
    return int(getattr(request.module, "LAYERS", 2))


@pytest.fixture(scope="module")
def target(num_layers: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=num_layers)


@pytest.fixture(scope="module")
def model(num_layers: int) -> Any:
    return make_model("llama", num_hidden_layers=num_layers)
