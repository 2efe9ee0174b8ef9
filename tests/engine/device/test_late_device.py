"""Steps and passes on a device that is late: no host memory is used again before its last reader has read it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from heads import save_tiny_block, save_tiny_head
from on_device import Pair, come_and_go, executor_of, make_device_engine
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.engine.device.state import Exchange
from specinfer.model.batch import ForwardBatch, Piece
from specinfer.model.forward import forward
from specinfer.model.graphs import graph_runner
from specinfer.model.graphs.buffers import Buffers
from specinfer.model.graphs.capture import Graphs
from specinfer.model.heads.load import load_head
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner
from tests.engine.device.late_stream import (
    LateEvent,
    LateStream,
    launch_later,
    make_buffers_late,
    make_captures_late,
    make_executor_late,
)

TREES = {
    "off": TreeBudget(),
    "2,2,1": TreeBudget.expansion((2, 2, 1)),
    "best-first": TreeBudget(max_nodes=8, max_depth=4),
}


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    return come_and_go(make_device_engine(pair[0], has_device_executor=False), 3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("stagger", [1, 3])
def test_steps_in_flight_use_no_memory_of_one_another(
    tree: str, stagger: int, pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = LateStream()
    make_executor_late(stream, monkeypatch)
    engine = make_device_engine(*pair, TREES[tree])
    assert come_and_go(engine, stagger) == plain
    assert executor_of(engine).num_launched >= 10
    assert stream.longest >= 6, "two steps were never in flight"
    assert stream.num_waits <= executor_of(engine).num_launched, "a step waits for the device once"


@pytest.mark.covering(1)
@pytest.mark.parametrize("tree", ["2,2,1", "best-first"])
@pytest.mark.parametrize("kind", ["EAGLE-3", "DSpark"])
def test_steps_of_a_head_in_flight_use_no_memory_of_one_another(
    kind: str, tree: str, pair: Pair, plain: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = load_head(save_tiny_head(tmp_path) if kind == "EAGLE-3" else save_tiny_block(tmp_path), pair[0])
    drafted = []
    for stagger in (1, 3):
        stream = LateStream()
        with monkeypatch.context() as patch:
            make_executor_late(stream, patch)
            engine = make_device_engine(pair[0], head, TREES[tree])
            assert come_and_go(engine, stagger) == plain
        assert executor_of(engine).num_launched >= 10
        assert stream.longest >= 6, "two steps were never in flight"
        assert stream.num_waits <= executor_of(engine).num_launched, "a step waits for the device once"
        drafted.append(engine.drafter.calibration.by_rank("small").tolist())
    if tree == "2,2,1":
        ordinary = make_device_engine(pair[0], head, TREES[tree], has_device_executor=False)
        come_and_go(ordinary, 3)
        assert drafted[1] == pytest.approx(ordinary.drafter.calibration.by_rank("small").tolist(), rel=1e-4)


@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
def test_random_numbers_of_steps_in_flight_are_not_mixed_up(
    rule: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = make_device_engine(*pair, TREES["2,2,1"], verification=rule, has_device_executor=False)
    wanted = come_and_go(ordinary, 3)
    stream = LateStream()
    make_executor_late(stream, monkeypatch)
    engine = make_device_engine(*pair, TREES["2,2,1"], verification=rule)
    assert come_and_go(engine, 3) == wanted
    assert executor_of(engine).num_launched >= 10
    assert stream.longest >= 6, "two steps were never in flight"


def test_steps_of_several_models_are_not_overtaken_by_the_host(
    pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = LateStream()
    make_executor_late(stream, monkeypatch)
    engine = make_device_engine(pair[0], [pair[1], pair[0]], TREES["2,2,1"])
    assert come_and_go(engine, 3) == plain
    assert executor_of(engine).num_launched >= 6


def test_a_single_host_buffer_would_be_seen(
    pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run with one buffer in place of two in turns: results of a step are overwritten, or its inputs."""
    make_executor_late(LateStream(), monkeypatch)
    monkeypatch.setattr(Exchange, "turn", lambda _: 0)
    engine = make_device_engine(*pair, TREES["2,2,1"])
    try:
        found = come_and_go(engine, 3)
    except Exception:  # numbers of another step may make no tree at all
        return
    assert found != plain


# -------------------------------------------------------------------------------------------- passes


def logits_of_passes(loaded: LoadedModel, stream: LateStream | None) -> list[Tensor]:
    """Run passes of one size over prefixes that grow and change; the logits are looked at last on a late stream."""
    runner = ModelRunner(loaded, 120, graphs=Graphs(torch.device("cpu")))
    assert runner.padded is not None
    found: list[Tensor] = []
    random = np.random.default_rng(0)
    slots = [np.arange(60), np.arange(60, 120)]  # of two requests that take turns in the first row
    for number in range(12):
        mine, start = slots[number // 4 % 2], 3 * (number % 4)
        ids = random.integers(3, 90, 3).tolist()
        tree = TokenTree((ids[0], ids[1], ids[2]), (-1, 0, 0))
        piece = Piece.from_span(ids[:1], tree, mine[:start], mine[start : start + 3])
        logits = runner.forward([piece])
        if stream is None:
            found.append(logits.clone())
        else:
            stream.launch(lambda logits=logits: found.append(logits.clone()))
    if stream is not None:
        stream.finish()
    return found


def test_passes_that_wait_for_the_device_have_inputs_of_their_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = logits_of_passes(pair[0], None)
    stream = LateStream()
    make_captures_late(stream, monkeypatch)
    make_buffers_late(stream, monkeypatch)
    # The check at load reads its results at once.
    monkeypatch.setattr("specinfer.model.graphs.check.judge_pass", lambda *_: SimpleNamespace(is_right=True))
    found = logits_of_passes(pair[0], stream)
    assert len(found) == len(wanted) == 12
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    monkeypatch.setattr(LateEvent, "synchronize", lambda _: None)  # as if nobody waited for the copy of the pass before
    found = logits_of_passes(pair[0], stream)
    assert len(found) == 12
    assert not all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def logits_of_large_passes(
    loaded: LoadedModel, lengths: list[tuple[int, int]], stream: LateStream | None, patch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Run passes that are larger than all sizes, of other requests each time; a late stream computes them last.

    Args:
        lengths: For each pass, the tokens of a request's prefix, and its new tokens.
    """
    runner = ModelRunner(loaded, 1200, graphs=Graphs(torch.device("cpu")))
    assert runner.padded is not None
    for pool in (*runner.tensors.keys, *runner.tensors.values):
        pool.normal_(generator=torch.Generator().manual_seed(0))
    found: list[Tensor] = []

    def forward_late(model: nn.Module, batch: ForwardBatch, _: Tensor | None) -> Tensor:
        assert stream is not None
        stream.launch(lambda: found.append(forward(model, batch)))
        return torch.empty(0)

    if stream is not None:
        make_buffers_late(stream, patch)
        patch.setattr(graph_runner, "forward", forward_late)
        launch_later(stream, patch, Buffers, "update_table")
    random = np.random.default_rng(0)
    for prefix, new in lengths:
        pieces = []
        for i in range(3):
            slots = random.permutation(np.arange(400 * i, 400 * i + 400))
            ids = random.integers(3, 90, new).tolist()
            piece = Piece.from_span(ids, None, slots[:prefix], slots[prefix : prefix + new])
            pieces.append(replace(piece, num_logits=len(ids)))
        logits = runner.forward(pieces)
        if stream is None:
            found.append(logits)
    if stream is not None:
        stream.finish()
    return found


def test_passes_larger_than_all_sizes_wait_for_the_inputs_of_the_pass_before(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    several, one = [(0, 100), (40, 90), (20, 110), (60, 100), (0, 120), (30, 88)], [(20, 100)] * 6
    for lengths in (several, one):
        wanted = logits_of_large_passes(pair[0], lengths, None, monkeypatch)
        assert len(wanted) == 6
        with monkeypatch.context() as patch:
            found = logits_of_large_passes(pair[0], lengths, LateStream(), patch)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    monkeypatch.setattr(LateEvent, "synchronize", lambda _: None)  # as if nobody waited for the copy of the pass before
    found = logits_of_large_passes(pair[0], one, LateStream(), monkeypatch)
    assert not all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
