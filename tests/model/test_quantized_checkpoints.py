"""Quantized safetensors: decoded weights, the same texts with and without speculation, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import reference
from pair_heads import save_mtp
from quantized_files import FORMATS, awq, gptq, save_gpt_oss, save_quantized
from specinfer import LLM, SamplingParams
from specinfer.core.errors import ModelError
from specinfer.model.definition import load_plain
from specinfer.model.load import load_model
from specinfer.model.offload.shards import Shards
from specinfer.model.quantized.formats import find_formats
from specinfer.model.quantized_experts import QuantizedExperts
from specinfer.model.runner import ModelRunner
from specinfer.ops.cpu.panels import TYPES
from specinfer.ops.quantization import dequantize, quantize
from tiny import logits, random_prompts, save_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = random_prompts([5, 20, 3])
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("source"), hidden_size=64, intermediate_size=96)


def _texts(folder: Path, **options: object) -> list[list[int]]:
    with LLM(folder, **{"dtype": "float32", **options}) as llm:  # type: ignore[arg-type]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs]


@pytest.mark.parametrize("name", FORMATS)
def test_decoded_weights_are_those_of_the_format(name: str, source: Path, tmp_path: Path) -> None:
    plain = load_file(save_quantized(source, tmp_path / "quantized", name) / "model.safetensors")
    with Shards(tmp_path / "quantized", torch.float32) as shards:
        assert set(shards.sources) == set(plain)
        for key, weight in plain.items():
            torch.testing.assert_close(shards.sources[key].read(), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_text_is_that_of_the_decoded_model(name: str, source: Path, tmp_path: Path) -> None:
    model = load_plain(save_quantized(source, tmp_path / "quantized", name), torch.float32)
    wanted = [reference.greedy(model, prompt, 12) for prompt in PROMPTS]
    assert _texts(tmp_path / "quantized", drafters="suffix", tree="2,1,1") == wanted


@pytest.mark.parametrize("name", ["pack-quantized", "GPTQ", "AWQ"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_decoded_is_not_rounded_again_and_layers_left_whole_stay_whole(
    name: str, dtype: torch.dtype, source: Path, tmp_path: Path
) -> None:
    whole = ("lm_head.weight", "model.layers.1.mlp.down_proj.weight")
    plain = load_file(save_quantized(source, tmp_path / "quantized", name, whole=whole) / "model.safetensors")
    loaded = load_model(tmp_path / "quantized", dtype, CPU, native=False)
    assert (loaded.quantization, loaded.stored_types) == (None, None)
    weights = loaded.model.state_dict()
    for key, weight in plain.items():
        torch.testing.assert_close(weights[key], weight.to(dtype), rtol=0, atol=0)
    streamed = _texts(tmp_path / "quantized", tree="off", offload="disk", offload_folder=tmp_path / "packed")
    assert streamed == _texts(tmp_path / "quantized-plain", tree="off")


# Formats whose codes the native kernels take, and the bits that they are computed with.
KEPT = {"pack-quantized": 4, "pack-quantized of 8 bits": 8, "pack-quantized, asymmetric": 4, "int-quantized": 8,
        "pack-quantized of 2 bits": 4, "GPTQ of 2 bits": 4, "GPTQ": 4, "GPTQ v2 of 8 bits": 8, "AWQ": 4,
        "auto-round": 4, "auto-round, asymmetric": 4, "MXFP4": 4, "NVFP4": 4, "float-quantized": 8,
        "FP8 of 128": 8, "FP8 of tensors": 8, "FP8 of rows": 8}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_format(name: str, source: Path, tmp_path: Path) -> None:
    plain = load_file(save_quantized(source, tmp_path / "quantized", name) / "model.safetensors")
    with Shards(tmp_path / "quantized", None) as shards:
        kept = {key for key, source in shards.sources.items() if source.has_codes}
        assert bool(kept) == (name in KEPT)
        for key in kept:
            _, weight = shards.sources[key].codes()
            assert weight.bits == KEPT[name]
            torch.testing.assert_close(dequantize(weight), plain[key], rtol=1e-6, atol=0)
        assert all("_proj" in key for key in kept)


@pytest.mark.parametrize(("name", "encode"), [("AWQ", awq), ("GPTQ", gptq)])
@pytest.mark.parametrize("size", [64, 96, 128])
def test_a_scale_of_many_inputs_is_that_of_each_group_of_the_kernels(name: str, encode: Any, size: int) -> None:
    stored, plain = encode(torch.randn((40, 384), generator=torch.Generator().manual_seed(size)), size=size)
    (found,) = find_formats(FORMATS[name][0] | {"group_size": size})
    assert found.keeps(stored, (40, 384))
    torch.testing.assert_close(dequantize(found.quantized(stored)), plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", KEPT)
def test_models_compute_with_the_codes_of_the_format(name: str, source: Path, tmp_path: Path) -> None:
    plain, folder = save_quantized(source, tmp_path / "quantized", name), tmp_path / "quantized"
    exact = load_plain(plain, torch.float32).eval()(torch.tensor([PROMPTS[1]])).logits[0].detach()
    loaded = load_model(folder, torch.bfloat16, CPU)
    assert loaded.compute_path == "native fused layers"
    kinds = {"MXFP4": "MXFP4", "NVFP4": "NVFP4", "float-quantized": "FP8"}
    kind = "FP8" if name.startswith("FP8") else kinds.get(name, f"int{2 if '2 bits' in name else KEPT[name]}")
    assert (loaded.quantization, loaded.weights_type) == (None, kind)
    found = logits(ModelRunner(loaded, 64), PROMPTS[1]).float()
    assert (found - exact).std(dim=1).median() < 0.05 * exact.std()
    if name in ("pack-quantized", "AWQ", "NVFP4", "FP8 of 128", "FP8 of tensors"):
        texts = [_texts(folder, dtype="bfloat16", drafters=["suffix"], tree=tree) for tree in ("off", "2,2,1")]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("family", "name", "drafter"),
    [
        ("qwen3_5_text", "AWQ", "self:int4"),
        ("falcon_h1", "pack-quantized", "self:int8"),
        ("lfm2", "FP8 of 128", "suffix"),
    ],
)
def test_layers_without_attention_compute_with_codes(family: str, name: str, drafter: str, tmp_path: Path) -> None:
    """Their projections do; convolutions and the parameters of recurrences stay as they are."""
    sizes = {
        "qwen3_5_text": {"linear_value_head_dim": 8, "linear_num_value_heads": 8, "linear_num_key_heads": 4},
        "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    }
    wide = {"hidden_size": 64, "intermediate_size": 64} | sizes.get(family, {})
    source = save_model(tmp_path / "source", family, **wide)
    plain, folder = save_quantized(source, tmp_path / "quantized", name), tmp_path / "quantized"
    exact = load_plain(plain, torch.float32).eval()(torch.tensor([PROMPTS[1]])).logits[0].detach()
    loaded = load_model(folder, torch.bfloat16, CPU)
    kind = "FP8" if name.startswith("FP8") else "int4"
    assert (loaded.compute_path, loaded.stored_types) == ("native fused layers", kind)
    found = logits(ModelRunner(loaded, 64), PROMPTS[1]).float()
    assert (found - exact).std(dim=1).median() < 0.05 * exact.std()
    plain_texts = _texts(folder, dtype="bfloat16", tree="off")
    assert _texts(folder, dtype="bfloat16", drafters=drafter, tree="2,2,1") == plain_texts


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "AWQ"), ("qwen3_moe", "FP8 of 128"), ("mixtral", "AWQ"), ("lfm2_moe", "GPTQ"),
        ("nemotron_h", "pack-quantized"), ("minimax_m2", "FP8 of 128"), ("olmoe", "AWQ"),
    ],
)  # fmt: skip
def test_experts_compute_with_their_codes(family: str, name: str, tmp_path: Path) -> None:
    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size"), 32)
    source = save_model(tmp_path / "source", family, hidden_size=64, **sizes)
    plain, folder = save_quantized(source, tmp_path / "quantized", name), tmp_path / "quantized"
    exact = load_plain(plain, torch.float32).eval()(torch.tensor([PROMPTS[1]])).logits[0].detach()
    loaded = load_model(folder, torch.bfloat16, CPU)
    kind = "FP8" if "FP8" in name else "int4"
    assert (loaded.compute_path, loaded.stored_types) == ("native fused layers", kind)
    parts = [part for layer in loaded.model.layers for part in layer.call.parts if part.experts is not None]
    assert parts
    assert not {call.panels.type for part in parts for call in part.experts.calls} & set(TYPES.values())
    found = logits(ModelRunner(loaded, 64), PROMPTS[1]).float()
    assert (found - exact).std(dim=1).median() < 0.1 * exact.std()


def test_experts_of_gpt_oss_are_read_from_their_codes_as_transformers_reads_them(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "gpt_oss", hidden_size=64, intermediate_size=96)
    plain, folder = save_gpt_oss(source, tmp_path / "quantized"), tmp_path / "quantized"
    numbers = load_file(plain / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    with Shards(folder, torch.bfloat16) as shards:
        for name in [name for name in numbers if ".experts." in name]:
            assert torch.equal(shards.sources[name].read(), numbers[name])
            if not name.endswith("_bias"):
                theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
                assert torch.equal(theirs, numbers[name])
    exact = load_plain(plain, torch.float32).eval()(torch.tensor([PROMPTS[1]])).logits[0].detach()
    loaded = load_model(folder, torch.bfloat16, CPU)
    assert (loaded.compute_path, loaded.stored_types) == ("native linear layers", "MXFP4")
    assert any(isinstance(module, QuantizedExperts) for module in loaded.model.modules())
    found = logits(ModelRunner(loaded, 64), PROMPTS[1]).float()
    assert (found - exact).std(dim=1).median() < 0.1 * exact.std()
    texts = [_texts(folder, dtype="bfloat16", drafters=["suffix"], tree=tree) for tree in ("off", "2,2,1")]
    assert texts[0] == texts[1]
    assert _texts(folder) == _texts(plain)
    tensors = {name: one for name, one in stored.items() if not name.endswith("1.mlp.experts.down_proj_scales")}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"1\.mlp\.experts\.down_proj_scales is missing; fetch the model again"):
        LLM(folder)


def test_rounded_weights_are_rounded_to_themselves() -> None:
    torch.manual_seed(1)
    codes = torch.randint(-8, 8, (64, 96)).float()
    for limit in (8, 7, 5, 3, 1):
        scales = torch.rand(64, 3).bfloat16().float() + 2**-6
        scales = scales.bfloat16().float()
        weight = codes.clamp(-limit, min(limit, 7)) * scales.repeat_interleave(32, 1)
        torch.testing.assert_close(dequantize(quantize(weight, 4)), weight, rtol=0, atol=0)
        # Stored in bfloat16, scales may be off by their last bit, and no code is.
        torch.testing.assert_close(dequantize(quantize(weight.bfloat16(), 4)), weight, rtol=2**-7, atol=0)


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3"])
def test_mtp_layers_of_a_quantized_checkpoint_draft(family: str, tmp_path: Path) -> None:
    save_mtp(tmp_path / "whole", family)
    save_quantized(tmp_path / "whole", tmp_path / "quantized", "FP8")
    assert _texts(tmp_path / "quantized", drafters="mtp", tree="2,1") == _texts(tmp_path / "quantized", tree="off")


def test_quantized_checkpoints_are_streamed_and_draft(source: Path, tmp_path: Path) -> None:
    save_quantized(source, tmp_path / "quantized", "AWQ")
    alone = _texts(tmp_path / "quantized", tree="off")
    streamed = _texts(tmp_path / "quantized", drafters="ngram", offload="disk", offload_folder=tmp_path / "packed")
    drafted = _texts(tmp_path / "quantized", drafters=str(tmp_path / "quantized"), tree="1,1")
    assert alone == streamed == drafted


@pytest.mark.parametrize(
    ("changes", "drop", "message"),
    [
        ({"quant_method": "quark"}, "", "quantized already \\(quark\\)"),
        ({"bits": 3}, "", "quantized already \\(GPTQ\\)"),
        ({"bits": 0}, "", "quantized already \\(GPTQ\\)"),
        ({"bits": 16}, "", "quantized already \\(GPTQ\\)"),
        ({"bits": "many"}, "", "quantized already \\(GPTQ\\)"),
        ({}, "scales", "tensor model.layers.0.* is missing"),
        ({"group_size": 16}, "g_idx", "do not fit each other|give "),
        ({"group_size": 0}, "g_idx", "do not fit each other"),
    ],
    ids=repr,
)
def test_what_cannot_be_decoded_is_refused_by_name(
    changes: dict[str, object], drop: str, message: str, source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "quantized"
    save_quantized(source, folder, "GPTQ")
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: one for name, one in tensors.items() if not drop or not name.endswith(drop)},
        folder / "model.safetensors",
    )
    with pytest.raises(ModelError, match=message):
        LLM(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [1, 2]}, "its shape is \\(1, 2\\), which is not that of its codes"),
        ({"shape": [[], {}]}, "have shapes that no weight has"),
        ({"blocksize": 128}, "do not fit each other: .* scales for .* weights, 128 each"),
        ({"blocksize": 0}, "do not fit each other"),
        ({"nested_blocksize": None}, "do not fit each other"),
        (None, "have shapes that no weight has"),
    ],
    ids=repr,
)
def test_a_state_of_bitsandbytes_that_does_not_fit_is_refused(
    changes: dict[str, Any] | None, message: str, source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "quantized"
    save_quantized(source, folder, "bitsandbytes nf4, nested")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("bitsandbytes__nf4"):
            state = json.loads(bytes(tensor.tolist())) | (changes or {})
            text = "{" if changes is None else json.dumps(state)
            tensors[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        LLM(folder)
