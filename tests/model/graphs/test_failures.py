"""What is done where passes cannot be captured or padded, and when captures are made."""

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from specinfer import LLM
from specinfer.cli.options import EngineOptions
from specinfer.core.config import EngineConfig
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree
from specinfer.drafters import SmallModelDrafter
from specinfer.model import capacity
from specinfer.model.batch import Piece
from specinfer.model.capacity import plan_capacity
from specinfer.model.graphs import check
from specinfer.model.graphs.buffers import Buffers
from specinfer.model.graphs.capture import CaptureError, Graphs, Program, make_graphs
from specinfer.model.graphs.graph_runner import GraphRunner
from specinfer.model.graphs.sizes import loaded_sizes
from specinfer.model.kv_cache import NO_SLOTS
from specinfer.model.kv_tensors import bytes_per_slot
from specinfer.model.runner import ModelRunner
from specinfer.setup import assembly
from tests.model.graphs.padded import CPU, NUM_SLOTS, Loaded, padded_runner, requests
from tiny import VOCAB, make_engine, make_request, random_prompts, run


def _let_captures_fail(patch: pytest.MonkeyPatch, error_of: Callable[[int], Exception | None]) -> None:
    """Raise errors in place of captures from now on.

    Args:
        error_of: Function from the number of a capture, from 1, to its error, or None.
    """
    right, numbers = Graphs.captured, itertools.count(1)

    def captured(self: Graphs, *args: Any) -> Program:
        if (error := error_of(next(numbers))) is not None:
            raise error
        return right(self, *args)

    patch.setattr(Graphs, "captured", captured)


@pytest.mark.parametrize("num_good", [0, 1, 3])
def test_what_cannot_be_captured_is_launched(
    num_good: int, loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a device that cannot capture what a program does, from some size on."""
    loaded = loaded_of("mixtral")
    wanted = run(make_engine(ModelRunner(loaded, NUM_SLOTS)), requests())
    error = CaptureError("operation not permitted when stream is capturing")
    _let_captures_fail(monkeypatch, lambda number: error if number > num_good else None)
    with caplog.at_level(logging.WARNING):
        runner = padded_runner(loaded)
        assert run(make_engine(runner), requests()) == wanted
        runner.prepare()
    assert [record.getMessage() for record in caplog.records if "captured" in record.getMessage()] == [
        f"passes of {loaded.folder.name} are launched kernel by kernel, since they cannot be captured: "
        "operation not permitted when stream is capturing"
    ]


def test_sizes_that_there_is_no_memory_for_are_launched_and_others_captured(
    loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = loaded_of("llama")
    wanted = run(make_engine(ModelRunner(loaded, NUM_SLOTS)), requests())
    runner = padded_runner(loaded)
    error = torch.OutOfMemoryError("CUDA out of memory")
    _let_captures_fail(monkeypatch, lambda number: error if number <= 3 else None)
    with caplog.at_level(logging.WARNING):
        runner.prepare()
        assert run(make_engine(runner), requests()) == wanted
    assert runner.padded is not None
    assert runner.padded.why_not_captured is None
    sizes = loaded_sizes(runner.padded._max_requests)
    assert set(sizes) <= set(runner.padded.sizes)
    assert [record.getMessage() for record in caplog.records] == [
        f"passes of {size.tokens} tokens of {loaded.folder.name} are launched kernel by kernel: CUDA out of memory"
        for size in sizes[:3]
    ]


def test_what_was_captured_before_is_still_used(loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory suffices for all sizes but the largest."""
    _let_captures_fail(monkeypatch, lambda number: CaptureError("no memory") if number > 3 else None)
    runner = padded_runner(loaded_of("llama"))
    assert runner.padded is not None

    def logits(count: int) -> torch.Tensor:
        slots = runner.cache.reserve("a", count)
        found = runner.forward([Piece.from_span([8], TokenTree.chain(8, [9] * (count - 1)), NO_SLOTS, slots)])
        runner.cache.free("a")
        return found.clone()

    wanted = logits(16)
    logits(50)  # cannot be captured
    monkeypatch.setattr(GraphRunner, "_run_once", None)
    assert torch.equal(logits(16), wanted)


def test_a_size_is_captured_once_its_launches_have_taken_as_long(
    loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first launch does not count, because it compiles kernels. Until then steps are first ones of their size."""
    runner = padded_runner(loaded_of("llama"))
    graphs = runner.graphs
    assert graphs is not None
    graphs.times.append(0.1)
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, 0.04).__next__)
    slots = runner.cache.reserve("a", 7)
    found, made = [], []
    for _ in range(7):
        before = graphs.num_programs
        found.append(runner.forward([Piece.from_span([8], TokenTree.chain(8, [9] * 6), NO_SLOTS, slots)]).clone())
        made.append(graphs.num_programs - before)
    runner.cache.free("a")
    assert made == [1, 1, 1, 1, 1, 0, 0], "four launches, and the capture"
    assert all(torch.equal(one, found[0]) for one in found)


class _WarmingUp(Graphs):
    """As on a GPU, a program runs before it is captured; other captures have taken some time."""

    def captured(self, program: Program, *_: Any) -> Program:
        program()
        program()
        self.num_captured += 1
        return program


def test_captures_amid_decoding_change_no_prefix(loaded_of: Loaded) -> None:
    """Two requests take turns in the first row of the table, each with passes of two sizes."""
    graphs = _WarmingUp(CPU)
    graphs.times.append(1e-9)
    loaded = loaded_of("llama")
    found = []
    for runner in (padded_runner(loaded, graphs), ModelRunner(loaded, NUM_SLOTS)):
        logits = []
        for tokens in random_prompts([1, 2] * 8):
            name = "ab"[len(logits) // 2 % 2]
            prefix, slots = runner.cache.slots(name), runner.cache.reserve(name, len(tokens))
            logits.append(runner.forward([Piece.from_span(tokens, TokenTree.root(tokens[-1]), prefix, slots)]).clone())
            runner.cache.commit(name, range(len(tokens)))
        for name in "ab":
            runner.cache.free(name)
        found.append(torch.cat(logits))
    assert graphs.num_captured
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fault", ["wrong", "breaks", "lacks memory"])
def test_a_model_that_does_not_agree_is_run_as_it_is(
    fault: str, loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = GraphRunner.forward

    def other(self: GraphRunner, *args: Any) -> torch.Tensor:
        if fault == "breaks":
            raise RuntimeError("no such thing in passes of fixed shapes")
        return forward(self, *args) * 1.1

    monkeypatch.setattr(GraphRunner, "forward", other)
    if fault == "lacks memory":
        monkeypatch.setattr(GraphRunner, "__init__", Mock(side_effect=torch.OutOfMemoryError("no memory is left")))
    loaded = loaded_of("llama")
    with caplog.at_level(logging.WARNING):
        runner = ModelRunner(loaded, NUM_SLOTS, graphs=Graphs(CPU))
    assert runner.padded is None
    assert len([record for record in caplog.records if "are not captured" in record.getMessage()]) == 1
    wanted = run(make_engine(ModelRunner(loaded, NUM_SLOTS)), requests())
    assert run(make_engine(runner), requests()) == wanted


def test_a_size_that_cannot_be_run_is_found_when_a_model_is_loaded(
    loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = padded_runner(loaded_of("llama"))
    error = ValueError("out of resource: shared memory")
    _let_captures_fail(monkeypatch, lambda number: error if number > 3 else None)
    with caplog.at_level(logging.WARNING):
        runner.prepare()
    assert runner.padded is None
    assert [record.getMessage() for record in caplog.records] == [
        f"passes of {runner.loaded.folder} are not captured: out of resource: shared memory"
    ]
    wanted = run(make_engine(ModelRunner(runner.loaded, NUM_SLOTS)), requests())
    assert run(make_engine(runner), requests()) == wanted


def test_after_a_failed_capture_no_other_size_is_padded(loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = padded_runner(loaded_of("llama"))
    assert runner.padded is not None
    before = runner.padded.sizes
    error = CaptureError("it waits for the device")
    _let_captures_fail(monkeypatch, lambda number: error if number == 3 else None)
    runner.prepare()
    made = [size for size in runner.padded.sizes if size not in before]
    assert made == loaded_sizes(runner.padded._max_requests)[:3]


def test_after_a_pass_that_failed_nothing_is_taken_to_stand_in_the_table(
    loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loaded_of("llama")
    runner = padded_runner(loaded)
    wanted = run(make_engine(ModelRunner(loaded, NUM_SLOTS)), requests())
    update, calls = Buffers.update_table, iter(range(1000))

    def failing(self: Buffers) -> None:
        if next(calls) % 5 == 2:
            raise RuntimeError("a pass that fails")
        update(self)

    monkeypatch.setattr(Buffers, "update_table", failing)
    assert run(make_engine(runner), requests()) == wanted


def test_a_cache_of_a_few_slots_is_not_tried(loaded_of: Loaded) -> None:
    assert ModelRunner(loaded_of("llama"), 7, graphs=Graphs(CPU)).padded is None


def test_graphs_are_for_gpus() -> None:
    assert make_graphs(CPU) is None
    assert not Graphs(CPU).captures
    calls: list[int] = []
    Graphs(CPU).captured(lambda: calls.append(1))()
    assert calls == [1]


def test_the_usual_sizes_are_made_at_load(loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their programs can all be run before any is captured, to compile what they launch."""
    runner, compiled = padded_runner(loaded_of("llama"), max_requests=4), list[int]()

    def compile_all(_: Graphs, programs: Iterable[Callable[[], object]], *_others: Any) -> None:
        with torch.inference_mode():
            compiled.append(len([program() for program in programs]))

    monkeypatch.setattr(Graphs, "compile", compile_all)
    assert runner.padded is not None
    reported: list[tuple[str, int, int]] = []
    runner.prepare(lambda *now: reported.append(now))
    wanted = loaded_sizes(4)
    assert set(wanted) <= set(runner.padded.sizes)
    name = f"capturing passes of {runner.loaded.folder.name}"
    assert reported == [(name, done, len(wanted)) for done in range(len(wanted) + 1)]
    assert compiled == [len(wanted) + 2], "those and passes over prompts"


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_option_reaches_the_captures(
    enforce_eager: bool, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[torch.device, bool]] = []

    def make(device: torch.device, *, enforce_eager: bool) -> None:
        asked.append((device, enforce_eager))

    monkeypatch.setattr(assembly, "make_graphs", make)
    options = EngineOptions({"device": "cpu", "enforce_eager": enforce_eager, "drafter": ["ngram"]})
    with LLM.from_engine_args(options.args(str(model_folder("llama", tokenizer=True)))) as made:
        assert isinstance(made.target, ModelRunner)
        assert made.target.padded is None
    assert asked == [(CPU, enforce_eager)]


def test_the_cache_leaves_memory_for_captures(loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_memory", lambda *_: 2**20)
    loaded, limits = loaded_of("llama"), EngineConfig(100)
    each = bytes_per_slot(loaded.layer_shapes, loaded.dtype)
    slots = [plan_capacity(limits, loaded, [], reserved=reserved)[1] for reserved in (0, 100 * each)]
    assert slots[0] - slots[1] == 100
    with pytest.raises(ValueError, match=r"raise kv_cache_memory_bytes"):
        plan_capacity(limits, loaded, [], reserved=2**20)
    asked = EngineConfig(100, kv_cache_memory_bytes=1000 * each)
    assert plan_capacity(asked, loaded, [], reserved=2**30)[1] == 1000, "who names the cache's bytes gets them"


def test_memory_that_captures_take_is_counted(loaded_of: Loaded) -> None:
    loaded = loaded_of("llama")
    few, many = (check.captured_bytes(loaded, count) for count in (1, 32))
    assert 0 < few < many
    runner = padded_runner(loaded)
    assert runner.padded is not None
    runner.prepare()
    assert many >= runner.padded.num_bytes


def test_steps_in_which_a_size_is_first_run_are_marked(loaded_of: Loaded) -> None:
    """On a GPU they take the time of a capture, from which no policy may learn."""
    graphs = Graphs(CPU)
    target, small = (ModelRunner(loaded_of(seed=seed), NUM_SLOTS, graphs=graphs) for seed in (0, 1))
    engine = make_engine(target, SmallModelDrafter(small, VOCAB), (2, 1))
    marks: list[bool] = []

    class Seen:
        reads_logits = False

        def on_step(self, record: StepRecord) -> None:
            marks.append(record.is_first_of_size)

        def on_tokens(self, *_: Any) -> None:
            pass

    engine.observers.append(Seen())
    for number in range(2):
        run(
            engine,
            [make_request(str(number), [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))],
        )
        if number == 0:
            assert marks[0] is True
            num_steps = len(marks)
    assert not any(marks[num_steps:]), "what was run before is captured"
