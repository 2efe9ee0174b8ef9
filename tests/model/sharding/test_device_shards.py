"""Shards of the GPU's decoder, on the CPU by its plain twins: ranks compute what the whole model does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from on_device import as_on_a_gpu
from recorded_graphs import Recorder, num_replays, record_graphs
from specinfer.core.tree import TokenTree
from specinfer.model.batch import Piece
from specinfer.model.graphs.capture import Graphs
from specinfer.model.kv_tensors import TapShape
from specinfer.model.layers.device import DeviceDecoder
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.sharding import shard_runner
from specinfer.model.sharding.shard_runner import ShardRunner
from specinfer.model.sharding.stage import received
from thread_group import (
    WHOLE,
    Ranks,
    ThreadGroup,
    assert_close_each,
    at_once,
    check_adapted_shards,
    make_shards,
    passes,
)
from tiny import random_prompts, save_model

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
        assert_close_each(ranks.logits(), wanted)


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
    check_adapted_shards(_folder(tmp_path), SPLITS)


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
    stages = [
        ShardRunner(loaded, 64, group, [torch.float32], taps) for loaded, group in zip(ranks.all, groups, strict=True)
    ]
    if graphs is not None:
        for stage in stages:
            stage.capture(graphs)
    return stages


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


def _one_request() -> list[list[Piece]]:
    """A prompt, a tree on it, and a token more, each a pass of a size that is captured at load."""
    (prompt,), slots = random_prompts((4,), seed=3), np.arange(40)
    tree = TokenTree((7, 3, 5, 9), (-1, 0, 0, 1))
    return [
        [Piece.from_span(prompt, TokenTree.root(prompt[-1]), slots[:0], slots[:4])],
        [Piece.from_span([7], tree, slots[:4], slots[4:8])],
        [Piece.from_span([8], TokenTree.root(8), slots[:5], slots[8:9])],
    ]


# Number of sums of a pass. The first family has the fused decoder.
SUMS = {"llama": 4, "gemma2": 4, "gpt_neox": 4, "falcon": 4, "phi3": 4}


@pytest.mark.parametrize("family", SUMS)
def test_passes_of_ranks_that_add_up_results_are_captured_between_the_sums(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any family; what is summed is copied, since a definition may keep it until after the next sum."""
    record_graphs(monkeypatch)
    folder, found, num_sums = save_model(tmp_path, family), [], SUMS[family]
    for is_captured in (False, True):
        ranks = Ranks(folder, (2, 1)).all

        def work(loaded: LoadedModel, is_captured: bool = is_captured) -> list[Tensor]:
            group = cast(Any, _Hands(0, []))
            with Recorder():
                graphs = Graphs(torch.device("cuda")) if is_captured else None
                runner = ShardRunner(loaded, 64, group, [])
                if graphs is not None:
                    runner.capture(graphs, max_requests=2)
                assert (runner.why_not_captured is None) == is_captured
                before, logits = num_replays(), [runner.run(pieces) for pieces in _one_request()]
                # Of each pass the graphs around the sums.
                assert num_replays() - before == (3 * (num_sums + 1) if is_captured else 0)
                return logits

        # PyTorch has crashed where two threads were in dispatch modes at the same time.
        found.append(at_once(work, ranks, in_turns=True)[0])
    for plain, captured in zip(*found, strict=True):
        torch.testing.assert_close(captured, plain, rtol=1e-5, atol=1e-5)


def _captured(loaded: LoadedModel) -> ShardRunner:
    runner = ShardRunner(loaded, 64, cast(Any, _Hands(0, [])), [])
    runner.capture(Graphs(CPU))
    return runner


def test_ranks_that_add_up_results_pad_their_passes_together_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(_folder(tmp_path), (2, 1)).all
    wanted = Ranks(tmp_path, WHOLE, native=False).logits()
    right = shard_runner.make_graph_runner

    def made(loaded: LoadedModel, *args: Any) -> Any:
        return "it does not agree" if loaded.shard.tensor.rank else right(loaded, *args)

    monkeypatch.setattr(shard_runner, "make_graph_runner", made)

    def work(loaded: LoadedModel) -> tuple[str | None, list[Tensor]]:
        runner = _captured(loaded)
        return runner.why_not_captured, [runner.run(pieces) for pieces in passes()]

    (why, found), (other_why, _) = at_once(work, ranks)
    assert (why, other_why) == ("another rank cannot pad its passes", "it does not agree")
    assert_close_each(found, wanted)


def test_a_rank_whose_fused_layers_were_refused_pads_with_the_others(tmp_path: Path) -> None:
    """It runs the family's definition, which has the same sums."""
    folder, ((one, other),) = _folder(tmp_path), make_shards(2, 1)
    ranks = [
        load_model(folder, torch.float32, CPU, shard=shard, native=native)
        for shard, native in ((one, True), (other, False))
    ]
    assert [isinstance(loaded.model, DeviceDecoder) for loaded in ranks] == [True, False]

    def work(loaded: LoadedModel) -> tuple[str | None, list[Tensor]]:
        runner = _captured(loaded)
        return runner.why_not_captured, [runner.run(pieces).clone() for pieces in passes()]

    (why, found), (other_why, _) = at_once(work, ranks)
    assert why is other_why is None
    assert_close_each(found, Ranks(folder, WHOLE, native=False).logits())
