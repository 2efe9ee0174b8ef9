"""Engines whose caches have keys and values of 8 bits: speculation, sharing of slots and preemption change nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from on_device import CPU, load_plain, make_device_engine, run_on_device
from quantized_files import save_quantized
from specinfer import LLM, SamplingParams
from specinfer.core.config import KV_CACHE_DTYPES
from specinfer.core.errors import ModelError
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters import MergedDrafter, NGramDrafter, SmallModelDrafter
from specinfer.engine.engine import Engine
from specinfer.model.batch import Piece, pack
from specinfer.model.capacity import bytes_per_token
from specinfer.model.device import find_kv_dtype
from specinfer.model.forward import forward
from specinfer.model.kv_cache import NO_SLOTS
from specinfer.model.kv_tensors import KVTensors
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.runner import ModelRunner
from specinfer.ops.kv_types import FLOAT8, to_stored
from tiny import VOCAB, make_engine, make_request, random_prompts, run
from worlds import SETTINGS

E4M3, E5M2 = FLOAT8
Folders = Callable[..., Path]
PROMPTS = random_prompts([3, 26, 12, 40])
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=15),
    SamplingParams(max_tokens=14),
    SamplingParams(temperature=0.0, max_tokens=15),
    SamplingParams(max_tokens=11, top_p=0.9, temperature=0.7),
]
TREE = TokenTree((8, 9, 10, 11, 9, 13, 12, 11), (-1, 0, 0, 1, 2, 1, 3, 4))


def _requests() -> list[Any]:
    return [make_request(str(i), p, q, seed=i) for i, (p, q) in enumerate(zip(PROMPTS, PARAMS, strict=True))]


def _num_fast(engine: Engine) -> int:
    """Number of steps in which draft tokens were accepted."""
    return sum(step.num_generated > step.num_requests for step in engine.metrics.recent)


def _loaded(folder: Path, kv_dtype: torch.dtype | None, **options: Any) -> LoadedModel:
    return load_model(folder, torch.float32, CPU, kv_dtype=kv_dtype, **options)


# --------------------------------------------------------------------------------------- a tree and a chain


@pytest.mark.parametrize(
    ("family", "kv_dtype", "limits"),
    [
        *(("llama", kv_dtype, {}) for kv_dtype in (E4M3, E5M2, torch.bfloat16, torch.float16)),
        *((family, E4M3, {}) for family in ("gemma3_text", "gemma4_text-shared", "lfm2", "opt")),
        ("llama", E4M3, {"num_slots": 64}),
        ("gemma3_text", E5M2, {"num_slots": 64}),
        ("llama", E4M3, {"max_num_batched_tokens": 12}),
        ("lfm2", E5M2, {"max_num_batched_tokens": 12}),
    ],
)
def test_trees_generate_what_plain_decoding_does(
    family: str, kv_dtype: torch.dtype, limits: dict[str, int], model_folder: Folders
) -> None:
    """Greedy and sampled, with prompts in chunks, and with so few slots that requests are preempted."""
    target, small = (_loaded(model_folder(family, 0, noise), kv_dtype) for noise in (0.0, 0.15))
    limits = dict(limits)
    num_slots = limits.pop("num_slots", 600)
    plain = run(make_engine(ModelRunner(target, 600)), _requests())
    drafter = SmallModelDrafter(ModelRunner(small, 600), VOCAB, "small")
    engine = make_engine(ModelRunner(target, num_slots), MergedDrafter([drafter, NGramDrafter()]), (2, 1, 1), **limits)
    assert run(engine, _requests()) == plain
    assert _num_fast(engine) > 3


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_steps_on_the_device_generate_what_plain_decoding_does(kv_dtype: torch.dtype, model_folder: Folders) -> None:
    target, small = (replace(load_plain(model_folder("llama", 0, noise)), kv_dtype=kv_dtype) for noise in (0.0, 0.15))
    requests = _requests()
    engine = make_device_engine(target, small, TreeBudget.expansion((2, 1, 1), 1), keeps_prefixes=True)
    assert run_on_device(engine, requests)
    assert {pool.dtype for pool in engine.target.tensors.keys} == {kv_dtype}
    plain = make_device_engine(target, has_device_executor=False)
    assert [request.output_ids for request in requests] == run(plain, _requests())


def _logits(loaded: LoadedModel, passes: Sequence[Sequence[Piece]], store: KVTensors) -> Tensor:
    with torch.inference_mode():
        found = [forward(loaded.model, pack(pieces, store, CPU, native=loaded.native)) for pieces in passes]
    return found[-1]


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_a_node_sees_the_nodes_above_it_as_they_will_be_read_later(
    kv_dtype: torch.dtype, model_folder: Folders
) -> None:
    """To the last bit. If nodes of the same pass were seen before they are rounded, outputs would depend on trees."""
    loaded = _loaded(model_folder("llama"), kv_dtype)
    assert loaded.compute_path == "native fused layers"
    prompt, count = PROMPTS[1], len(PROMPTS[1])

    def in_a_tree(store: KVTensors, after_the_prompt: Callable[[KVTensors], None] = lambda _: None) -> Tensor:
        slots = torch.arange(count + len(TREE)).numpy()
        _logits(loaded, [[Piece.from_span(prompt, None, NO_SLOTS, slots[:count])]], store)
        after_the_prompt(store)
        return _logits(loaded, [[Piece.from_span([TREE.tokens[0]], TREE, slots[:count], slots[count:])]], store)

    def round_all(store: KVTensors) -> None:
        for pool in (*store.keys, *store.values):
            pool[:] = to_stored(pool, kv_dtype).float()

    def make_store(kind: torch.dtype | None) -> KVTensors:
        store = KVTensors(loaded.layer_shapes, 64, torch.float32, CPU, kv_dtype=kind)
        for pool in (*store.keys, *store.values):
            pool.view(torch.uint8).zero_()
        return store

    found = in_a_tree(make_store(kv_dtype))
    wrong = in_a_tree(make_store(None), round_all)  # of a cache that rounds at the end of a pass
    for node in range(len(TREE)):
        path = [node]
        while path[0]:
            path.insert(0, TREE.parents[path[0]])
        store, slots = make_store(kv_dtype), torch.arange(count + len(path)).numpy()
        passes = [[Piece.from_span(prompt, None, NO_SLOTS, slots[:count])]]
        for i, one in enumerate(path):
            token = TREE.tokens[one]
            place = slots[: count + i], slots[count + i : count + i + 1]
            passes.append([Piece.from_span([token], TokenTree.root(token), *place)])
        assert torch.equal(found[node], _logits(loaded, passes, store)[0])
        assert not torch.equal(wrong[node], found[node])


@pytest.mark.covering(1)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text-shared", "falcon", "gpt_oss"])
def test_logits_are_those_of_a_cache_whose_numbers_are_rounded(
    family: str, native: bool, model_folder: Folders
) -> None:
    """A cache of float32 that holds what PyTorch's conversions make of each number, in a plain pass token by token."""
    loaded = _loaded(model_folder(family), E4M3, native=native)

    class Rounded(KVTensors):
        def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
            super().store(layer, slots, *(one.clamp(-448, 448).to(E4M3).float() for one in (key, value)))

    def token_by_token(store: KVTensors, loaded: LoadedModel) -> Tensor:
        slots = torch.arange(len(PROMPTS[1])).numpy()
        passes = [
            [Piece.from_span([token], TokenTree.root(token), slots[:i], slots[i : i + 1])]
            for i, token in enumerate(PROMPTS[1])
        ]
        return _logits(loaded, passes, store)

    found = token_by_token(KVTensors(loaded.layer_shapes, 64, torch.float32, CPU, kv_dtype=E4M3), loaded)
    plain = _loaded(model_folder(family), None, native=False)
    wanted = token_by_token(Rounded(loaded.layer_shapes, 64, torch.float32, CPU), plain)
    unrounded = token_by_token(KVTensors(loaded.layer_shapes, 64, torch.float32, CPU), plain)
    spread = (unrounded - wanted).norm()
    assert (found - wanted).norm() < 0.2 * spread, "where a sum rounds to another number, that is a part of it"


# ------------------------------------------------------------------------------------------------- memory


def _llm(folder: Path, name: str, **options: Any) -> LLM:
    return LLM(folder, kv_cache_dtype=name, **SETTINGS | options)


@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_a_cache_of_so_many_bytes_has_slots_for_its_type(name: str, model_folder: Folders) -> None:
    memory = {"kv_cache_memory_bytes": 2**18, "max_num_seqs": 64, "max_model_len": 128}
    with _llm(model_folder(tokenizer=True), name, **memory) as llm:
        loaded = llm.target.loaded
        size = {"auto": 4, "bfloat16": 2, "float16": 2}.get(name, 1)
        assert bytes_per_token([loaded]) == size * sum(shape.num_values for shape in loaded.layer_shapes)
        assert llm.target.cache.num_slots == 2**18 // bytes_per_token([loaded])
        assert llm.target.tensors.num_bytes() <= 2**18
        assert {pool.dtype for pool in llm.target.tensors.values} == {find_kv_dtype(name) or torch.float32}


def test_a_type_that_back_ends_do_not_know_is_refused_before_anything_is_loaded(
    model_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KV_CACHE_DTYPES, "fp8", "float8_e4m3fnuz")
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: 'fp8' is not in KV_TYPES .* use auto, bfloat16, "):
        _llm(model_folder(tokenizer=True), "fp8")


def test_inputs_of_layers_without_attention_are_stored_as_they_are(model_folder: Folders) -> None:
    loaded = _loaded(model_folder("lfm2"), E4M3)
    assert [shape.attends for shape in loaded.layer_shapes] == [False, True, False]
    assert [pool.dtype for pool in ModelRunner(loaded, 8).tensors.keys] == [torch.float32, E4M3, torch.float32]


def test_caches_of_drafters_have_the_type_too(model_folder: Folders) -> None:
    drafter = str(model_folder("llama", 0, 0.15))
    with _llm(model_folder(tokenizer=True), "fp8", drafters=[drafter]) as llm:
        (small,) = llm.small_models.values()
        assert {pool.dtype for pool in small.tensors.keys} == {E4M3}


def test_an_unknown_type_is_refused(model_folder: Folders) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of auto, bfloat16, .*fp8_e5m2, not 'int8'"):
        _llm(model_folder(tokenizer=True), "int8")


# --------------------------------------------------------------------------------------- shared slots, ranks


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16},
        pytest.param(
            {"pipeline_parallel_size": 2}, marks=pytest.mark.distributed
        ),  # the like is in parallel/test_ranks.py
    ],
)
def test_cached_prefixes_several_outputs_and_ranks(settings: dict[str, int], model_folder: Folders) -> None:
    folder = model_folder(tokenizer=True)
    prompts = [{"prompt_token_ids": PROMPTS[3] + ids} for ids in ([], [5, 6, 7], PROMPTS[0])]
    params = [SamplingParams(max_tokens=16, temperature=0.8, seed=i, n=2) for i in range(3)]

    def generated(name: str, **options: Any) -> list[list[int]]:
        with _llm(folder, name, **options) as llm:
            found = []
            for _ in range(2):  # the second time with cached prefixes
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert not any(output.error for output in outputs)
                found.append([list(one.token_ids) for output in outputs for one in output.outputs])
        assert found[0] == found[1]
        return found[0]

    wanted = generated("fp8", tree="off", enable_prefix_caching=False)
    assert generated("fp8", **settings) == wanted
    if not settings:
        assert generated("fp8_e5m2", tree="off") != wanted, "rounding that changes no text would show nothing here"


@pytest.mark.parametrize("drafter", ["self:int8", "self:sparse"])
def test_copies_of_the_target_draft_from_its_cache(drafter: str, model_folder: Folders) -> None:
    folder, params = model_folder(tokenizer=True), SamplingParams(max_tokens=20, temperature=0.0)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]

    def generated(**options: Any) -> list[list[int]]:
        with _llm(folder, "fp8", **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if options["tree"] != "off":
                assert _num_fast(llm.engine) > 3
        return [list(output.outputs[0].token_ids) for output in outputs]

    assert generated(drafters=[drafter], tree="1,1,1") == generated(tree="off")


def test_a_streamed_target(model_folder: Folders, tmp_path: Path) -> None:
    folder, params = model_folder(tokenizer=True), SamplingParams(max_tokens=20, temperature=0.0)
    texts = []
    for options in ({}, {"offload": "disk", "memory_budget": "4GiB", "kv_cache_memory_bytes": "1M"}):
        with _llm(folder, "fp8", **options) as llm:
            assert {pool.dtype for pool in llm.target.tensors.keys} == {E4M3}
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]


# ------------------------------------------------------------------------------------- scales of checkpoints


def _checkpoint(model_folder: Folders, place: Path, scales: dict[str, float | list[float]]) -> Path:
    save_quantized(model_folder(), place, "float-quantized")
    file = place / "model.safetensors"
    more = {name: torch.tensor(scale) for name, scale in scales.items()}
    save_file(load_file(file) | more, file)
    return place


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ({"self_attn.k_scale": 0.5, "self_attn.v_scale": 0.25}, (0.5, 0.25)),
        ({"self_attn.k_proj.k_scale": [0.5], "self_attn.v_proj.v_scale": [0.25]}, (0.5, 0.25)),
        ({"self_attn.attn.k_scale": 0.5, "self_attn.attn.v_scale": 0.25}, (0.5, 0.25)),
        ({"self_attn.kv_scale": 0.5}, (0.5, 0.5)),
        ({"self_attn.k_scale": 0.5}, (0.5, 0.5)),
        ({"self_attn.k_scale": -1.0, "self_attn.v_scale": 0.0}, (1.0, 1.0)),
        ({}, (1.0, 1.0)),
    ],
)
def test_scales_of_a_checkpoint_are_read(
    names: dict[str, Any], wanted: tuple[float, float], model_folder: Folders, tmp_path: Path
) -> None:
    folder = _checkpoint(model_folder, tmp_path / "m", {f"model.layers.1.{name}": one for name, one in names.items()})
    loaded = _loaded(folder, E4M3)
    assert [tuple(shape.scales) for shape in loaded.layer_shapes] == [(1.0, 1.0), wanted]
    assert ModelRunner(loaded, 8).tensors.scales[1] == wanted
    assert ModelRunner(replace(loaded, kv_dtype=None), 8).tensors.scales[1] == (1.0, 1.0)


@pytest.mark.parametrize("is_native", [True, False])
def test_scales_keep_large_keys_and_values(is_native: bool, model_folder: Folders, tmp_path: Path) -> None:
    """Without them, what is above 448 is cut off; with them only the step between numbers changes."""
    place = tmp_path / "large"
    save_quantized(model_folder(), tmp_path / "m", "float-quantized")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    for layer in range(2):  # values 4096 times as large, and outputs that undo it
        for name, factor in (("v_proj", 4096.0), ("o_proj", 1 / 4096)):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight_scale"] *= factor
    place.mkdir()
    (place / "config.json").write_text((tmp_path / "m" / "config.json").read_text())
    logits = []
    for scale in (0.0, 64.0):
        of_layers = {f"model.layers.{i}.self_attn.v_scale": torch.tensor(scale) for i in range(2)}
        keys = {f"model.layers.{i}.self_attn.k_scale": torch.tensor(1.0) for i in range(2)}
        save_file(tensors | (of_layers | keys if scale else {}), place / "model.safetensors")
        for kv_dtype in (None, E4M3):
            loaded = _loaded(place, kv_dtype, native=is_native)
            runner = ModelRunner(loaded, 64)
            slots = torch.arange(len(PROMPTS[1])).numpy()
            piece = Piece.from_span(PROMPTS[1], None, NO_SLOTS, slots)
            logits.append(_logits(loaded, [[replace(piece, num_logits=8)]], runner.tensors))
    exact, cut, _, scaled = logits
    assert torch.equal(exact, logits[2])
    errors = [float((one - exact).norm() / exact.norm()) for one in (cut, scaled)]
    assert errors[1] < 0.1 < errors[0]


def test_scales_that_are_not_one_number_for_a_layer_are_refused(model_folder: Folders, tmp_path: Path) -> None:
    folder = _checkpoint(model_folder, tmp_path / "m", {"model.layers.0.self_attn.k_scale": [0.5, 0.25]})
    with pytest.raises(ModelError, match=r"self_attn.k_scale has 2 numbers"):
        _loaded(folder, E4M3)
