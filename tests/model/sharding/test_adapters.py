"""Adapters of a model that is split over ranks, which are threads here, and the messages that bring them."""

import gc
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specinfer.model.adapters.sites import AdapterSites
from specinfer.model.load import load_model
from specinfer.model.sharding.adapter_messages import ReceivedAdapters, SharedAdapters
from thread_group import check_adapted_shards, make_shards, random_pairs
from tiny import save_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "splits"),
    [
        ("llama", [(4, 1), (2, 2)]),  # two ranks have the same keys and values
        ("gpt2", [(2, 2)]),  # transposed; queries, keys and values in one layer
        ("phi3", [(2, 1)]),  # gates and values in one layer
        ("falcon", [(2, 1)]),  # queries, keys and values of each group
        ("gpt_oss", [(2, 1)]),
        ("qwen3_next", [(2, 1), (1, 2)]),  # recurrent layers
        ("falcon_h1", [(2, 1)]),
    ],
)
def test_ranks_add_slices_whose_sum_is_what_the_whole_model_adds(
    family: str, splits: list[tuple[int, int]], tmp_path: Path
) -> None:
    check_adapted_shards(save_model(tmp_path, family), splits)


class _Channel:
    """Messages that wait until the test takes them."""

    def __init__(self) -> None:
        self.messages: deque[Tensor] = deque()

    def send(self, numbers: Tensor, to: int) -> None:
        self.messages.append(numbers)

    def receive(self, source: int) -> Tensor:
        return self.messages.popleft()


def test_other_ranks_have_an_adapter_until_its_table_is_freed(tmp_path: Path) -> None:
    first, last = (stage[0] for stage in make_shards(1, 2))
    folder = save_model(tmp_path, "llama")
    loaded, other = (load_model(folder, torch.float32, CPU, shard=shard) for shard in (last, first))
    channel: Any = _Channel()
    received = ReceivedAdapters(other, channel)
    ranks: Any = SimpleNamespace(
        connections=SimpleNamespace(commands=channel), config=SimpleNamespace(world_size=2),
        call=lambda work: work(), check=lambda: None,
    )  # fmt: skip
    shared = SharedAdapters(ranks, received.receive)
    sites = AdapterSites(loaded)
    linears = shared.linears()
    assert "model.layers.0.mlp.up_proj" in linears.keys() - sites.linears.keys()
    sites_of_all = AdapterSites(load_model(folder, torch.float32, CPU))
    assert sites.linears | linears == sites_of_all.linears
    pairs = random_pairs(sites_of_all.linears)
    tables = [sites.table(pairs) for _ in range(2)]
    for table in tables:
        shared.share(table, pairs)
    assert [table.number for table in tables] == list(received.tables) == [1, 2]
    alike = AdapterSites(other).table(pairs)
    for one, wanted in zip(received.tables[1].layers, alike.layers, strict=True):
        assert one is not None
        assert wanted is not None
        assert torch.equal(one.down, wanted.down)
        assert torch.equal(one.up, wanted.up)
    del tables[0], table
    gc.collect()
    assert list(received.tables) == [1, 2]
    shared.send_dropped()
    assert list(received.tables) == [2]
