"""Passes at padded sizes, run here without capture: the same tokens, and buffers that stay in place."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from native_layers import TREE, Reader, check_tree_logits
from specinfer import LLM
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree
from specinfer.drafters import MergedDrafter, NGramDrafter, SmallModelDrafter, loading
from specinfer.model.batch import Piece
from specinfer.model.forward import forward
from specinfer.model.graphs.buffers import Buffers, InputBlock
from specinfer.model.graphs.capture import Graphs, Program, SynchronizationCheck, SynchronizationError
from specinfer.model.graphs.graph_runner import GraphRunner
from specinfer.model.graphs.sizes import MAX_ROWS, Size
from specinfer.model.graphs.slot_table import SlotTable
from specinfer.model.kv_cache import NO_SLOTS
from specinfer.model.kv_tensors import KVTensors
from specinfer.model.layers.device import DeviceDecoder
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.recurrent.layers import kept_states, num_taps
from specinfer.model.recurrent.scan import Scan
from specinfer.model.runner import ModelRunner
from specinfer.ops import kernels, layer_ops, tree_ops
from specinfer.ops.cpu.recurrence import ConvolutionCall, RecurrenceCall
from specinfer.ops.scan_order import ScanOrder
from specinfer.setup import assembly
from tests.model.graphs.padded import CPU, NUM_SLOTS, Loaded, padded_runner, requests
from tiny import FAMILIES, HYBRIDS, KINDS_OF_HYBRIDS, VOCAB, make_engine, make_model, quick, random_prompts, run


@pytest.mark.parametrize("family", [*FAMILIES, *quick(HYBRIDS, *KINDS_OF_HYBRIDS)])
def test_tree_logits_are_those_of_each_path(family: str, loaded_of: Loaded) -> None:
    """Of every family, from caches and buffers full of what are no numbers."""
    runner = padded_runner(loaded_of(family))
    check_tree_logits(make_model(family), runner)
    assert runner.padded is not None
    assert {size.is_chain for size in runner.padded.sizes} == {True, False}


# Of the others the logits are compared above.
QUICK = ("llama", "mpt", "gemma3_text", "gpt_oss", "qwen3_5_text", "lfm2", "mamba")


@pytest.mark.parametrize("family", quick([*FAMILIES, *HYBRIDS], *QUICK))
def test_families_generate_the_same_tokens(family: str, loaded_of: Loaded) -> None:
    """Greedy and sampled requests in one batch, prompts in chunks, with and without guesses of two drafters."""
    loaded = loaded_of(family)
    wanted = run(make_engine(ModelRunner(loaded, NUM_SLOTS), max_num_batched_tokens=16), requests())
    for shape in ((), (2, 2, 1)):
        target = padded_runner(loaded)
        small = SmallModelDrafter(padded_runner(loaded_of(family, noise=0.02)), VOCAB, "small")
        drafter = MergedDrafter([small, NGramDrafter()]) if shape else None
        engine = make_engine(target, drafter, shape, max_num_batched_tokens=16)
        assert run(engine, requests()) == wanted
        assert engine.metrics.num_draft_failures == 0
        assert target.padded is not None
        assert target.padded.sizes


def test_logits_stay_where_they_are(loaded_of: Loaded) -> None:
    """No size has logits or inputs of its own time: the next pass of a size finds them where they were."""
    runner = padded_runner(loaded_of("llama"))
    assert runner.padded is not None

    def place(count: int) -> int:
        slots = runner.cache.reserve("a", count)
        logits = runner.forward([Piece.from_span([8], TokenTree.chain(8, [9] * (count - 1)), NO_SLOTS, slots)])
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
        piece = Piece.from_span(tokens, tree, NO_SLOTS, slots)
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
            pieces.append(replace(Piece.from_span(tokens, None, prefix, slots[0]), num_logits=num_new))
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
    runner, other = padded_runner(loaded_of("llama")), loaded_of("llama", seed=1)
    wanted = run(make_engine(ModelRunner(other, NUM_SLOTS)), requests())
    assert run(make_engine(runner), requests()) != wanted
    waits: list[GraphRunner | None] = []
    monkeypatch.setattr(Graphs, "wait", lambda _: waits.append(runner.padded))
    before = runner.padded
    runner.replace(other)
    assert waits == [before], "what was captured may still run"
    assert runner.num_replaced == 1
    assert run(make_engine(runner), requests()) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_wait_for_nothing(family: str, loaded_of: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """No branch and no shape depends on what is computed: so a program can be captured."""
    runner = padded_runner(loaded_of(family))
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
    runner.forward([Piece.from_span([8], TREE, NO_SLOTS, slots)])
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
    runners = [padded_runner(loaded) for _ in range(2)]
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
        small = SmallModelDrafter(padded_runner(loaded_of("qwen3_5_text", noise=0.15)), VOCAB, "small")
        return run(make_engine(padded_runner(loaded_of("qwen3_5_text")), small, (2, 2, 1)), requests())

    make, wanted = Scan.__init__, outputs()
    assert wanted == run(make_engine(ModelRunner(loaded_of("qwen3_5_text"), NUM_SLOTS)), requests())
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
    wanted = run(make_engine(ModelRunner(loaded_of(family), NUM_SLOTS)), requests())
    assert run(make_engine(padded_runner(loaded), NGramDrafter(), (2, 1)), requests()) == wanted


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
