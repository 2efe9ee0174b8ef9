"""A target that ranks compute together."""

import pytest

from tiny import save_model, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("target")
    return str(save_tokenizer(save_model(place, "llama", num_hidden_layers=3)))
