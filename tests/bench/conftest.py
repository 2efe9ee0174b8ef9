"""The models that measurements of `specinfer bench` load here."""

import pytest

from tiny import save_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a drafter that is the target itself but for its name."""
    root = tmp_path_factory.mktemp("pair")
    return str(save_model(root / "target")), str(save_model(root / "drafter"))
