"""Grown models: the same function, dense, at the size asked for."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

import heads
from benchmarks.comparisons import (
    GrownLatencyConfig,
    GrownServeConfig,
    GrownThroughputConfig,
    run_grown_latency,
    run_grown_serve,
    run_grown_throughput,
)
from benchmarks.growth import shard_writer
from benchmarks.growth.heads import grow_head, grown_parameters, head_shape
from benchmarks.growth.models import plan_growth
from benchmarks.growth.targets import grow_folder
from heads import save_block, save_eagle3
from specinfer import LLM, SamplingParams
from specinfer.bench.latency import run_latency
from specinfer.bench.models import find_models
from specinfer.bench.options import LatencyConfig
from specinfer.core.request import Request, Span
from specinfer.core.tree import TreeBudget
from specinfer.model.definition import load_config
from specinfer.planning.growth_shape import Shape, shape_for, shape_of
from tiny import paths_of, random_prompts, save_model

OLD = Shape(hidden_size=24, num_layers=2, num_heads=3, num_kv_heads=1, intermediate_size=40)
VOCAB_SIZE = 61

TARGET_CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=384,
    num_hidden_layers=12,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=1152,
    head_dim=64,
    tie_word_embeddings=True,
)
DRAFTER_CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=192,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    intermediate_size=384,
    head_dim=64,
    tie_word_embeddings=True,
)

# Each grows one size or several: (name, shape).
GROWTHS = [
    ("same", OLD),
    ("width_multiple", replace(OLD, hidden_size=96)),
    ("width_no_multiple", replace(OLD, hidden_size=33)),
    ("mlp", replace(OLD, intermediate_size=57)),
    ("group", replace(OLD, hidden_size=30, num_heads=5)),
    ("kv_heads", replace(OLD, hidden_size=36, num_heads=9, num_kv_heads=3)),
    ("kv_heads_and_group", replace(OLD, hidden_size=40, num_heads=10, num_kv_heads=2)),
    ("depth", replace(OLD, num_layers=5)),
    ("all", Shape(hidden_size=80, num_layers=7, num_heads=8, num_kv_heads=2, intermediate_size=131)),
]


def make_model(tied: bool = True, *, shape: Shape = OLD, seed: int = 0) -> LlamaForCausalLM:
    """A random model with weights large enough to make attention and the norms matter."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-2,  # large, so that a wrong epsilon shows
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return model


def grow(
    model: LlamaForCausalLM, shape: Shape, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """Grow a model in a folder, and load it."""
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(Path(place) / "small")
        folder = grow_folder(Path(place) / "small", Path(place) / "big", shape, seed=seed, dtype=dtype)
        return LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def logits_of(model: LlamaForCausalLM, batch: int = 3, length: int = 17) -> torch.Tensor:  # [b, n, vocab]
    input_ids = torch.randint(VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(1))
    return model(input_ids=input_ids).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [shape for _, shape in GROWTHS], ids=[name for name, _ in GROWTHS])
def test_logits_are_the_same(shape: Shape, tied: bool) -> None:
    model = make_model(tied)
    grown = grow(model, shape)
    torch.testing.assert_close(logits_of(grown), logits_of(model), rtol=1e-4, atol=1e-4)
    assert shape_of(grown.config) == shape
    assert (grown.lm_head.weight is grown.model.embed_tokens.weight) == tied
    assert sum(p.numel() for p in grown.parameters()) == shape.num_parameters(VOCAB_SIZE, 8, tied)


def test_group_of_several_kv_heads_keeps_its_queries() -> None:
    small = Shape(hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, intermediate_size=16)
    model = make_model(shape=small)
    grown = grow(model, replace(small, hidden_size=72, num_heads=9, num_kv_heads=3))
    torch.testing.assert_close(logits_of(grown), logits_of(model), rtol=1e-4, atol=1e-4)


def test_greedy_tokens_are_the_same() -> None:
    model = make_model()
    grown = grow(model, GROWTHS[-1][1])
    prompt = torch.tensor([[5, 9, 2, 40]])
    outputs = [
        m.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=30)
        for m in (model, grown)
    ]
    assert outputs[0].shape == (1, 34)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_and_near(dtype: torch.dtype) -> None:
    model = make_model()
    grown = grow(model, GROWTHS[-1][1], dtype=dtype)
    assert {p.dtype for p in grown.parameters()} == {dtype}
    assert grown.model.rotary_emb.inv_freq.dtype == torch.float32
    exact = logits_of(model)
    own_error = (logits_of(make_model().to(dtype)) - exact).square().mean().sqrt()
    error = (logits_of(grown) - exact).square().mean().sqrt()
    assert error < 2 * own_error


def test_added_weights_are_dense() -> None:
    shape = GROWTHS[-1][1]
    grown = grow(make_model(tied=False), shape)
    for name, weight in grown.named_parameters():
        if not any(part in name for part in ("embed_tokens", "o_proj", "down_proj")):
            assert (weight != 0).float().mean() > 0.99, name
            assert weight.abs().max() < 3.0, name
        # What writes to the residual leaves the added dimensions at zero.
    for layer in grown.model.layers:
        assert not layer.self_attn.o_proj.weight[24:].any()
        assert not layer.mlp.down_proj.weight[24:].any()
        # No two rows of the filler are copies of each other.
        rows = layer.mlp.gate_proj.weight
        assert len(torch.unique(rows, dim=0)) == len(rows)


def test_old_layers_are_spread_evenly() -> None:
    grown = grow(make_model(), replace(OLD, num_layers=8))
    busy = [index for index, layer in enumerate(grown.model.layers) if layer.mlp.down_proj.weight.any()]
    assert busy == [2, 6]


def test_seed_decides_the_filler() -> None:
    shape = GROWTHS[-1][1]
    first, again, other = (
        grow(make_model(), shape, seed=seed).model.layers[0].mlp.up_proj.weight for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["22m", "50m", "100m", "300m", "1b", "1.5B", "3b", "7b", "13b", "70b"])
def test_named_shapes_of_the_target(name: str) -> None:
    check_named_shape(name, TARGET_CONFIG, shape_for(name, TARGET_CONFIG))


@pytest.mark.parametrize("name", ["2m", "5m", "10m", "30m", "100m", "300m"])
def test_named_shapes_of_a_shallow_drafter(name: str) -> None:
    shape = shape_for(name, DRAFTER_CONFIG, num_layers=2)
    assert shape.num_layers == 2
    check_named_shape(name, DRAFTER_CONFIG, shape)


def check_named_shape(name: str, config: LlamaConfig, shape: Shape) -> None:
    wanted = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1].lower()]
    assert wanted <= shape.num_parameters(2048, 64, True) <= 1.1 * wanted
    old = shape_of(config)
    assert all(getattr(shape, field) >= getattr(old, field) for field in Shape.__slots__)
    assert shape.num_heads % shape.num_kv_heads == 0
    assert shape.num_heads // shape.num_kv_heads >= 3
    assert shape.hidden_size == 64 * shape.num_heads
    assert shape.intermediate_size % 64 == 0


def test_usual_sizes_look_like_llamas() -> None:
    assert shape_for("1b", TARGET_CONFIG) == Shape(2048, 20, 32, 8, 6400)
    assert shape_for("7b", TARGET_CONFIG) == Shape(4096, 32, 64, 16, 14464)


@pytest.mark.parametrize("name", ["1q", "", "b", "1", "-1b", "0m", "1bb", "1 b"])
def test_malformed_size_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="write '300m' or '7b'"):
        shape_for(name, TARGET_CONFIG)


def test_unreachable_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"below the model's own 21\.44m parameters"):
        shape_for("10m", TARGET_CONFIG)
    with pytest.raises(ValueError, match="num_layers=4 is below the model's 12"):
        shape_for("1b", TARGET_CONFIG, num_layers=4)
    with pytest.raises(ValueError, match="cannot be met with 80 layers"):
        shape_for("30m", TARGET_CONFIG, num_layers=80)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "hidden_size=16 is below the model's 24"),
        ({"num_layers": 1}, "num_layers=1 is below"),
        ({"num_heads": 2}, "num_heads=2 is below"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 is below"),
        ({"intermediate_size": 39}, "intermediate_size=39 is below"),
        ({"num_heads": 8, "num_kv_heads": 3}, "num_heads=8 is not a multiple of num_kv_heads=3"),
        ({"num_heads": 5}, "hidden_size=24 is not a multiple of num_heads=5"),
        ({"num_heads": 6, "num_kv_heads": 3}, "give at most 2 KV heads"),
    ],
)
def test_shape_that_does_not_contain_the_model_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grow(make_model(), replace(OLD, **changes))


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=40,
    )
    with pytest.raises(ValueError, match="model_type is 'mistral'"):
        shape_for("1b", config)
    config.save_pretrained(tmp_path / "mistral")
    with pytest.raises(ValueError, match="holds model_type 'mistral'"):
        grow_folder(tmp_path / "mistral", tmp_path / "grown", OLD, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        grow_folder(tmp_path / "absent", tmp_path / "grown", OLD, dtype=torch.float32)
    with pytest.raises(ValueError, match="attention_bias is set"):
        shape_for("1b", LlamaConfig(attention_bias=True))


def test_folder_is_grown_once_and_loads(tmp_path: Path) -> None:
    source, destination, shape = tmp_path / "small", tmp_path / "sub" / "big", GROWTHS[-1][1]
    model = make_model()
    model.save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).write_text(f'"{name}"')

    assert grow_folder(source, destination, shape, dtype=torch.float32) == destination
    loaded = LlamaForCausalLM.from_pretrained(destination)
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=1e-4, atol=1e-4)
    assert (destination / "chat_template.jinja").read_text() == '"chat_template.jinja"'
    assert (destination / "tokenizer.json").is_file()
    assert [path.name for path in destination.parent.iterdir()] == ["big"]

    written = (destination / "model.safetensors").stat().st_mtime_ns
    grow_folder(source, destination, shape, dtype=torch.float32)
    assert (destination / "model.safetensors").stat().st_mtime_ns == written

    grow_folder(source, destination, shape, dtype=torch.bfloat16)
    assert json.loads((destination / "config.json").read_text())["dtype"] == "bfloat16"
    assert [path.name for path in destination.parent.iterdir()] == ["big"]


def test_a_large_folder_comes_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, shape = tmp_path / "small", GROWTHS[-1][1]
    make_model(tied=False).save_pretrained(source)
    whole = grow_folder(source, tmp_path / "whole", shape, dtype=torch.float32)
    most = 100_000
    monkeypatch.setattr(shard_writer, "SHARD_BYTES", most)
    split = grow_folder(source, tmp_path / "split", shape, dtype=torch.float32)
    files = sorted(split.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 3
    for file in files:
        sizes = [weight.nbytes for weight in load_file(file).values()]
        assert sum(sizes) <= most or len(sizes) == 1
    wanted = load_file(whole / "model.safetensors")
    index = json.loads((split / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in wanted.values())
    loaded = LlamaForCausalLM.from_pretrained(split)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert all(torch.equal(weight, wanted[name]) for name, weight in loaded.named_parameters())


def test_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    source, destination = tmp_path / "small", tmp_path / "other"
    make_model().save_pretrained(source)
    destination.mkdir()
    (destination / "notes.txt").write_text("keep")
    for folder in (destination, source):
        with pytest.raises(ValueError, match="holds something else: remove or rename it"):
            grow_folder(source, folder, OLD, dtype=torch.float32)
    assert (destination / "notes.txt").read_text() == "keep"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle3", {}),
        ("eagle3", {"layout": "speculators", "norm_before_residual": True}),
        ("eagle3", {"fc_norm": True}),
        ("dflash", {"num_target_layers": 8, "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 5]}}),
        ("dspark", {}),
        ("dspark", {"layout": "speculators", "aux_hidden_state_layer_ids": [2, 6], "draft_ids": range(2, 90)}),
    ],
    ids=str,
)
def test_a_head_that_grew_with_its_target_drafts_the_same(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    target, head = save_model(tmp_path / "target", "llama", num_hidden_layers=8), tmp_path / "head"
    if kind == "eagle3":
        save_eagle3(head, draft_ids=range(2, 90), **options)
    else:
        save_block(head, kind, **options)
    old = shape_of(load_config(target))
    new = Shape(hidden_size=128, num_layers=11, num_heads=16, num_kv_heads=4, intermediate_size=160)
    grown = grow_folder(target, tmp_path / "grown", new, dtype=torch.float32)
    grown_head = grow_head(head, tmp_path / "grown-head", old, new, dtype=torch.float32)
    found = [_drafted(target, head), _drafted(grown, grown_head)]
    assert found[0] == found[1]
    shape = head_shape(head, old, new)
    assert shape == replace(new, num_layers=1 if kind == "eagle3" else 2)
    tensors = load_file(grown_head / "model.safetensors")
    assert sum(one.numel() for one in tensors.values()) == grown_parameters(head, shape)
    with pytest.raises(ValueError, match="below the model's 32"):
        grow_head(head, tmp_path / "other", old, replace(new, hidden_size=16), dtype=torch.float32)


def _drafted(target: Path, head: Path) -> list[list[tuple[int, ...]]]:
    """Return the paths of the trees that a head drafts along a text."""
    found = []
    with LLM(target, drafters=[str(head)], dtype="float32", tree="2,1,1") as llm:
        drafter = heads.drafter_of(llm)
        request = Request("one", list(random_prompts([12])[0]), SamplingParams(temperature=0.0, max_tokens=12), seed=0)
        llm.engine.add(request)
        llm.engine.step()
        while not request.is_finished:
            span = Span(request, request.num_computed, len(request.token_ids))
            found.append(sorted(paths_of(drafter.draft([span], [TreeBudget.expansion((2, 1, 1))])[0])))
            llm.engine.step()
    return found


def test_grown_models_are_measured_and_generate_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, drafter = (str(save_model(tmp_path / name)) for name in ("target", "drafter"))
    prompts = tuple(map(tuple, random_prompts((4, 9))))
    options: dict[str, Any] = {"model": target, "drafters": (drafter,), "device": "cpu", "prompts": prompts,
                               "warmup": 0, "trees": ("1",), "max_tokens": 8, "repeats": 1}  # fmt: skip
    small = run_latency(LatencyConfig(**options)).measured
    grown = run_grown_latency(GrownLatencyConfig(**options, grow="0.5m", dtype="float32")).measured.ours
    assert grown.environment.target_parameters >= 500_000 > small.environment.target_parameters
    assert [run.token_ids for run in grown.result.plain.runs] == [run.token_ids for run in small.result.plain.runs]
    assert getattr(grown.config, "grow", None) == "0.5m"
    together = run_grown_throughput(GrownThroughputConfig(**options, grow="0.5m", batch_sizes=(2,))).measured
    assert together.environment.dtype == "bfloat16"
    for changes, message in (
        ({"grow": "huge"}, "grow: size 'huge' is not a number"),
        ({"grow": "1m", "model": str(save_model(tmp_path / "opt", "opt"))}, "grow: model_type is 'opt'"),
    ):
        with pytest.raises(ValueError, match=message):
            run_grown_latency(GrownLatencyConfig(**options | changes))
    with pytest.raises(ValueError, match="grow: the server has its model already"):
        run_grown_serve(GrownServeConfig(base_url="http://127.0.0.1:9", grow="1b"))


def test_a_small_drafter_grows_to_a_hundredth_and_stays_shallow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    target, drafter = save_model(tmp_path / "target"), save_model(tmp_path / "drafter", **sizes)
    models = find_models(str(target), (str(drafter), "ngram"))
    plan = plan_growth(models, "5m", "float32")
    shape = plan.growths[str(drafter)].shape
    assert shape.num_layers == 1
    assert not list(tmp_path.glob("specinfer/*"))
    made = plan.make()
    assert made.drafters[1] == "ngram"
    assert 50_000 <= made.drafter_parameters[Path(made.drafters[0]).name] <= 66_000
    # Large enough already: kept as it is.
    assert str(drafter) not in plan_growth(models, "0.5m", "float32").growths
