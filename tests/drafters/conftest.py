"""A tiny target and its weights, which tests of several drafters share."""

from pathlib import Path
from typing import Any

import pytest

from tiny import make_model, save_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama")
