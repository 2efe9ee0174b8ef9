"""Fixtures of all tests, in processes that run some: one that hands them out to others imports no PyTorch for it."""

import os
from pathlib import Path

import pytest

# Before a folder's conftest.py, named on the command line, imports Triton; the suite asks PyTorch whether it has a GPU.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    hands_out = config.getoption("dist", "no") != "no" and not config.option.collectonly
    if hasattr(config, "workerinput") or not hands_out:
        config.pluginmanager.import_plugin("suite")
