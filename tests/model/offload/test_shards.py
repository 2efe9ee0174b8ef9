"""Places of weights in a safetensors file: a file that is too short for them is refused before anything is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from specinfer.core.errors import ModelError, WeightsError
from specinfer.model.offload.meta_weights import Cut
from specinfer.model.offload.shards import Shards

DATA = save({"a": torch.arange(40, dtype=torch.float32), "b": torch.ones(3, 5)})
HEADER = 8 + int.from_bytes(DATA[:8], "little")


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_whole_file_is_read_through_the_page_cache_and_past_it(tmp_path: Path, is_cached: bool) -> None:
    large = torch.arange(3 * 2**19 + 5, dtype=torch.float32)  # longer than what is read past it at a time
    (tmp_path / "model.safetensors").write_bytes(save({"a": large, "b": torch.ones(3, 5)}))
    with Shards(tmp_path, is_cached=is_cached) as shards:
        assert torch.equal(shards.sources["a"].read(), large)
        assert torch.equal(shards.sources["b"].read_part(Cut(1, (range(1, 3),))), torch.ones(3, 2))


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_file_that_is_cut_after_it_was_opened_is_refused_at_the_end(tmp_path: Path, is_cached: bool) -> None:
    (tmp_path / "model.safetensors").write_bytes(DATA)
    with Shards(tmp_path, is_cached=is_cached) as shards:
        (tmp_path / "model.safetensors").write_bytes(DATA[:-70])
        with pytest.raises(WeightsError, match=r"ends \d+ bytes early"):
            [source.read() for source in shards.sources.values()]


@pytest.mark.parametrize("missing", [1, 8, HEADER, HEADER + 1, len(DATA) - HEADER])
def test_a_file_cut_by_any_number_of_bytes_is_refused(tmp_path: Path, missing: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(DATA[:-missing])
    with pytest.raises(ModelError, match="a tensor's place does not fit its shape"):
        Shards(tmp_path)


@pytest.mark.parametrize("size", [8, HEADER - 1])
def test_a_file_that_ends_in_its_header_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(DATA[:size])
    with pytest.raises(ModelError, match="is not a safetensors file that can be read"):
        Shards(tmp_path)
