"""Experts that `specinfer quantize` writes: codes by vLLM's names, read back as they are, and calibrated."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specinfer import LLM, ModelError, SamplingParams
from specinfer.model.definition import load_plain
from specinfer.model.load import load_model
from specinfer.model.quantized_experts import QuantizedExperts, split_experts
from specinfer.model.runner import ModelRunner
from specinfer.ops.cpu.panels import TYPES
from specinfer.ops.quantization import BITS, dequantize, quantize
from specinfer.quantize.calibration import decoder_layers
from specinfer.quantize.checkpoint import QuantizeReport, write_quantized
from specinfer.quantize.gptq import round_layers
from specinfer.quantize.layers import Layers
from specinfer.quantize.options import QuantizeConfig
from tiny import VOCAB, logits, random_prompts, save_model, save_tokenizer

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 64}
# Each expert for itself, by other names, without gates, and stacks: transposed, and by other names.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64}, "mixtral": {}, "nemotron_h": {"moe_intermediate_size": 64},
    "lfm2_moe": {"moe_intermediate_size": 64}, "gemma4_text-moe": {"moe_intermediate_size": 64}, "granitemoe": {},
    "gpt_oss": {},
}  # fmt: skip
NAMES = {"mixtral": "w1 w2 w3", "lfm2_moe": "w1 w2 w3", "granitemoe": "w1 w2 w3", "nemotron_h": "down_proj up_proj"}


def write(source: Path, out: Path, to: str = "int4", **options: Any) -> QuantizeReport:
    config = QuantizeConfig(model=str(source), to=to, out=out, **options)
    return write_quantized(config)


def rounded(folder: Path, to: str) -> Any:
    """The definition with split experts, and the numbers of its rounded layers."""
    model = split(folder)
    for place in Layers.from_folder(folder, BITS[to]).places.values():
        linear = model.get_submodule(place.linear)
        linear.weight.copy_(dequantize(quantize(linear.weight, BITS[to])))
    return model


def split(folder: Path) -> Any:
    model = load_plain(folder, torch.float32).eval().requires_grad_(False)
    split_experts(model)
    return model


@pytest.mark.parametrize("to", BITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_experts_are_layers_of_their_own(family: str, to: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", family, **WIDE, **FAMILIES[family], torch_dtype="bfloat16")
    report = write(source, tmp_path / "out", to)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    experts = [name.removesuffix(".weight_packed") for name in tensors if ".experts." in name and "_packed" in name]
    names = NAMES.get(family, "down_proj gate_proj up_proj")
    assert sorted({name.rpartition(".")[2] for name in experts}) == names.split()
    assert report.num_layers == report.num_uncalibrated == sum(name.endswith("_packed") for name in tensors)
    assert not [name for name in tensors if ".experts." in name and tensors[name].ndim > 2]
    fields = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    layers = {name.removesuffix(".weight") for name, one in tensors.items() if one.ndim == 2}
    routers = {name for name in layers if name.endswith((".gate", ".router", ".router.layer", ".router.proj"))}
    assert routers
    assert routers <= set(fields["ignore"])
    assert report.num_bytes < report.num_bytes_before


@pytest.mark.parametrize("family", FAMILIES)
def test_codes_that_are_read_back_are_those_of_the_rounded_definition(family: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", family, **WIDE, **FAMILIES[family])
    write(source, tmp_path / "out")
    model, wanted = rounded(source, "int4"), split(source)
    nearest = model.state_dict()
    for name, weight in split(tmp_path / "out").state_dict().items():
        assert torch.equal(weight, nearest[name]), name
    loaded = load_model(tmp_path / "out", torch.bfloat16, CPU)
    fused = [part.experts for layer in getattr(loaded.model, "layers", ()) for part in layer.call.parts if part.experts]
    found = fused or [one for one in loaded.model.modules() if isinstance(one, QuantizedExperts)]
    theirs = [one for one in wanted.modules() if isinstance(one, QuantizedExperts)]
    assert len(found) == len(theirs) > 0
    for ours, other in zip(found, theirs, strict=True):
        assert not {call.panels.type for call in ours.calls} & set(TYPES.values())
        codes: Any = quantize(other.linears[-1].weight, 4)  # type: ignore[arg-type]
        assert torch.equal(ours.calls[-1].panels.unpack_codes().codes, codes.codes)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_compute_with_the_codes_and_generate_the_same_text_with_speculation(family: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", family, **WIDE, **FAMILIES[family])
    write(source, tmp_path / "out")
    prompts = random_prompts([24, 5], seed=3)
    exact = rounded(source, "int4")(input_ids=torch.tensor(prompts[:1])).logits[0]
    loaded = load_model(tmp_path / "out", torch.bfloat16, CPU)
    assert loaded.stored_types == "int4"
    found = logits(ModelRunner(loaded, 64), prompts[0]).float()
    assert (found - exact).std(dim=1).median() < 0.06 * exact.std()
    texts = []
    for options in ({"tree": "off"}, {"drafters": "suffix", "tree": "2,2,1"}):
        with LLM(tmp_path / "out", dtype="bfloat16", **options) as llm:  # type: ignore[arg-type]
            params = SamplingParams(temperature=0.0, max_tokens=12)
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            texts.append([one.outputs[0].token_ids for one in outputs])
    assert texts[0] == texts[1]


def test_stacks_of_a_model_of_several_files_are_written_file_by_file(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "gpt_oss", **WIDE)
    load_plain(source, torch.float32).save_pretrained(tmp_path / "parts", max_shard_size="60KB")
    write(source, tmp_path / "whole")
    write(tmp_path / "parts", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert index.keys() == whole.keys()
    for name, file in index.items():
        with safe_open(tmp_path / "out" / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), whole[name]), name


def test_matrices_without_whole_groups_stay_as_they_are_beside_those_with_codes(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "gpt_oss", hidden_size=64, intermediate_size=48)
    write(source, tmp_path / "out")
    stored, tensors = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    first = "model.layers.1.mlp.experts"
    assert torch.equal(tensors[f"{first}.2.down_proj.weight"], stored[f"{first}.down_proj"][2].T)
    assert torch.equal(tensors[f"{first}.2.up_proj.bias"], stored[f"{first}.gate_up_proj_bias"][2, 1::2])
    fields = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert f"{first}.3.down_proj" in fields["ignore"]
    ids = torch.tensor(random_prompts([24], seed=3))
    found = logits(ModelRunner(load_model(tmp_path / "out", torch.bfloat16, CPU), 64), ids[0].tolist()).float()
    exact = rounded(source, "int4")(input_ids=ids).logits[0]
    assert (found - exact).std(dim=1).median() < 0.06 * exact.std()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_experts_are_calibrated_with_the_tokens_that_reach_them(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = save_model(tmp_path / "source", family, noise=0.3, **WIDE, **FAMILIES[family])
    ids = torch.randint(VOCAB, (6, 40))
    places = Layers.from_folder(source, 4).places
    model, before = split(source), load_plain(source, torch.float32).eval()(ids).logits.detach()
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)
    linears = {place.linear: None for place in places.values()}
    found, unseen = round_layers(model, decoder_layers(source, model), list(linears), ids.tolist(), 4, lambda _: None)
    assert found.keys() == linears.keys()
    assert unseen < {name for name in linears if "experts" in name}
    calibrated = (model(ids).logits - before).square().mean()
    assert calibrated < (rounded(source, "int4")(ids).logits - before).square().mean()


def test_experts_that_no_text_reaches_are_counted_and_calibrated_codes_written(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the rain in the other station is not on the table " * 200)
    source = save_model(tmp_path / "source", "gpt_oss", num_local_experts=64, **WIDE)
    save_tokenizer(source)
    report = write(source, tmp_path / "out", data=(str(text),), num_texts=4, text_tokens=8)
    assert 0 < report.num_uncalibrated < report.num_layers
    assert report.as_dict()["num_uncalibrated_layers"] == report.num_uncalibrated
    assert report.perplexity == pytest.approx(report.perplexity_before, rel=0.2)
    nearest, found = rounded(source, "int4").state_dict(), split(tmp_path / "out").state_dict()
    same = [
        torch.equal(found[name], weight) for name, weight in nearest.items() if ".linears." in name and weight.ndim > 1
    ]
    assert 0 < sum(same) < len(same)


def test_experts_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "mixtral", **WIDE)
    write(source, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    whole, expert = load_file(file), "model.layers.1.block_sparse_moe.experts"
    ends = ("weight_packed", "weight_scale", "weight_shape")
    for change in (
        lambda: {name: one for name, one in whole.items() if not name.startswith(f"{expert}.2.w1")},
        lambda: {name: one for name, one in whole.items() if not name.startswith(f"{expert}.2.")},
        lambda: whole | {f"{expert}.99999999999.w1.{end}": whole[f"{expert}.1.w1.{end}"] for end in ends},
        lambda: {name: one[:32] if f"{expert}.2.w3.weight_p" in name else one for name, one in whole.items()},
    ):
        save_file({name: one.clone(memory_format=torch.contiguous_format) for name, one in change().items()}, file)
        with pytest.raises(ModelError, match=r"block_sparse_moe\.experts.*fetch the model again"):
            load_model(tmp_path / "out", torch.bfloat16, CPU)


def test_stacks_of_unknown_structure_stay_and_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = save_model(tmp_path / "source", "llama4_text", **WIDE)
    write(source, tmp_path / "out")
    assert (
        "stacked matrices stay as they are: model.layers.0.feed_forward.experts.down_proj and 3 others" in caplog.text
    )
    stored, tensors = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    name = "model.layers.1.feed_forward.experts.gate_up_proj"
    assert torch.equal(tensors[name], stored[name])


def test_stacks_of_another_shape_than_the_configuration_says_are_refused(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "gpt_oss", **WIDE)
    file = source / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.experts.gate_up_proj"
    save_file(tensors | {name: tensors[name][:, :, :-1].contiguous()}, file)
    message = (
        r"gate_up_proj has the shape \[4, 64, 127\], and config.json asks for \[4, 64, 128\]; fetch the model again"
    )
    with pytest.raises(ModelError, match=message):
        write(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
