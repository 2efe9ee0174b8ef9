"""Shards of the GPU's decoder, on the CPU by its plain twins: ranks compute what the whole model does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from on_device import as_on_a_gpu
from specinfer.model.adapters.peft_folder import Pair
from specinfer.model.adapters.sites import AdapterSites
from specinfer.model.device_decoder import DeviceDecoder
from specinfer.model.graphs.capture import Graphs
from specinfer.model.kv_tensors import TapShape
from specinfer.model.sharding.shard_runner import ShardRunner
from specinfer.model.sharding.stage import received
from thread_group import WHOLE, Ranks, ThreadGroup, passes
from tiny import save_model

CPU = torch.device("cpu")
SPLITS = [(2, 1), (4, 1), (1, 3), (2, 2)]  # ranks of a tensor group, and stages
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "mistral": {},  # with a window
    "qwen2": {},
    "qwen3": {},
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with as_on_a_gpu(monkeypatch):
        yield


def _folder(path: Path, family: str = "llama", **changes: Any) -> Path:
    return save_model(path, family, num_hidden_layers=3, **(FAMILIES[family] | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_compute_what_transformers_does_with_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, family)
    wanted = Ranks(folder, WHOLE, native=False).logits()
    for split in SPLITS:
        ranks = Ranks(folder, split)
        assert all(isinstance(loaded.model, DeviceDecoder) for loaded in ranks.all)
        for found, whole in zip(ranks.logits(), wanted, strict=True):
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stages_compute_what_the_whole_decoder_does_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    whole, stages = Ranks(folder, WHOLE, dtype=dtype), Ranks(folder, (1, 3), dtype=dtype)
    assert all(received(one.model, 2, one.dtype, CPU).dtype == dtype for one in stages.all)
    assert all(map(torch.equal, stages.logits(), whole.logits()))


@pytest.mark.parametrize(("quantization", "near"), [("int8", 0.03), ("fp8", 1e-5)])
def test_rounded_shards_compute_what_transformers_does(quantization: str, near: float, tmp_path: Path) -> None:
    """Of an activation rounded to 8 bits, a last bit may be a step."""
    folder = _folder(tmp_path, hidden_size=128, intermediate_size=128, head_dim=32)
    theirs, ours = (Ranks(folder, (2, 2), quantization, native=native) for native in (False, True))
    assert all(isinstance(loaded.model, DeviceDecoder) for loaded in ours.all)
    for found, wanted in zip(ours.logits(), theirs.logits(), strict=True):
        assert (found - wanted).norm() <= near * wanted.norm()


def test_each_layer_is_added_up_twice(tmp_path: Path) -> None:
    ranks = Ranks(_folder(tmp_path), (2, 1))
    ranks.logits()
    for loaded in ranks.all:
        group = loaded.shard.tensor
        assert isinstance(group, ThreadGroup)
        assert group.num_sums == 2 * 3 * len(passes())


def test_ranks_add_their_slices_of_adapters(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    whole = Ranks(folder, WHOLE)
    plain, sites = whole.logits(), AdapterSites(whole.all[0])
    torch.manual_seed(1)
    pairs = {
        name: Pair(torch.randn(3, shape.inputs) / shape.inputs**0.5, torch.randn(shape.outputs, 3) * 0.3)
        for name, shape in sites.linears.items()
    }
    whole.adapters[id(whole.all[0])] = sites.table(pairs)
    wanted = whole.logits()
    assert not torch.allclose(plain[1], wanted[1], atol=1e-2)
    for split in SPLITS:
        ranks = Ranks(folder, split)
        for loaded in ranks.all:
            ranks.adapters[id(loaded)] = AdapterSites(loaded).table(pairs)
        for found, one in zip(ranks.logits(), wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-4)


class _Hands:
    """The group of stages, in which what one sends is what the next one receives; all in one thread."""

    size = 3

    def __init__(self, rank: int, sent: list[Tensor]) -> None:
        self.rank, self._sent = rank, sent

    def send(self, tensor: Tensor, to: int) -> None:
        assert to == self.rank - 1
        self._sent.append(tensor)

    def recv(self, tensor: Tensor, source: int) -> None:
        found = self._sent.pop(0)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        tensor.copy_(found)


def _stages(folder: Path, taps: TapShape | None, graphs: Graphs | None) -> list[ShardRunner]:
    sent: list[Tensor] = []
    ranks = Ranks(folder, (1, 3))
    groups: list[Any] = [_Hands(2 - loaded.shard.stage, sent) for loaded in ranks.all]
    return [
        ShardRunner(loaded, 64, group, [torch.float32], taps, graphs=graphs)
        for loaded, group in zip(ranks.all, groups, strict=True)
    ]


def test_captured_passes_of_stages_are_those_without_padding(tmp_path: Path) -> None:
    """Results and hidden states for drafters; results stay as they are when the next pass runs."""
    folder, taps = _folder(tmp_path), TapShape((0, 1, 2, 3), 32)
    found = []
    for graphs in (None, Graphs(CPU)):
        stages = _stages(folder, taps, graphs)
        assert all((stage.why_not_captured is None) == (graphs is not None) for stage in stages)
        logits = [[stage.run(pieces) for stage in stages][-1] for pieces in passes()]
        slots = passes()[-1][0].slots
        found.append([*logits, *stages[-1].read_taps((0, 1, 2, 3), slots)])
    for plain, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)


def test_shards_that_add_up_results_are_not_captured(tmp_path: Path) -> None:
    loaded = Ranks(_folder(tmp_path), (2, 1)).all[0]
    group: Any = _Hands(0, [])
    assert "split over ranks" in str(ShardRunner(loaded, 64, group, [], graphs=Graphs(CPU)).why_not_captured)
