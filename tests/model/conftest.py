"""What tests of models share."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def folder(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A good model that a test may damage."""
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))
