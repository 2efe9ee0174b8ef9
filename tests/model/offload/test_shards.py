"""Places of weights in a safetensors file: a file that is too short for them is refused before anything is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from specinfer.core.errors import ModelError
from specinfer.model.offload.shards import Shards

DATA = save({"a": torch.arange(40, dtype=torch.float32), "b": torch.ones(3, 5)})
HEADER = 8 + int.from_bytes(DATA[:8], "little")


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(DATA)
    with Shards(tmp_path) as shards:
        assert torch.equal(shards.sources["a"].read(), torch.arange(40.0))


@pytest.mark.parametrize("missing", [1, 8, HEADER, HEADER + 1, len(DATA) - HEADER])
def test_a_file_cut_by_any_number_of_bytes_is_refused(tmp_path: Path, missing: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(DATA[:-missing])
    with pytest.raises(ModelError, match="a tensor's place does not fit its shape"):
        Shards(tmp_path)


@pytest.mark.parametrize("size", [8, HEADER - 1])
def test_a_file_that_ends_in_its_header_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(DATA[:size])
    with pytest.raises(ModelError, match="is no safetensors file that can be read"):
        Shards(tmp_path)
