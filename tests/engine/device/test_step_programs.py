"""The programs of a step on a device without numbers: what kernels are given in every family, and their number."""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specinfer.core.tree import TreeBudget
from specinfer.drafters.kind import DraftKind
from specinfer.drafters.vocabulary.token_map import SharedVocabulary
from specinfer.engine.device.draft_loop import DeviceDrafter
from specinfer.engine.device.draft_program import DraftProgram, Tables
from specinfer.engine.device.logprobs import Asked
from specinfer.engine.device.processing import AdjustedRows, Processing
from specinfer.model.batch import Piece
from specinfer.model.definition import load_plain
from specinfer.model.graphs.capture import SynchronizationCheck
from specinfer.model.graphs.sizes import MAX_STATES
from specinfer.model.heads import block, eagle3
from specinfer.model.layers import device as device_decoder
from specinfer.model.load import load_model
from specinfer.model.recurrent.layers import is_recurrent, state_bytes
from specinfer.model.recurrent.linear import ShortConv
from specinfer.model.runner import ModelRunner
from specinfer.ops import layer_ops, tree_ops
from specinfer.ops.cpu.choice import SUPPORT
from specinfer.ops.cpu.recurrence import ConvolutionCall, RecurrenceCall
from specinfer.ops.kv_types import NO_SCALES, KVScales
from specinfer.ops.logits import Adjustments, Paths, Truncation
from specinfer.ops.scan_order import ScanOrder
from specinfer.ops.tree_layout import TreeLayout, num_words
from specinfer.ops.trees import (
    DRAWN,
    Candidates,
    ChanceTable,
    DeviceDraws,
    DeviceTrees,
    DrawnRows,
    Frontier,
    Guesses,
    Limits,
    Sampling,
    WalkInputs,
)
from specinfer.planning.device_costs import StepDesign
from tests.engine.device.step_programs import ASSISTANT, META, head_on_meta, on_meta, programs_of, save_head, target_of
from tiny import FAMILIES, HYBRIDS, quick

# Operations that only look at memory in another way, or allocate it.
VIEWS = {
    "view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "squeeze", "permute", "transpose", "t", "detach",
    "alias", "split", "unbind", "as_strided", "empty", "new_empty", "empty_like", "_reshape_alias", "empty_strided",
    "unfold", "diagonal", "split_with_sizes",
}  # fmt: skip


# A head takes so many of PyTorch's kernels for a draft loop, with the features of known tokens and a block,
# then for each level. Some have the layers of transformers. Each further head takes some more to merge its tree.
HEADS = {"EAGLE-3, as PyTorch has it": (53, 76), "EAGLE-3": (53, 18), "EAGLE": (57, 18), "MTP": (57, 20)}
HEADS[ASSISTANT] = (57, 218)  # of three layers
PER_MORE_HEADS = 6
BLOCKS = {"DFlash, as PyTorch has it": (240, 2), "DFlash": (80, 2), "DSpark": (80, 12), "P-EAGLE": (87, 2)}


class Kernels:
    """Stands in for the kernels of a step and of layers, and holds what they are given to what they read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        of_growth = ("add_candidates", "next_frontier", "best_tree", "mark_ancestors", "keep_drafted")
        of_growth += ("least_kept", "mask_logits", "adjust_logits", "merge_guesses", "draw_candidates")
        of_growth += ("walk_multi_step", "walk_traversal")
        for name in ("attend", "store", "choose", "walk", "commit", *of_growth):
            patch.setattr(tree_ops, name, self._counted(name))
        for name in ("convolve", "recur"):
            patch.setattr(layer_ops, name, self._counted(name))
        for name in ("add_norm", "rotate_and_store", "gate"):
            patch.setattr(device_decoder, name, self._counted(name))
        for module in (eagle3, block):
            patch.setattr(module, "add_norm", device_decoder.add_norm)

    def _counted(self, name: str) -> Callable[..., Any]:
        stand_in = getattr(self, name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return stand_in(*args, **options)

        return call

    @staticmethod
    def attend(query: Tensor, keys: Tensor, values: Tensor, layout: TreeLayout, **features: Any) -> Tensor:
        fields = ("slot_table", "prefix_lens", "starts", "node_slots", "node_positions", "node_lens", "visible")
        ints = [getattr(layout, name) for name in (*fields, "positions")]
        _on_device(query, keys, values, *ints, *(one for one in features.values() if isinstance(one, Tensor)))
        assert all(one.dtype == torch.int32 for one in ints)
        assert query.stride(2) == 1
        assert layout.prefix_lens.is_contiguous()
        assert layout.node_slots.stride(1) == layout.visible.stride(1) == layout.slot_table.stride(1) == 1
        assert len(layout.node_slots) == 1 or layout.node_positions.stride() == layout.node_slots.stride()
        return query.new_empty((*query.shape[:2], values.shape[2]))

    @staticmethod
    def store(keys: Tensor, values: Tensor, slots: Tensor, *new: Tensor, scales: KVScales = NO_SCALES) -> None:
        assert scales == NO_SCALES
        _on_device(keys, values, slots, *new)
        assert all(one.stride(2) == 1 for one in new)

    @staticmethod
    def convolve(inputs: Tensor, paths: Tensor, call: ConvolutionCall) -> Tensor:
        _on_device(inputs, call.weight, contiguous=True)
        assert (paths.is_meta, paths.dtype, paths.stride(1)) == (True, torch.int64, 1)
        return torch.empty(len(paths), inputs.shape[2], device=META)

    @staticmethod
    def recur(mixed: Tensor, call: RecurrenceCall, order: ScanOrder, stored: Tensor, pool: Tensor | None) -> Tensor:
        tensors = [value for name in ScanOrder.__slots__ if isinstance(value := getattr(order, name), Tensor)]
        _on_device(mixed, call.decay, stored, *tensors, *([] if pool is None else [pool]), contiguous=True)
        assert {one.dtype for one in tensors} == {torch.int64}
        assert len(order.slots) == len(order.origins) == len(order.places) == len(order.results) == len(mixed)
        assert order.num_places <= MAX_STATES
        return torch.empty(order.num_results, call.sizes.num_heads, call.sizes.value_dim, device=META)

    @staticmethod
    def choose(
        logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, least: Tensor | None = None
    ) -> Tensor:
        _on_device(logits, seeds, positions, temperatures, *([] if least is None else [least]), contiguous=True)
        assert len(logits) == len(seeds) == len(positions) == len(temperatures)
        return torch.empty(len(logits), dtype=torch.int64, device=META)

    @staticmethod
    def walk(said: Tensor, starts: Tensor, tokens: Tensor, parents: Tensor, sizes: Tensor, *, max_depth: int) -> Any:
        _on_device(said, starts, tokens, parents, sizes, contiguous=True)
        path, lengths = (
            torch.empty(shape, dtype=torch.int32, device=META) for shape in ((len(tokens), max_depth), (len(tokens),))
        )
        return path, lengths, torch.empty(len(tokens), dtype=torch.int64, device=META)

    @staticmethod
    def walk_multi_step(inputs: WalkInputs, *, out: tuple[Tensor, ...]) -> None:
        _on_device(*(one for one in inputs if one is not None), *out, contiguous=True)
        logits, _, _, *trees, draws, distribution_tokens, distribution_probs, uniforms, least = inputs
        assert least is None or least.shape == (len(logits),)
        assert {one.dtype for one in (*trees, draws, distribution_tokens)} == {torch.int32}
        assert (distribution_probs.dtype, uniforms.dtype) == (torch.float64, torch.int64)
        assert distribution_tokens.shape == distribution_probs.shape == (*draws.shape, min(SUPPORT, logits.shape[1]))

    walk_traversal = walk_multi_step

    @staticmethod
    def commit(table: Tensor, lens: Tensor, node_slots: Tensor, path: Tensor, lengths: Tensor) -> None:
        _on_device(table, lens, node_slots, path, lengths)
        assert path.is_contiguous()
        assert table.stride(1) == node_slots.stride(1) == 1
        assert {one.dtype for one in (lens, node_slots, path, lengths)} == {torch.int32}

    @staticmethod
    def add_candidates(
        logits: Tensor, frontier: Frontier, first: int, width: int, sampling: Sampling, table: ChanceTable,
        limits: Limits, candidates: Candidates, least: Tensor | None = None, accepted: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert least is None or least.shape == (len(logits),)
        of_launch = (sampling.seeds, sampling.temperatures, sampling.positions, *_fields(limits), *_fields(table))
        _on_device(*of_launch, *_fields(candidates), frontier.path_prob, frontier.numbers, contiguous=True)
        _on_device(logits)
        if accepted is not None:
            _on_device(accepted, contiguous=True)
            assert accepted.shape == (len(logits),)
            assert accepted.dtype == torch.float32
        assert len(logits) == frontier.tokens.numel()
        assert logits.stride(1) == 1
        assert first + frontier.tokens.shape[1] * width <= candidates.tokens.shape[1]

    @staticmethod
    def draw_candidates(
        values: Tensor, ids: Tensor, least: Tensor, drawn: DrawnRows, frontier: Frontier, first: int, width: int,
        table: ChanceTable, limits: Limits, candidates: Candidates, out: DeviceDraws, accepted: Tensor | None = None,
    ) -> None:  # fmt: skip
        _on_device(values, ids, least, *drawn, frontier.path_prob, *_fields(table), contiguous=True)
        if accepted is not None:
            _on_device(accepted, contiguous=True)
            assert accepted.shape == (len(values),)
            assert accepted.dtype == torch.float32
        assert len(table.heights) == len(table.slopes) > DRAWN
        _on_device(*_fields(limits), *_fields(candidates), *_fields(out), contiguous=True)
        assert (values.dtype, ids.dtype, drawn.is_drawn.dtype) == (torch.float32, torch.int64, torch.bool)
        assert {drawn.streams.dtype, drawn.numbers.dtype} == {torch.int64}
        assert values.shape == ids.shape == (frontier.tokens.numel(), out.tokens.shape[2])
        assert candidates.tokens.shape == out.nodes.shape
        assert first + frontier.tokens.shape[1] * width <= candidates.tokens.shape[1]

    @staticmethod
    def least_kept(logits: Tensor, truncation: Truncation) -> Tensor:
        _on_device(*_fields(truncation), contiguous=True)
        assert logits.stride(1) == 1
        assert len(logits) % len(truncation.top_k) == 0
        return torch.empty(len(logits), device=META)

    @staticmethod
    def mask_logits(logits: Tensor, bits: Tensor, is_masked: Tensor) -> None:
        _on_device(logits, is_masked, contiguous=True)
        _on_device(bits)
        assert bits.stride(1) == 1
        assert bits.dtype == is_masked.dtype == torch.int32
        assert len(logits) == len(bits) == len(is_masked)

    @staticmethod
    def adjust_logits(logits: Tensor, adjustments: Adjustments, paths: Paths) -> None:
        _on_device(*_fields(adjustments), *_fields(paths), contiguous=True)
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        assert adjustments.seen.shape[1] == logits.shape[1]
        assert len(logits) == paths.numbers.numel()

    @staticmethod
    def next_frontier(
        path_prob: Tensor, frontier: Frontier, first: int, first_column: int, candidates: Candidates,
        level_probs: Tensor, out: Frontier,
    ) -> None:  # fmt: skip
        _on_device(path_prob)
        _on_device(*_fields(frontier), *_fields(candidates), level_probs, *_fields(out), contiguous=True)
        assert path_prob.stride() == (candidates.tokens.shape[1], 1)
        assert first_column + out.tokens.shape[1] <= 32 * out.sees.shape[2]
        assert first + path_prob.shape[1] <= candidates.tokens.shape[1]

    @staticmethod
    def best_tree(
        path_prob: Tensor, candidates: Candidates, roots: Tensor, has_two: Tensor, limits: Limits, out: DeviceTrees
    ) -> None:
        _on_device(path_prob, roots, has_two, *_fields(candidates), *_fields(limits), *_fields(out), contiguous=True)

    @staticmethod
    def merge_guesses(guesses: Guesses, candidates: Candidates, first: int) -> None:
        _on_device(*guesses, *_fields(candidates), contiguous=True)
        assert first + guesses.tokens.shape[1] == candidates.tokens.shape[1]

    @staticmethod
    def mark_ancestors(parents: Tensor, first: Tensor, *, max_depth: int, last: int) -> Any:
        _on_device(parents, first, contiguous=True)
        assert max_depth >= 1
        assert last > 0
        return parents.new_empty((parents.numel(), num_words(parents.shape[1]))), torch.empty_like(parents)

    @staticmethod
    def keep_drafted(path: Tensor, lengths: Tensor, *others: Any) -> None:
        _on_device(path, lengths, *others[:-1], *others[-1], contiguous=True)

    @staticmethod
    def add_norm(
        hidden: Tensor, added: Tensor | None, weight: Tensor, _eps: float, out: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        _on_device(hidden, weight, *([] if added is None else [added]), contiguous=True)
        if out is None:
            return torch.empty_like(hidden)
        _on_device(out)
        assert out.shape == hidden.shape
        assert out.stride(1) == 1
        return out

    @staticmethod
    def rotate_and_store(qkv: Tensor, *given: Any, dtype: torch.dtype | None) -> Tensor:
        keys = given[3]
        _on_device(qkv, *given[:5], contiguous=True)
        heads, dim = keys.shape[1:]
        return qkv.new_empty((len(qkv), qkv.shape[1] // dim - 2 * heads, dim), dtype=dtype)

    @staticmethod
    def gate(both: Tensor) -> Tensor:
        _on_device(both, contiguous=True)
        return both.new_empty((len(both), both.shape[1] // 2))


def _fields(several: Any) -> list[Tensor]:
    return [value for one in fields(several) if isinstance(value := getattr(several, one.name), Tensor)]


def _on_device(*tensors: Tensor, contiguous: bool = False) -> None:
    assert {one.device.type for one in tensors} == {"meta"}
    assert not contiguous or all(one.is_contiguous() for one in tensors)


class Launches(TorchDispatchMode):
    """Counts PyTorch's kernels: every operation that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode a composite operation arrives as a whole
            found = func.decompose(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        self.count += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_are_given_what_they_read_in_a_step_of_every_family(
    family: str, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes from the host or waits for the device, and strides and types are those that kernels assume."""
    loaded = on_meta(model_folder(family))
    kernels = Kernels(monkeypatch)
    for budget in (TreeBudget(8, 2), None):
        programs = programs_of(loaded, budget, 4, Processing.ADJUSTMENT, 8, Asked(20, 16))
        with torch.inference_mode(), SynchronizationCheck():
            if programs.size.shape.num_nodes:
                programs.draft()
            programs.verify()
    layers = len(loaded.layer_shapes)
    assert kernels.calls["attend"] == kernels.calls["store"] == layers * (2 + 1 + 1)
    assert (kernels.calls["choose"], kernels.calls["walk"], kernels.calls["commit"]) == (2, 2, 3)
    assert kernels.calls["merge_guesses"] == 1
    assert kernels.calls["least_kept"] == kernels.calls["adjust_logits"] == 2 + 1 + 1


@pytest.mark.parametrize("family", quick(HYBRIDS, "lfm2_moe", "qwen3_next", "jamba", "mamba"))
def test_kernels_are_given_what_they_read_by_layers_without_attention(
    family: str, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of the tokens follows from trees and paths that are known on the device alone."""
    loaded, counts = on_meta(model_folder(family)), []
    for module in loaded.model.modules():  # made when the model was loaded
        kinds = type(module).__mro__
        for name in [
            name for kind in kinds for name, value in vars(kind).items() if isinstance(value, cached_property)
        ]:
            module.__dict__.pop(name, None)
    kernels, layers = Kernels(monkeypatch), [one for one in loaded.model.modules() if is_recurrent(one)]
    recomputed = 8 if state_bytes(loaded.model) else 0
    for budget in (TreeBudget(8, 2), None):
        programs = programs_of(loaded, budget, 4, Processing.ADJUSTMENT, 8, num_models=0, num_recomputed=recomputed)
        kernels.calls.clear()
        with torch.inference_mode(), SynchronizationCheck():
            programs.verify()
        assert kernels.calls["convolve"] == len(layers)
        assert kernels.calls["recur"] == sum(not isinstance(one, ShortConv) for one in layers)
        assert programs._scan is not None
        is_row = torch.empty(4, dtype=torch.bool, device=META)
        with torch.inference_mode(), Launches() as launches:
            programs._scan.of_step(programs._trees, programs.inputs.on_device["slots"], is_row)
            programs._scan.advance(is_row)
        counts.append(launches.count)
    assert max(counts) <= PER_SCAN
    without = programs_of(on_meta(model_folder("llama")), None, 4, Processing.ADJUSTMENT, num_models=0)
    assert without._scan is None


@pytest.mark.parametrize(("family", "rope"), [
    ("internlm3", {"rope_type": "dynamic", "factor": 6.0}),
    ("phi3", {
        "rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [3.0, 4.0, 5.0, 6.0],
        "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0,
    }),
])  # fmt: skip
def test_rotations_that_grow_with_the_text_do_not_look_at_its_positions(
    family: str, rope: dict[str, Any], model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change beyond the longest text alone."""
    folder = model_folder(family, rope_parameters=rope | {"rope_theta": 10000.0})
    text = torch.arange(3, 23).unsqueeze(0)
    wanted = load_plain(folder, torch.float32)(text).logits[0]
    runner = ModelRunner(load_model(folder, torch.float32, torch.device("cpu"), native=False), 64)
    slots = runner.cache.reserve("text", 20)
    piece = replace(Piece.from_span(text[0].tolist(), None, runner.cache.slots("text"), slots), num_logits=20)
    torch.testing.assert_close(runner.forward([piece]), wanted, atol=1e-4, rtol=1e-4)
    Kernels(monkeypatch)
    programs = programs_of(on_meta(folder), TreeBudget(8, 2), 4)
    with torch.inference_mode(), SynchronizationCheck():
        programs.draft()
        programs.verify()


def test_kernels_are_given_what_they_read_by_several_drafters(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, kernels = on_meta(model_folder("llama")), Kernels(monkeypatch)
    programs = programs_of(loaded, TreeBudget(8, 2), 4, Processing.ADJUSTMENT, 8, num_models=3)
    with torch.inference_mode(), SynchronizationCheck():
        programs.draft()
        programs.verify()
    assert kernels.calls["add_candidates"] == 3 * 2
    assert kernels.calls["merge_guesses"] == kernels.calls["keep_drafted"] == 3
    assert kernels.calls["best_tree"] == 3 + 2, (
        "the path probabilities of each tree but the last come from a second one"
    )
    assert kernels.calls["walk"] == kernels.calls["mark_ancestors"] == 1 + 2
    assert kernels.calls["commit"] == 1 + 3


@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize("kind", [*HEADS, *BLOCKS])
def test_kernels_are_given_what_they_read_by_heads(
    kind: str,
    num_models: int,
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head reads the target's hidden states on the device, and its own; the walk keeps its known tokens alone."""
    monkeypatch.setattr("specinfer.model.heads.load.pack_linears", lambda _: None)  # as on a GPU
    is_fused, folder = "PyTorch" not in kind, tmp_path / "head"
    save_head(folder, kind)
    loaded, head = head_on_meta(folder, target_of(kind, folder, model_folder), is_fused=is_fused)
    kernels = Kernels(monkeypatch)
    programs = programs_of(loaded, TreeBudget(8, 3), 4, Processing.ADJUSTMENT, 8, None, num_models, head=head)
    counts = []
    for program in (programs.draft, programs.verify):
        with torch.inference_mode(), SynchronizationCheck(), Launches() as launches:
            program()
        counts.append(launches.count)
    assert kernels.calls["add_candidates"] == 3 * num_models
    assert kernels.calls["keep_drafted"] == 0
    assert kernels.calls["commit"] == 1 + (0 if kind == ASSISTANT else 2 * num_models)
    per_draft, per_level = (HEADS | BLOCKS)[kind]
    assert counts[0] <= num_models * (per_draft + 3 * per_level) + PER_MORE_HEADS * (num_models - 1)
    if is_fused:
        layers, passes = len(loaded.layer_shapes), {"P-EAGLE": 2, "DFlash": 1, "DSpark": 1}.get(kind, 3) * num_models
        assert kernels.calls["gate"] == passes * len(head.layer_shapes) + layers
        num_read = 2 * passes if kind in ("DFlash", "DSpark") else 0  # of two layers
        assert kernels.calls["rotate_and_store"] == kernels.calls["gate"] + num_read
        norms = {"EAGLE": 1, "EAGLE-3": 4, "P-EAGLE": 4, "MTP": 5, "DFlash": 6, "DSpark": 6}[kind]  # of a pass
        assert kernels.calls["add_norm"] == passes * norms + 2 * layers + 1


@pytest.mark.parametrize(("rule", "walk"), [("multi-step", "walk_multi_step"), ("traversal", "walk_traversal")])
@pytest.mark.parametrize("budget", [TreeBudget.expansion((2, 2, 1)), TreeBudget(8, 3), None], ids=str)
def test_kernels_are_given_what_they_read_where_tokens_are_drawn(
    budget: TreeBudget | None, rule: str, walk: str, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, kernels = on_meta(model_folder("llama", vocab_size=300)), Kernels(monkeypatch)
    programs = programs_of(loaded, budget, 4, Processing.ADJUSTMENT, rule=rule)
    with torch.inference_mode(), SynchronizationCheck():
        if budget is not None:
            programs.draft()
        programs.verify()
    assert kernels.calls[walk] == kernels.calls["walk"] == 1
    assert kernels.calls["least_kept"] == 1 + (3 * 2 if budget else 0), (
        "of a level those of the target's kind, and of the draws"
    )
    assert kernels.calls["best_tree"] == (2 if budget else 0), "a second one numbers the candidates that are nodes"
    assert kernels.calls["draw_candidates"] == (3 if budget else 0)


# `specinfer plan` predicts with the same numbers, so lower them there when a step becomes leaner. These are the kernels
# of PyTorch alone. The others are this project's: of a draft level two for its candidates and one for its frontier; of
# a draft loop one for its trees; of a verification two for the tokens chosen and one each for mask, walk, columns kept
# and two commits; of a layer two norms, the rotation, the attention with the sum of its parts, and the gate.
DESIGN = StepDesign()
PER_DRAFT, PER_LEVEL, PER_VERIFICATION = DESIGN.draft_kernels - 1, DESIGN.level_kernels - 3, DESIGN.verify_kernels - 7
PER_LAYER = DESIGN.layer_kernels - 6


# To count the tokens that were emitted, a verification gathers, joins and adds.
PER_COUNT = 16
# Log-probabilities take so many kernels, and so many more for each 32 places of paths: without the most probable
# tokens, to find these, and for each token that requests may name.
PER_LOGPROBS, PER_SCORED, PER_BEST, PER_NAMED = 14, 8, 14, 4
# Tokens that are drawn take so many for a draft loop, for each of its levels, and for a verification.
PER_DRAWN, PER_DRAWN_LEVEL, PER_DRAWN_WALK = 16, 4, 3
PER_GUESSES = 9
PER_MASK = 15
PER_SCAN = 59  # the order of the tokens in layers without attention
PER_PART = 51  # of a context, once for a draft loop
PER_TABLE, PER_ORDINARY = 2, 2  # changes of a table of slots; what the host sends as numbers and is yes or no
PER_ADJUSTED = 10  # rows of biases and penalties of the requests of a step


@pytest.mark.parametrize("processing", Processing)
@pytest.mark.parametrize("rows", [1, 32])
def test_a_step_launches_no_more_kernels_than_it_may(
    rows: int, processing: Processing, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncation takes two kernels more for each level and for the target's pass, biases and penalties one.

    Guesses of lookups take one for a draft loop. Log-probabilities take none where no request asks for them.
    """
    loaded = on_meta(model_folder("llama"), is_fused=True)
    kernels, layers = Kernels(monkeypatch), len(loaded.layer_shapes)
    programs = programs_of(loaded, TreeBudget(16, 8), rows, processing, 16 if rows > 1 else 0)
    shape, counts = programs.size.shape, []
    for program in (programs.draft, programs.verify):
        with torch.inference_mode(), Launches() as launches:
            program()
        counts.append(launches.count)
    levels = shape.num_levels
    assert counts[0] <= PER_DRAFT + levels * (PER_LEVEL + PER_LAYER * layers)
    counting = PER_COUNT if processing >= Processing.ADJUSTMENT else 0
    assert counts[1] <= PER_VERIFICATION + PER_LAYER * layers + counting
    assert kernels.calls["least_kept"] == (levels + 1 if processing >= Processing.TRUNCATION else 0)
    assert kernels.calls["merge_guesses"] == (rows > 1)
    assert kernels.calls["adjust_logits"] == (levels + 1 if processing >= Processing.ADJUSTMENT else 0)
    calls = {name: kernels.calls[name] for name in ("add_candidates", "next_frontier", "best_tree", "mark_ancestors")}
    assert calls == {"add_candidates": levels, "next_frontier": levels - 1, "best_tree": 1, "mark_ancestors": 1}
    assert (kernels.calls["choose"], kernels.calls["walk"], kernels.calls["commit"]) == (1, 1, 2)
    passes = shape.num_levels + 1
    assert kernels.calls["attend"] == kernels.calls["rotate_and_store"] == kernels.calls["gate"] == passes * layers
    assert kernels.calls["add_norm"] == passes * (2 * layers + 1)
    verified = counts[1]
    for asked in (Asked(0), Asked(20), Asked(0, 16)):
        programs = programs_of(loaded, TreeBudget(16, 8), rows, processing, asked=asked)
        with torch.inference_mode(), Launches() as launches:
            programs.verify()
        num_places = rows * programs.results.on_device["rank"].shape[1]
        per_part = PER_SCORED + (PER_BEST if asked.best else 0) + PER_NAMED * asked.others
        assert launches.count - verified <= PER_LOGPROBS + (asked.others > 0) + per_part * -(-num_places // 32)


@pytest.mark.parametrize("processing", [Processing.NONE, Processing.ADJUSTMENT])
@pytest.mark.parametrize("rows", [1, 32])
def test_a_draft_of_a_host_step_takes_few_kernels_more(
    rows: int, processing: Processing, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests there are; nothing waits for the device before the trees are read."""
    loaded, kernels = on_meta(model_folder("llama"), is_fused=True), Kernels(monkeypatch)
    programs = programs_of(loaded, TreeBudget(16, 8), rows, processing, is_masked=processing > 0)
    vocabulary = SharedVocabulary(loaded.vocab_size, loaded.vocab_size)
    drafter = DeviceDrafter(ModelRunner(loaded, 512), DraftKind(), vocabulary.to_target)
    tables, adjusted = Tables.from_kind(DraftKind(), rows, 256, META), AdjustedRows(rows, loaded.vocab_size, META)
    assert adjusted.can_adjust()
    counts, calls = [], []
    for program in (programs.draft, DraftProgram(programs.size, drafter, tables, loaded.vocab_size, adjusted)):
        kernels.calls.clear()
        with torch.inference_mode(), SynchronizationCheck(), Launches() as launches:
            program()
        counts.append(launches.count)
        calls.append(dict(kernels.calls))
    assert counts[1] - counts[0] <= PER_TABLE + PER_ORDINARY + (PER_ADJUSTED if processing else 0)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("budget", [None, TreeBudget(16, 8)])
def test_masks_split_the_verification_and_take_few_kernels(
    budget: TreeBudget | None, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of the nodes are made twice; the logits are copied to where they wait for the masks."""
    loaded, kernels = on_meta(model_folder("llama"), is_fused=True), Kernels(monkeypatch)
    programs = programs_of(loaded, budget, 4, is_masked=True)
    assert [part is not None for part in programs.parts] == [budget is not None, True, True]
    counts = []
    for program in filter(None, programs.parts):
        with torch.inference_mode(), SynchronizationCheck(), Launches() as launches:
            program()
        counts.append(launches.count)
    assert kernels.calls["mask_logits"] == (2 if budget else 1), "of the roots, for the draft, and of all nodes"
    assert counts[-2] + counts[-1] <= PER_VERIFICATION + PER_LAYER * len(loaded.layer_shapes) + PER_MASK


def test_a_copy_of_the_target_launches_no_more_than_a_small_model(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes the root alone before its levels, and keeps nothing; over a part of a context it first finds that."""
    loaded, kernels = on_meta(model_folder("llama"), is_fused=True), Kernels(monkeypatch)
    counts = []
    for copy, is_sparse in ((loaded, False), (None, False), (loaded, True)):
        kernels.calls.clear()
        programs = programs_of(loaded, TreeBudget(16, 8), 4, copy=copy, is_sparse=is_sparse)
        with torch.inference_mode(), SynchronizationCheck(), Launches() as launches:
            programs.draft()
            programs.verify()
        counts.append(launches.count)
        assert kernels.calls["commit"] == kernels.calls["keep_drafted"] + 1 == (1 if copy else 2)
    assert counts[0] < counts[1]
    assert counts[2] <= counts[0] + PER_PART


def test_trees_of_lookups_alone_take_few_kernels(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, kernels = on_meta(model_folder("llama"), is_fused=True), Kernels(monkeypatch)
    programs = programs_of(loaded, TreeBudget(16, 8), 4, num_models=0)
    for program, most in (
        (programs.draft, PER_GUESSES),
        (programs.verify, PER_VERIFICATION + PER_LAYER * len(loaded.layer_shapes)),
    ):
        with torch.inference_mode(), SynchronizationCheck(), Launches() as launches:
            program()
        assert 0 < launches.count <= most
    assert not {"add_candidates", "best_tree", "merge_guesses"} & {
        name for name, count in kernels.calls.items() if count
    }


def test_tokens_that_are_drawn_take_few_kernels_more(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, _ = on_meta(model_folder("llama"), is_fused=True), Kernels(monkeypatch)
    counts: dict[str | None, list[int]] = {}
    for rule in ("traversal", None):
        programs = programs_of(loaded, TreeBudget.expansion((2, 2, 1)), 4, Processing.TRUNCATION, rule=rule)
        for program in (programs.draft, programs.verify):
            with torch.inference_mode(), Launches() as launches:
                program()
            counts.setdefault(rule, []).append(launches.count)
    more = [drawn - chosen for drawn, chosen in zip(counts["traversal"], counts[None], strict=True)]
    assert more[0] <= PER_DRAWN + 3 * PER_DRAWN_LEVEL
    assert more[1] <= PER_DRAWN_WALK
