"""Graphs that are recorded and replayed: whatever a capture did not read from static buffers stays as it was then.

What a graph has computed on the way is overwritten after each replay, as by the next graph of the same memory pool.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import on_device
from on_device import (
    MIXED_PARAMS,
    WAYS,
    as_on_a_gpu,
    load_device_head,
    load_plain,
    make_device_engine,
    repeating_requests,
)
from recorded_graphs import RecordedGraph, Recorder, num_replays, record_graphs
from specinfer.core.request import Request
from specinfer.core.tree import TreeBudget
from specinfer.engine.device.captured_sizes import SizeChoice
from specinfer.engine.engine import Engine
from specinfer.model.graphs.capture import Graphs
from specinfer.model.graphs.graph_runner import GraphRunner
from specinfer.ops.cpu import choice
from tests.engine.device.step_programs import save_head, target_of
from tiny import run


class OverwrittenGraph(RecordedGraph):
    """A graph whose memory others use once it has run."""

    def capture_end(self) -> None:
        super().capture_end()
        self._overwrite()

    def replay(self) -> None:
        super().replay()
        self._overwrite()

    @torch.inference_mode()
    def _overwrite(self) -> None:
        for one in self.own_results():
            torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage()).fill_(0x7F)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    record_graphs(monkeypatch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", OverwrittenGraph)
    monkeypatch.setattr(Graphs, "compile", lambda *_, **__: None)
    monkeypatch.setattr(choice, "_most_probable_natively", lambda *_: None)  # native code is not recorded
    # All is captured at once, in the size that is wanted, however long it takes.
    monkeypatch.setattr(GraphRunner, "_is_worth_capturing", lambda _, ready: ready.replay is None)
    monkeypatch.setattr(SizeChoice, "choose", lambda _, wanted, *__, **___: wanted)


def _outcomes(engine: Engine) -> list[tuple[Any, ...]]:
    requests: Sequence[Request] = repeating_requests(MIXED_PARAMS, (6, 9, 5, 7))
    run(engine, requests)
    return [(one.output_ids, one.speculation.as_dict()) for one in requests]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("a small model", 1),
        ("a small model", 2),
        ("EAGLE-3", 1),
        ("DSpark", 2),
        pytest.param("EAGLE-3", 2, marks=pytest.mark.slow),
        pytest.param("DSpark", 1, marks=pytest.mark.slow),
    ],
)
def test_replays_do_what_programs_do(
    kind: str,
    way: int,
    recorded: None,
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with as_on_a_gpu(monkeypatch):
        if kind == "a small model":
            target, small = load_plain(model_folder("llama")), load_plain(model_folder("llama", 0, 0.1))
        else:
            save_head(tmp_path / "head", kind)
            target = load_plain(target_of(kind, tmp_path / "head", model_folder))
            small = load_device_head(tmp_path / "head", target)
    tree = TreeBudget(12, 4) if way == 1 else TreeBudget.expansion((3, 2, 1))
    wanted = _outcomes(make_device_engine(target, small, tree, **WAYS[way]))
    monkeypatch.setattr(on_device, "Graphs", lambda _: Graphs(torch.device("cuda")))
    before = num_replays()
    with Recorder():
        found = _outcomes(make_device_engine(target, small, tree, **WAYS[way]))
    assert num_replays() - before > 10
    assert found == wanted
