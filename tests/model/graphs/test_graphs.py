"""Passes at padded sizes, run here without capture: the same tokens, nothing left over, buffers that stay in place."""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from native_layers import TREE, Reader, check_tree_logits
from specinfer import LLM
from specinfer.cli.options import EngineOptions
from specinfer.core.config import EngineConfig
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree
from specinfer.drafters import MergedDrafter, NGramDrafter, SmallModelDrafter, loading
from specinfer.model import capacity
from specinfer.model.batch import Piece
from specinfer.model.capacity import plan_capacity
from specinfer.model.forward import forward
from specinfer.model.graphs import check
from specinfer.model.graphs.buffers import Buffers, InputBlock
from specinfer.model.graphs.capture import (
    CaptureError,
    Graphs,
    Program,
    SynchronizationCheck,
    SynchronizationError,
    make_graphs,
)
from specinfer.model.graphs.graph_runner import GraphRunner
from specinfer.model.graphs.sizes import MAX_ROWS, REQUESTS, TOKENS, Size, at_least, is_chain, loaded_sizes
from specinfer.model.graphs.slot_table import SlotTable
from specinfer.model.kv_cache import NO_SLOTS
from specinfer.model.kv_tensors import KVTensors, bytes_per_slot
from specinfer.model.layers.device import DeviceDecoder
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.recurrent.layers import kept_states, num_taps
from specinfer.model.recurrent.scan import Scan
from specinfer.model.runner import ModelRunner
from specinfer.ops import kernels, layer_ops, tree_ops
from specinfer.ops.cpu.recurrence import ConvolutionCall, RecurrenceCall
from specinfer.ops.scan_order import ScanOrder
from specinfer.ops.tree_layout import unpack_bits
from specinfer.setup import assembly
from tiny import (
    FAMILIES,
    HYBRIDS,
    KINDS_OF_HYBRIDS,
    VOCAB,
    make_engine,
    make_model,
    make_request,
    quick,
    random_prompts,
    run,
    trees,
)

CPU = torch.device("cpu")
NUM_SLOTS = 220
Loaded = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def loaded_of(model_folder: Callable[..., Path]) -> Loaded:
    """As transformers has it: native layers read pieces, not layouts."""
    made: dict[str, LoadedModel] = {}

    def loaded(*args: Any, **kwargs: Any) -> LoadedModel:
        key = repr((args, kwargs))
        if key not in made:
            made[key] = load_model(model_folder(*args, **kwargs), torch.float32, CPU, native=False)
        return made[key]

    return loaded


def _runner(loaded: LoadedModel, graphs: Graphs | None = None, **options: Any) -> ModelRunner:
    """One whose passes are padded; what nobody wrote in its cache is not a number."""
    runner = ModelRunner(loaded, NUM_SLOTS, graphs=graphs or Graphs(CPU), **options)
    assert runner.padded is not None
    for pool in (*runner.tensors.keys, *runner.tensors.values):
        pool.fill_(torch.nan)
    return runner


# ------------------------------------------------------------------------------------------------ sizes


@st.composite
def _pieces(draw: st.DrawFn) -> list[Piece]:
    """Any passes: chunks, trees, frontiers; their slots lie anywhere."""
    made = []
    free = iter(np.random.default_rng(draw(st.integers(0, 9))).permutation(5000))

    def slots(count: int) -> Any:
        return np.fromiter(free, dtype=np.int64, count=count)

    for _ in range(draw(st.integers(1, 6))):
        chain = [draw(st.integers(0, VOCAB - 1)) for _ in range(draw(st.integers(1, 40)))]
        tree = draw(st.none() | trees(root=chain[-1], vocab=5))
        prefix = slots(draw(st.integers(0, 30)))
        piece = Piece.of_span(chain, tree, prefix, slots(len(chain) + (tree.num_guessed if tree else 0)))
        if draw(st.booleans()) and len(piece.tokens) > 1:  # the first of them were computed before
            count = draw(st.integers(1, len(piece.tokens) - 1))
            piece = Piece(
                piece.tokens[count:], piece.positions[count:], prefix, piece.slots[count:], piece.visible[count:],
                min(piece.num_logits, len(piece.tokens) - count), piece.slots[:count], piece.positions[:count],
            )  # fmt: skip
        made.append(piece)
    return made


@given(_pieces())
def test_a_pass_fits_into_its_padded_size(pieces: list[Piece]) -> None:
    exact = Size.from_pieces(pieces)
    size = exact.padded()
    assert size is not None
    assert size.is_chain == exact.is_chain == all(map(is_chain, pieces))
    for name in ("tokens", "requests", "new", "nodes", "rows"):
        assert getattr(size, name) >= getattr(exact, name), name
    assert size.tokens in TOKENS
    assert size.requests in REQUESTS
    assert size.padded() == size, "what was made larger fits as it is"


def test_few_sizes_are_enough_for_plain_decoding() -> None:
    def plain(count: int) -> Size | None:
        return Size(count, count, 1, 1, count, is_chain=True).padded()

    sizes = {plain(count) for count in range(1, 65)}
    assert len(sizes) < 16
    assert {size for size in loaded_sizes(16) if size.new == 1} <= sizes
    assert {plain(count) for count in (1, 2, 4, 8, 16)} <= set(loaded_sizes(16))


def test_what_is_too_large_has_no_size() -> None:
    assert Size(513, 1, 513, 513, 1, is_chain=True).padded() is None
    assert Size(300, 300, 1, 1, 300, is_chain=True).padded() is None
    assert at_least(TOKENS, 513) is None
    assert [at_least(TOKENS, count) for count in (1, 3, 512)] == [1, 4, 512]


def test_sizes_of_recurrent_layers_have_room_for_what_is_computed_once_more() -> None:
    chain, tree = (Size(16, 1, 16, 32, 16, is_chain=is_chain) for is_chain in (True, False))
    assert [replace(chain, scanned=scanned).padded() for scanned in (16, 17, 500)] == [
        replace(chain, scanned=scanned) for scanned in (16, 24, 512)
    ]
    assert replace(tree, scanned=90).padded() == replace(tree, scanned=96)
    assert replace(tree, scanned=97).padded() is None  # too many states of nodes at a time
    assert replace(chain, scanned=513).padded() is None


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [
        ([[1]], True),
        ([[1, 1, 1]], True),
        ([[1, 0, 1]], False),
        ([[1, 1, 0], [1, 1, 1]], True),
        ([[1, 1, 0], [1, 0, 1]], False),
        ([[1, 1], [1, 1]], False),
    ],
)
def test_chains_are_known(visible: list[list[int]], wanted: bool) -> None:
    sees = np.asarray(visible, dtype=np.bool_)
    count = len(sees)
    piece = Piece([0] * count, range(count), NO_SLOTS, np.arange(count), sees, 0)
    assert is_chain(piece) == wanted


# ---------------------------------------------------------------------------------------------- buffers


def _check(buffers: Buffers, pieces: list[Piece]) -> None:
    """The buffers contain the pieces, and padding."""
    batch, layout = buffers.batch(None), buffers.layout  # type: ignore[arg-type]  # nothing is stored
    start = num_rows = 0
    for i, piece in enumerate(pieces):
        end, earlier = start + len(piece.tokens), len(piece.earlier_slots)
        nodes = earlier + len(piece.tokens)
        assert layout.starts[i].item() == start
        assert batch.token_ids[start:end].tolist() == list(piece.tokens)
        assert batch.positions[start:end].tolist() == layout.positions[start:end].tolist() == list(piece.positions)
        assert batch.slots[start:end].tolist() == piece.slots.tolist()
        assert layout.slot_table[i, : layout.prefix_lens[i]].tolist() == piece.prefix_slots.tolist()
        assert layout.node_lens[i].item() == nodes
        assert layout.node_slots[i, :nodes].tolist() == [*piece.earlier_slots, *piece.slots]
        assert layout.node_positions[i, :nodes].tolist() == [*piece.earlier_positions, *piece.positions]
        if not layout.is_chain:
            assert unpack_bits(layout.visible[start:end], nodes).tolist() == piece.visible.tolist()
        end_rows = num_rows + piece.num_logits
        assert batch.logit_rows[num_rows:end_rows].tolist() == list(range(end - piece.num_logits, end))
        start, num_rows = end, end_rows
    assert set(layout.starts[len(pieces) :].tolist()) == {start}
    assert not layout.prefix_lens[len(pieces) :].any()
    assert not layout.node_lens[len(pieces) :].any()
    assert (batch.slots[start:] == -1).all()
    assert not batch.token_ids[start:].any()


@settings(max_examples=30)
@given(st.lists(_pieces(), min_size=1, max_size=4))
def test_buffers_are_filled_by_one_pass_after_the_other(passes: list[list[Piece]]) -> None:
    """In one buffer and one table; each pass comes after a larger or a smaller one."""
    table = SlotTable(8, 30, CPU)
    # The smallest that fits them all.
    size = Size(512, 8, 64, 64, 512, is_chain=False)
    buffers = Buffers(size, table, CPU)
    places = [tensor.data_ptr() for tensor in _tensors(buffers)]
    for pieces in passes:
        buffers.fill(pieces)
        buffers.update_table()
        _check(buffers, pieces)
    assert [tensor.data_ptr() for tensor in _tensors(buffers)] == places


def _tensors(buffers: Buffers) -> Iterator[torch.Tensor]:
    batch = buffers.batch(None)  # type: ignore[arg-type]  # nothing is stored
    yield from (batch.token_ids, batch.positions, batch.slots, batch.logit_rows)
    layout = buffers.layout
    yield from (layout.slot_table, layout.prefix_lens, layout.starts, layout.node_slots, layout.node_positions)
    yield from (layout.node_lens, layout.visible, layout.positions)


def test_only_what_is_new_is_written_to_the_table() -> None:
    table = SlotTable(2, 8, CPU)

    def changes(*prefixes: list[int]) -> list[tuple[int, list[int]]]:
        return [(cell, new.tolist()) for cell, new in table.changes([np.asarray(one) for one in prefixes])]

    assert changes([5, 6, 7], [1]) == [(0, [5, 6, 7]), (8, [1])]
    assert changes([5, 6, 7, 8], [1, 2, 3]) == [(3, [8]), (9, [2, 3])]
    assert changes([5, 6], [1, 2, 3]) == [], "a shorter prefix stands there already"
    assert changes([5, 6, 9, 8]) == [(2, [9, 8])], "up to its end, since all behind a change is another's"
    assert changes([1, 2, 3], [5, 6]) == [(0, [1, 2, 3]), (8, [5, 6])]
    table.forget()
    assert changes([1, 2, 3]) == [(0, [1, 2, 3])]


# ------------------------------------------------------------------------------------------ whole models


@pytest.mark.parametrize("family", [*FAMILIES, *quick(HYBRIDS, *KINDS_OF_HYBRIDS)])
def test_tree_logits_are_those_of_each_path(family: str, loaded_of: Loaded) -> None:
    """Of every family, from caches and buffers full of what are no numbers."""
    runner = _runner(loaded_of(family))
    check_tree_logits(make_model(family), runner)
    assert runner.padded is not None
    assert {size.is_chain for size in runner.padded.sizes} == {True, False}


PROMPTS = random_prompts([3, 26, 12, 30])
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8),
    SamplingParams(temperature=1.0, max_tokens=8),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, max_tokens=8, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(3, 4)),
]


def _requests() -> list[Request]:
    return [make_request(str(i), p, q, seed=i) for i, (p, q) in enumerate(zip(PROMPTS, PARAMS, strict=True))]


# Of the others the logits are compared above.
QUICK = ("llama", "mpt", "gemma3_text", "gpt_oss", "qwen3_5_text", "lfm2", "mamba")


@pytest.mark.parametrize("family", quick([*FAMILIES, *HYBRIDS], *QUICK))
def test_families_generate_the_same_tokens(family: str, loaded_of: Loaded) -> None:
    """Greedy and sampled requests in one batch, prompts in chunks, with and without guesses of two drafters."""
    loaded = loaded_of(family)
    wanted = run(make_engine(ModelRunner(loaded, NUM_SLOTS), max_num_batched_tokens=16), _requests())
    for shape in ((), (2, 2, 1)):
        target = _runner(loaded)
        small = SmallModelDrafter(_runner(loaded_of(family, noise=0.02)), VOCAB, "small")
        drafter = MergedDrafter([small, NGramDrafter()]) if shape else None
        engine = make_engine(target, drafter, shape, max_num_batched_tokens=16)
        assert run(engine, _requests()) == wanted
        assert engine.metrics.num_draft_failures == 0
        assert target.padded is not None
        assert target.padded.sizes


def test_logits_stay_where_they_are(loaded_of: Loaded) -> None:
    """No size has logits or inputs of its own time: the next pass of a size finds them where they were."""
    runner = _runner(loaded_of("llama"))
    assert runner.padded is not None

    def place(count: int) -> int:
        slots = runner.cache.reserve("a", count)
        logits = runner.forward([Piece.of_span([8], TokenTree.chain(8, [9] * (count - 1)), NO_SLOTS, slots)])
        runner.cache.free("a")
        return logits.data_ptr()

    assert len({place(count) for count in (1, 5, 3, 30, 1, 5)}) == 1
    sizes = runner.padded.sizes
    place(30)
    place(5)
    assert set(runner.padded.sizes) == set(sizes)


def test_a_pass_larger_than_all_sizes_is_run_by_itself(loaded_of: Loaded) -> None:
    loaded = loaded_of("llama")
    runner, plain = (ModelRunner(loaded, 300, graphs=graphs) for graphs in (Graphs(CPU), None))
    assert runner.padded is not None
    before = runner.padded.sizes
    tokens = random_prompts([MAX_ROWS - 20])[0]
    tree = TokenTree((tokens[-1], *range(30)), (-1, *[0] * 30))
    found = []
    for one in (runner, plain):
        slots = one.cache.reserve("a", len(tokens) + 30)
        piece = Piece.of_span(tokens, tree, NO_SLOTS, slots)
        found.append(one.forward([replace(piece, num_logits=len(piece.tokens))]))
        one.cache.free("a")
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert runner.padded.sizes == before


@pytest.mark.parametrize("max_requests", [1, 4])
def test_passes_larger_than_all_sizes_take_no_further_memory(
    max_requests: int, loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over prefixes that grow and change places, amid padded passes, and after one that failed."""
    loaded, made = loaded_of("llama"), list[str]()
    runner, plain = ModelRunner(loaded, 900, graphs=Graphs(CPU), max_requests=max_requests), ModelRunner(loaded, 900)
    assert runner.padded is not None

    def count(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def counted(*args: Any, **options: Any) -> Any:
            made.append(f"{kind.__name__}.{name}")
            return method(*args, **options)

        monkeypatch.setattr(kind, name, counted)

    for kind, name in ((InputBlock, "__init__"), (SlotTable, "__init__"), (SlotTable, "write")):
        count(kind, name)
    update, is_broken = Buffers.update_table, False

    def update_table(buffers: Buffers) -> None:
        if is_broken:
            raise RuntimeError("a pass that fails")
        update(buffers)

    monkeypatch.setattr(Buffers, "update_table", update_table)
    passes = [("abc", 120), ("cab", 100), ("ab", 130), ("a", 1), ("cb", 129), ("bca", 88)]  # requests, tokens of each
    new_of_pass = []
    for number, (names, num_new) in enumerate(passes):
        pieces = []
        for name in names:
            slots = [one.cache.reserve(name, num_new) for one in (runner, plain)]
            prefix, tokens = runner.cache.slots(name), random_prompts([num_new], seed=number)[0]
            assert np.array_equal(slots[0], slots[1])
            pieces.append(replace(Piece.of_span(tokens, None, prefix, slots[0]), num_logits=num_new))
        made.clear()
        if number == 4:
            is_broken = True
            with pytest.raises(RuntimeError):
                runner.forward(pieces)
            is_broken = False
        torch.testing.assert_close(runner.forward(pieces), plain.forward(pieces), rtol=1e-4, atol=1e-4)
        new_of_pass.append(list(made))
        for name in names:
            for one in (runner, plain):
                one.cache.commit(name, range(min(num_new, 15)))
    for one, name in itertools.product((runner, plain), "abc"):
        one.cache.free(name)
    assert "InputBlock.__init__" in new_of_pass[0]
    assert ("SlotTable.__init__" in new_of_pass[0]) == (max_requests == 1)
    del new_of_pass[3]  # of a size that is captured
    assert new_of_pass[1:] == [[]] * 4, "even where all slots of a prefix are new to the table"


def test_other_weights_are_used_at_once(loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, other = _runner(loaded_of("llama")), loaded_of("llama", seed=1)
    wanted = run(make_engine(ModelRunner(other, NUM_SLOTS)), _requests())
    assert run(make_engine(runner), _requests()) != wanted
    waits: list[GraphRunner | None] = []
    monkeypatch.setattr(Graphs, "wait", lambda _: waits.append(runner.padded))
    before = runner.padded
    runner.replace(other)
    assert waits == [before], "what was captured may still run"
    assert runner.num_replaced == 1
    assert run(make_engine(runner), _requests()) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_wait_for_nothing(family: str, loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """No branch and no shape depends on what is computed: so a program can be captured."""
    runner = _runner(loaded_of(family))
    watch, runs = Graphs.captured, list[str]()

    def refused(tensor: torch.Tensor) -> None:
        raise SynchronizationError("its numbers are read")

    def watched(self: Graphs, program: Program, *_: Any) -> Program:
        run = watch(self, program)

        def watching() -> None:
            with SynchronizationCheck(), pytest.MonkeyPatch.context() as patch:
                for name in ("tolist", "numpy"):  # on a CPU they are seen nowhere else
                    patch.setattr(torch.Tensor, name, refused)
                run()
            runs.append("whole")

        return watching

    monkeypatch.setattr(Graphs, "captured", watched)
    slots = runner.cache.reserve("a", len(TREE))
    runner.forward([Piece.of_span([8], TREE, NO_SLOTS, slots)])
    runner.cache.free("a")
    assert runs


@pytest.mark.parametrize("family", [*FAMILIES, *quick(HYBRIDS, *KINDS_OF_HYBRIDS)])
def test_programs_take_nothing_from_the_host(
    family: str, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that has no numbers at all: what a program makes on the host, or left there, cannot join the rest."""
    loaded = load_model(model_folder(family), torch.bfloat16, CPU, native=False)
    there = torch.device("meta")
    loaded.model.to(there)
    for module in loaded.model.modules():  # made when the model was loaded
        module.__dict__.pop("calls", None)
        module.__dict__.pop("_call", None)

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any, **features: Any) -> torch.Tensor:
        tensors = [keys, values, *(one for one in features.values() if isinstance(one, torch.Tensor))]
        assert all(one.device == there for one in tensors)
        assert query.stride(2) == 1
        return query.new_empty((*query.shape[:2], values.shape[2]))

    def store(
        keys: torch.Tensor, _values: torch.Tensor, slots: torch.Tensor, *new: torch.Tensor, scales: object = None
    ) -> None:
        assert keys.device == slots.device == there
        assert all(one.stride(2) == 1 for one in new), "the kernel reads heads as they lie"

    def convolve(inputs: torch.Tensor, paths: torch.Tensor, call: ConvolutionCall) -> torch.Tensor:
        assert inputs.device == paths.device == call.weight.device == there
        return torch.empty(len(paths), inputs.shape[2], device=there)

    def recur(mixed: torch.Tensor, call: RecurrenceCall, order: ScanOrder, *others: torch.Tensor) -> torch.Tensor:
        own = [value for one in (call, order) for name in dir(one) if torch.is_tensor(value := getattr(one, name))]
        assert all(one.device == there and one.is_contiguous() for one in (mixed, *own, *others))
        return torch.empty(order.num_results, call.sizes.num_heads, call.sizes.value_dim, device=there)

    for module, stand_in in ((tree_ops, attend), (tree_ops, store), (layer_ops, convolve), (layer_ops, recur)):
        monkeypatch.setattr(module, stand_in.__name__, stand_in)
    size = Size(8, 2, 4, 32, 8, is_chain=False, scanned=12)
    states = kept_states(loaded.model, 2, 20, there)
    tensors = KVTensors(loaded.layer_shapes, 20, loaded.dtype, there, states=states)
    batch = Buffers(size, SlotTable(2, 64, there), there, num_taps(loaded.model)).batch(tensors)
    with torch.inference_mode(), SynchronizationCheck():
        logits = forward(loaded.model, batch)
    assert (logits.shape, logits.device, logits.dtype) == ((8, VOCAB), there, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and take no tensors of the CPU")
@pytest.mark.parametrize("family", [
    pytest.param("qwen3", marks=pytest.mark.slow), "gemma2", "gpt_oss", "falcon-rw", "lfm2", "qwen3_5_text",
    pytest.param("mamba", marks=pytest.mark.slow),
])  # fmt: skip
def test_programs_run_with_the_kernels_of_gpus(
    family: str, loaded_of: Loaded, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter; first with nothing but padding, as before a capture."""
    pytest.importorskip("triton")
    one = {} if family in HYBRIDS else {"num_hidden_layers": 1}  # the interpreter is slow
    loaded = _on_gpus(model_folder(family, **one)) if family == "qwen3" else loaded_of(family, **one)
    runners = [_runner(loaded) for _ in range(2)]
    pieces = [_two_trees(runner) for runner in runners]
    wanted = runners[0].forward(pieces[0]).clone()
    monkeypatch.setattr(kernels, "back_end", kernels.kernel)
    runs: list[Program] = []
    captured = Graphs.captured

    def warmed_up(self: Graphs, program: Program, *_: Any) -> Program:
        pools = [*runners[1].tensors.keys, *runners[1].tensors.values, *runners[1].tensors.states.pools.values()]
        before = [pool.nan_to_num(7.0) for pool in pools]
        program()
        after = [pool.nan_to_num(7.0) for pool in pools]
        assert all(map(torch.equal, before, after)), "padding was stored"
        runs.append(program)
        return captured(self, program)

    monkeypatch.setattr(Graphs, "captured", warmed_up)
    torch.testing.assert_close(runners[1].forward(pieces[1]), wanted, rtol=1e-4, atol=1e-5)
    assert len(runs) == 1
    for runner in runners:
        runner.cache.free("a")
        runner.cache.free("b")


def test_a_state_of_a_rejected_branch_is_noticed_in_a_padded_pass(
    loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known-wrong arm: the state after the last node of a tree is kept as that after its root."""

    def made(self: Scan, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self._pieces = [replace(piece, num_known=len(piece.slots)) for piece in self._pieces]  # type: ignore[type-var]

    def outputs() -> list[list[int]]:
        small = SmallModelDrafter(_runner(loaded_of("qwen3_5_text", noise=0.15)), VOCAB, "small")
        return run(make_engine(_runner(loaded_of("qwen3_5_text")), small, (2, 2, 1)), _requests())

    make, wanted = Scan.__init__, outputs()
    assert wanted == run(make_engine(ModelRunner(loaded_of("qwen3_5_text"), NUM_SLOTS)), _requests())
    monkeypatch.setattr(Scan, "__init__", made)
    assert outputs() != wanted


def _on_gpus(folder: Path) -> LoadedModel:
    """With the decoder that a GPU has."""
    apart = load_model(folder, torch.float32, CPU, native=False)
    return replace(apart, model=DeviceDecoder(apart.model, apart.max_position).eval())


def _two_trees(runner: ModelRunner) -> list[Piece]:
    """Of requests that have read a few tokens; the sizes of such a pass are new to the runner."""
    reader = Reader(runner)
    for name, prompt in zip("ab", random_prompts([11, 3]), strict=True):
        reader.read(name, prompt)
    return [reader.piece(name, TREE) for name in "ab"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_decoder_of_gpus_generates_the_same_tokens(
    family: str, loaded_of: Loaded, model_folder: Callable[..., Path]
) -> None:
    """By its plain twins."""
    loaded = _on_gpus(model_folder(family))
    wanted = run(make_engine(ModelRunner(loaded_of(family), NUM_SLOTS)), _requests())
    assert run(make_engine(_runner(loaded), NGramDrafter(), (2, 1)), _requests()) == wanted


OPTIONS: list[dict[str, Any]] = [
    {"tree": "2,1,1"},
    {"tree": "best-first:8:4", "select": "hedge:1"},
    {"tree": "2,2", "verification": "multi-step"},  # best-first trees follow what is learned of other requests' trees
    {"drafters": [], "tree": "off"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_llms_generate_the_same_tokens(
    options: dict[str, Any], model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several drafters, a grammar, several outputs of a prompt, and prompts that begin alike."""
    folder = model_folder("llama", tokenizer=True)
    smalls = [str(model_folder("llama", noise=noise, tokenizer=True)) for noise in (0.02, 0.1)]
    for module in (assembly, loading):
        monkeypatch.setattr(module, "load_model", partial(load_model, native=False))
    prompt = random_prompts([25])[0]
    params = [
        SamplingParams(temperature=0.0, max_tokens=10),
        SamplingParams(temperature=0.9, n=2, seed=1, max_tokens=10, prompt_logprobs=1),
        SamplingParams(seed=2, max_tokens=10, structured_outputs={"regex": "(the|a|d)( [a-o]+)*"}),
        SamplingParams(seed=3, max_tokens=10, tree="off", logprobs=2),
    ]
    generated, runners = [], list[ModelRunner]()
    for graphs in (None, Graphs(CPU)):
        monkeypatch.setattr(assembly, "make_graphs", lambda *_, graphs=graphs, **__: graphs)
        with LLM(
            folder, **({"drafters": [*smalls, "suffix"]} | options), max_num_batched_tokens=16, max_num_seqs=4
        ) as made:
            outputs = made.generate([{"prompt_token_ids": [*prompt, i]} for i in range(4)], params)
            generated.append([(one.token_ids, one.text) for output in outputs for one in output.outputs])
            assert made.engine.metrics.num_draft_failures == 0
            assert isinstance(made.target, ModelRunner)
            runners = [made.target, *made.small_models.values()]
    assert generated[0] == generated[1]
    assert all(runner.padded is not None and runner.padded.sizes for runner in runners)


# ------------------------------------------------------------------------------------------- when it fails


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
    wanted = run(make_engine(ModelRunner(loaded, NUM_SLOTS)), _requests())
    error = CaptureError("operation not permitted when stream is capturing")
    _let_captures_fail(monkeypatch, lambda number: error if number > num_good else None)
    with caplog.at_level(logging.WARNING):
        runner = _runner(loaded)
        assert run(make_engine(runner), _requests()) == wanted
        runner.prepare()
    assert [record.getMessage() for record in caplog.records if "captured" in record.getMessage()] == [
        f"passes of {loaded.folder.name} are launched kernel by kernel, since they cannot be captured: "
        "operation not permitted when stream is capturing"
    ]


def test_sizes_that_there_is_no_memory_for_are_launched_and_others_captured(
    loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = loaded_of("llama")
    wanted = run(make_engine(ModelRunner(loaded, NUM_SLOTS)), _requests())
    runner = _runner(loaded)
    error = torch.OutOfMemoryError("CUDA out of memory")
    _let_captures_fail(monkeypatch, lambda number: error if number <= 3 else None)
    with caplog.at_level(logging.WARNING):
        runner.prepare()
        assert run(make_engine(runner), _requests()) == wanted
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
    runner = _runner(loaded_of("llama"))
    assert runner.padded is not None

    def logits(count: int) -> torch.Tensor:
        slots = runner.cache.reserve("a", count)
        found = runner.forward([Piece.of_span([8], TokenTree.chain(8, [9] * (count - 1)), NO_SLOTS, slots)])
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
    runner = _runner(loaded_of("llama"))
    graphs = runner.graphs
    assert graphs is not None
    graphs.times.append(0.1)
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, 0.04).__next__)
    slots = runner.cache.reserve("a", 7)
    found, made = [], []
    for _ in range(7):
        before = graphs.num_programs
        found.append(runner.forward([Piece.of_span([8], TokenTree.chain(8, [9] * 6), NO_SLOTS, slots)]).clone())
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
    for runner in (_runner(loaded, graphs), ModelRunner(loaded, NUM_SLOTS)):
        logits = []
        for tokens in random_prompts([1, 2] * 8):
            name = "ab"[len(logits) // 2 % 2]
            prefix, slots = runner.cache.slots(name), runner.cache.reserve(name, len(tokens))
            logits.append(runner.forward([Piece.of_span(tokens, TokenTree.root(tokens[-1]), prefix, slots)]).clone())
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
    wanted = run(make_engine(ModelRunner(loaded, NUM_SLOTS)), _requests())
    assert run(make_engine(runner), _requests()) == wanted


def test_a_size_that_cannot_be_run_is_found_when_a_model_is_loaded(
    loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = _runner(loaded_of("llama"))
    error = ValueError("out of resource: shared memory")
    _let_captures_fail(monkeypatch, lambda number: error if number > 3 else None)
    with caplog.at_level(logging.WARNING):
        runner.prepare()
    assert runner.padded is None
    assert [record.getMessage() for record in caplog.records] == [
        f"passes of {runner.loaded.folder} are not captured: out of resource: shared memory"
    ]
    wanted = run(make_engine(ModelRunner(runner.loaded, NUM_SLOTS)), _requests())
    assert run(make_engine(runner), _requests()) == wanted


def test_after_a_failed_capture_no_other_size_is_padded(loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = _runner(loaded_of("llama"))
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
    runner = _runner(loaded)
    wanted = run(make_engine(ModelRunner(loaded, NUM_SLOTS)), _requests())
    update, calls = Buffers.update_table, iter(range(1000))

    def failing(self: Buffers) -> None:
        if next(calls) % 5 == 2:
            raise RuntimeError("a pass that fails")
        update(self)

    monkeypatch.setattr(Buffers, "update_table", failing)
    assert run(make_engine(runner), _requests()) == wanted


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
    runner, compiled = _runner(loaded_of("llama"), max_requests=4), list[int]()

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
    runner = _runner(loaded)
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
