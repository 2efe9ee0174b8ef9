"""A stand-in for the embedded pair: its tokenizer, and small random weights, where the text does not matter."""

import shutil
from collections.abc import Iterator

import pytest

from specinfer.demo.pair import PACKED, DemoPair
from tiny import save_model

_SIZES = {
    "vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="session")
def _small_pair(tmp_path_factory: pytest.TempPathFactory) -> DemoPair:
    folders = [save_model(tmp_path_factory.mktemp("demo"), noise=noise, **_SIZES) for noise in (0.0, 0.15)]
    for folder in folders:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(PACKED / "target" / name, folder)
    return DemoPair(*folders)


@pytest.fixture(scope="module")
def small_demo(_small_pair: DemoPair) -> Iterator[None]:
    """The models that are called "demo" in a module are the stand-ins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specinfer.setup.model_names.demo_folders", lambda: _small_pair)
        yield
