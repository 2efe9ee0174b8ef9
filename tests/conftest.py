"""Fixtures of all tests, in processes that run some: one that hands them out to others imports no PyTorch for it."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    hands_out = config.getoption("dist", "no") != "no" and not config.option.collectonly
    if hasattr(config, "workerinput") or not hands_out:
        config.pluginmanager.import_plugin("suite")
