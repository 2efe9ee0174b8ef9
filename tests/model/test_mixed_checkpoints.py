"""Checkpoints whose layers are quantized in several ways: bits, groups and formats by module."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantized_files import (
    FORMATS,
    Encoder,
    awq,
    float_quantized,
    fp4,
    gptq,
    int_quantized,
    pack_quantized,
    save_mixed,
    without_order,
)
from specinfer import LLM, SamplingParams
from specinfer.core.errors import ModelError
from specinfer.model.definition import load_plain
from specinfer.model.load import load_model
from specinfer.model.offload.shards import Shards
from specinfer.model.runner import ModelRunner
from specinfer.ops.quantization import dequantize
from tiny import logits, random_prompts, save_model

CPU = torch.device("cpu")
PROMPTS = random_prompts([5, 20, 3])
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
# The first pattern that a weight's name has gives its encoder.
Mix = tuple[dict[str, Any], dict[str, Encoder | None]]


def _group(form: str | None, targets: list[str], **weights: Any) -> dict[str, Any]:
    fields = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    return {"targets": targets, "weights": fields, "input_activations": None} | ({"format": form} if form else {})


def _compressed(form: str, *groups: dict[str, Any]) -> dict[str, Any]:
    numbered = {f"group_{i}": one for i, one in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": numbered, "ignore": ["lm_head"]}


def _gptq_of(bits: int, size: int, **options: Any) -> Encoder:
    return lambda w: gptq(w, bits, size, **options)


_ROUNDED = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
MIXES: dict[str, Mix] = {
    "bits of compressed-tensors": (
        _compressed(
            "pack-quantized", _group(None, ["Linear"]), _group(None, ["re:.*down_proj"], num_bits=8),
            {"targets": ["re:.*self_attn$"], "weights": None, "input_activations": None},
        ),
        {"down_proj": lambda w: pack_quantized(w, 8), "": pack_quantized},
    ),
    "groups of compressed-tensors": (
        _compressed(
            "pack-quantized", _group(None, ["Linear"]), _group(None, ["re:.*q_proj"], group_size=64),
            _group(None, ["re:.*up_proj"], strategy="channel", num_bits=8, symmetric=False),
        ),
        {
            "q_proj": lambda w: pack_quantized(w, 4, 64),
            "up_proj": lambda w: pack_quantized(w, 8, w.shape[1], symmetric=False),
            "": pack_quantized,
        },
    ),
    "formats of compressed-tensors": (
        _compressed(
            "mixed-precision",
            _group("nvfp4-pack-quantized", ["re:.*[qkv]_proj"], type="float", strategy="tensor_group", group_size=16),
            _group("mxfp4-pack-quantized", ["re:.*o_proj"], type="float"),
            _group("float-quantized", ["re:.*gate_proj"], type="float", num_bits=8, strategy="tensor"),
            _group("int-quantized", ["re:.*up_proj"], num_bits=8, strategy="channel"),
            _group("pack-quantized", ["re:.*down_proj"]),
        ),
        {
            "[qkv]_proj": lambda w: fp4(w, 16, is_nv=True), "o_proj": lambda w: fp4(w, 32, is_nv=False),
            "gate_proj": float_quantized, "up_proj": int_quantized, r"0.*down_proj": None, "": pack_quantized,
        },
    ),
    "rules of GPTQ": (
        FORMATS["GPTQ"][0] | {
            "dynamic": {
                "-:.*k_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": -1}, r".*\.1\..*o_proj": {"bits": 2},
                "+:.*up_proj": {"group_size": 64, "desc_act": True},
            },
        },
        {
            "k_proj": None, "down_proj": _gptq_of(8, 96), r"\.1\..*o_proj": _gptq_of(2, 32),
            "up_proj": _gptq_of(4, 64, act_order=True), "": _gptq_of(4, 32),
        },
    ),
    "rules of AWQ": (
        FORMATS["AWQ"][0] | {"dynamic": {"+:.*up_proj": {"group_size": 64}}, "modules_to_not_convert": ["o_proj"]},
        {"up_proj": lambda w: awq(w, 64), "o_proj": None, "": awq},
    ),
    "layers of auto-round": (
        _ROUNDED | {
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {
                "model.layers.0.mlp.down_proj": {"bits": 8}, ".*o_proj.*": {"bits": 16, "data_type": "float"},
                "model.layers.1.mlp.up_proj": {"bits": 2, "group_size": 64, "sym": False},
            },
        },
        {
            r"\.0\..*down_proj": lambda w: without_order(gptq(w, 8)), "o_proj": None,
            r"\.1\..*up_proj": lambda w: without_order(gptq(w, 2, 64, symmetric=False)),
            "": lambda w: without_order(gptq(w)),
        },
    ),
    "layers of auto-round, packed as AWQ": (
        _ROUNDED | {"packing_format": "auto_round:auto_awq", "extra_config": {".*up_proj.*": {"group_size": 64}}},
        {"up_proj": lambda w: awq(w, 64), "": awq},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("source"), hidden_size=64, intermediate_size=96)


def save(source: Path, folder: Path, mix: str) -> Path:
    settings, encoders = MIXES[mix]

    def encoder_of(key: str) -> Encoder | None:
        return next(one for at, one in encoders.items() if re.search(at, key))

    return save_mixed(source, folder, settings, encoder_of)


def _texts(folder: Path, **options: Any) -> list[list[int]]:
    with LLM(folder, **{"dtype": "bfloat16", **options}) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs]


@pytest.mark.parametrize("mix", MIXES)
def test_each_layer_is_read_in_its_own_format(mix: str, source: Path, tmp_path: Path) -> None:
    plain = load_file(save(source, tmp_path / "m", mix) / "model.safetensors")
    with Shards(tmp_path / "m", torch.float32) as shards:
        assert set(shards.sources) == set(plain)
        num_kept = 0
        for key, weight in plain.items():
            own: Any = shards.sources[key]
            torch.testing.assert_close(own.read(), weight, rtol=1e-6, atol=0)
            if own.has_codes:
                torch.testing.assert_close(dequantize(own.codes()[1]), weight, rtol=1e-6, atol=0)
                num_kept += 1
        assert num_kept > 6


@pytest.mark.parametrize("mix", MIXES)
def test_models_compute_with_the_codes_of_each_layer(mix: str, source: Path, tmp_path: Path) -> None:
    """With trees as without, and whether layers are in memory or not."""
    plain, folder = save(source, tmp_path / "m", mix), tmp_path / "m"
    exact = load_plain(plain, torch.float32).eval()(torch.tensor([PROMPTS[1]])).logits[0].detach()
    loaded = load_model(folder, torch.bfloat16, CPU)
    assert loaded.stored_types is not None
    assert loaded.compute_path.startswith("native")
    found = logits(ModelRunner(loaded, 64), PROMPTS[1]).float()
    assert (found - exact).std(dim=1).median() < 0.05 * exact.std()
    alone = _texts(folder, tree="off")
    assert _texts(folder, drafters=["suffix"], tree="2,2,1") == alone
    assert _texts(folder, tree="off", offload="disk", offload_folder=tmp_path / "copy") == alone
    assert _texts(folder, tree="off", dtype="float32") == _texts(plain, tree="off", dtype="float32")


def test_experts_may_be_stored_in_several_formats(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "qwen3_moe", hidden_size=64, moe_intermediate_size=32)
    settings = FORMATS["GPTQ"][0] | {"dynamic": {"+:.*down_proj": {"bits": 8}, "-:.*experts.1.": {}}}
    encoders: Callable[[str], Encoder | None] = lambda key: (  # noqa: E731
        None if ".experts.1." in key else _gptq_of(8 if "down_proj" in key else 4, 32)
    )
    plain = save_mixed(source, tmp_path / "m", settings, encoders)
    exact = load_plain(plain, torch.float32).eval()(torch.tensor([PROMPTS[1]])).logits[0].detach()
    loaded = load_model(tmp_path / "m", torch.bfloat16, CPU)
    assert loaded.stored_types == "int4, int8"
    found = logits(ModelRunner(loaded, 64), PROMPTS[1]).float()
    assert (found - exact).std(dim=1).median() < 0.1 * exact.std()
    assert _texts(tmp_path / "m", drafters=["suffix"], tree="2,2,1") == _texts(tmp_path / "m", tree="off")


@pytest.mark.parametrize("dynamic", [{"+:.*up_proj": {"bits": 8}}, {"+:.*up_proj": {"group_size": 16}}])
def test_tensors_of_no_listed_format_are_refused_by_name(dynamic: Any, source: Path, tmp_path: Path) -> None:
    settings = FORMATS["GPTQ"][0] | {"dynamic": dynamic}
    save_mixed(source, tmp_path / "m", settings, lambda key: _gptq_of(2 if "0.mlp.up_proj" in key else 4, 32))
    with pytest.raises(ModelError, match=r"the tensors of model\.layers\.0\.mlp\.up_proj have the sizes of none, or"):
        LLM(tmp_path / "m")


def test_sizes_that_several_formats_have_are_refused_by_name(source: Path, tmp_path: Path) -> None:
    """Of 96 inputs there are two groups whether 48 or 64 share a scale."""
    settings = FORMATS["GPTQ"][0] | {"group_size": 48, "dynamic": {"+:.*down_proj": {"group_size": 64}}}
    save_mixed(source, tmp_path / "m", settings, lambda key: _gptq_of(4, 48) if "down_proj" in key else None)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.down_proj have the sizes of none, or of several"):
        LLM(tmp_path / "m")


def test_a_tensor_that_a_layer_of_several_formats_lacks_is_named(source: Path, tmp_path: Path) -> None:
    save(source, tmp_path / "m", "formats of compressed-tensors")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight_shape"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.weight_\w+ is missing; fetch"):
        LLM(tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    fields = json.loads(config.read_text())
    fields["quantization_config"]["config_groups"]["group_4"]["format"] = "marlin-24"
    config.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=r"quantized already .*format 'marlin-24'.*; use the original one"):
        LLM(tmp_path / "m")
