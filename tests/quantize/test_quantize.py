"""`specinfer quantize`: what is written, how it is rounded, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from full_disk import limited_files
from specinfer.core.errors import ModelError
from specinfer.model.definition import load_plain
from specinfer.model.load import load_model
from specinfer.ops import quantization
from specinfer.ops.quantization import BITS, Bits, dequantize, quantize
from specinfer.quantize.calibration import decoder_layers
from specinfer.quantize.checkpoint import QuantizeReport, write_quantized
from specinfer.quantize.gptq import quantize_with_moments, round_layers
from specinfer.quantize.layers import Layers
from specinfer.quantize.options import FOLDER_TYPES, QuantizeConfig
from tiny import FAMILIES, VOCAB, save_model, save_tokenizer


def run(model: Path, out: Path, to: str = "int4", **options: object) -> QuantizeReport:
    config = QuantizeConfig(model=str(model), to=to, out=out, **options)  # type: ignore[arg-type]
    return write_quantized(config)


def unpacked(tensors: dict[str, Tensor], layer: str, bits: int) -> Tensor:
    """The numbers of a weight, by the words of the format's specification."""
    words = tensors[f"{layer}.weight_packed"].long() & 0xFFFFFFFF
    codes = torch.stack([words >> bits * place & (1 << bits) - 1 for place in range(32 // bits)], dim=2).flatten(1)
    scales = tensors[f"{layer}.weight_scale"].float()
    rows, columns = tensors[f"{layer}.weight_shape"].tolist()
    size = columns // scales.shape[1]
    return ((codes - (1 << bits - 1)).float() * scales.repeat_interleave(size, dim=1))[:rows, :columns]


@pytest.mark.parametrize(("to", "bits"), [("int4", 4), ("int8", 8)])
def test_weights_are_written_as_the_format_has_them(to: str, bits: int, tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", hidden_size=64, intermediate_size=128, torch_dtype="bfloat16")
    save_tokenizer(source)
    report = run(source, tmp_path / "out", to)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    layers = [name.removesuffix("_packed") for name in after if name.endswith("weight_packed")]
    assert len(layers) == report.num_layers == len([name for name in before if "_proj" in name])
    for name in layers:
        numbers = dequantize(quantize(before[name], bits))  # type: ignore[arg-type]
        torch.testing.assert_close(unpacked(after, name.removesuffix(".weight"), bits), numbers, rtol=0, atol=0)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if "_proj" not in name)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (fields["quant_method"], fields["format"], fields["ignore"]) == (
        "compressed-tensors", "pack-quantized", ["lm_head"],
    )  # fmt: skip
    assert fields["config_groups"]["group_0"]["weights"]["num_bits"] == bits
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert report.num_bytes < report.num_bytes_before


WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("family", "trunk", "sizes"),
    [
        ("nemotron_h", "backbone", WIDE),
        ("gemma3", "language_model.model", {"text_config": FAMILIES["gemma3_text"] | WIDE, "vision_config": SMALL}),
    ],
)
def test_layers_are_quantized_whatever_the_files_call_them(
    family: str, trunk: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    source = save_model(tmp_path / "model", family, **sizes, torch_dtype="bfloat16")
    report = run(source, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    layers = [
        name
        for name, weight in before.items()
        if name.startswith(trunk) and name.endswith("_proj.weight") and weight.ndim == 2 and weight.shape[1] % 32 == 0
    ]
    assert {f"{name}_packed" for name in layers} == {name for name in after if name.endswith("_packed")}
    assert report.num_layers == len(layers) > 0
    assert load_model(tmp_path / "out", torch.bfloat16, torch.device("cpu")).stored_types == "int4"


def test_a_model_of_several_files_stays_one_of_several_files(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    whole = model_folder()
    model = load_plain(whole, torch.float32)
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    run(tmp_path / "parts", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(set(index.values()))
    assert len(files) > 1
    assert {name: file for file in files for name in load_file(tmp_path / "out" / file)} == index


def test_without_correlations_weights_are_rounded_to_nearest() -> None:
    weight = torch.randn(24, 96)
    calibrated, nearest = quantize_with_moments(weight, torch.eye(96), 4), quantize(weight, 4)
    assert torch.equal(calibrated.codes, nearest.codes)
    assert torch.equal(calibrated.scales, nearest.scales)


@pytest.mark.parametrize("bits", [4, 8])
def test_calibrated_weights_change_outputs_less_than_those_rounded_to_nearest(bits: int) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(512, 40) @ torch.randn(40, 192) + 0.1 * torch.randn(512, 192)
    weight = torch.randn(64, 192)
    found = quantize_with_moments(weight, inputs.T @ inputs, bits), quantize(weight, bits)  # type: ignore[arg-type]
    calibrated, nearest = (((dequantize(one) - weight) @ inputs.T).square().mean().item() for one in found)
    assert calibrated < 0.6 * nearest


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox"])
def test_layers_of_all_kinds_are_calibrated_in_order(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = save_model(tmp_path / "model", family, noise=0.3)
    model = load_plain(source, torch.float32).eval().requires_grad_(False)
    texts = torch.randint(VOCAB, (6, 40)).tolist()
    names = list(Layers.from_folder(source, 4).places)
    layers = decoder_layers(source, model)
    ids = torch.tensor(texts)
    original = {name: model.get_submodule(name).weight.clone() for name in names}
    before = model(ids).logits
    done: list[int] = []
    found, unseen = round_layers(model, layers, names, texts, 4, done.append)
    assert done == list(range(1, len(layers) + 1))
    assert set(found) == set(names)
    assert not unseen
    calibrated = (model(ids).logits - before).square().mean()
    for name, weight in original.items():
        model.get_submodule(name).weight.copy_(dequantize(quantize(weight, 4)))
    assert calibrated < (model(ids).logits - before).square().mean()


def test_data_is_read_and_perplexity_reported(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the rain in the other station is not on the table " * 200)
    report = run(model_folder(tokenizer=True), tmp_path / "out", data=(str(text),), num_texts=8, text_tokens=32)
    assert report.perplexity is not None
    assert report.perplexity_before is not None
    assert report.perplexity == pytest.approx(report.perplexity_before, rel=0.2)
    assert report.as_dict()["perplexity"] == report.perplexity


@pytest.mark.parametrize(("name", "to"), [("out", "int4"), ("out.gguf", "q8_0")])
def test_a_full_disk_is_named_by_its_option_and_nothing_is_left(
    name: str, to: str, tmp_path: Path, model_folder: Callable[..., Path]
) -> None:
    source, message = model_folder(tokenizer=True), rf"^out: .*/{name} cannot be written \(.*File too large"
    with limited_files(4000), pytest.raises(ValueError, match=message):
        run(source, tmp_path / name, to)
    assert list(tmp_path.glob("*out*")) == []


def test_types_of_the_options_are_those_that_are_written() -> None:
    assert set(FOLDER_TYPES) == set(BITS)


def test_what_cannot_be_is_refused_by_its_name(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    source = model_folder()
    for options, message in (
        ({"to": "q3_k"}, "to must be one of int4, int8, q8_0, .*, q4_0, not 'q3_k'"),
        ({"out": tmp_path / "full"}, "out: .* is not empty"),
        ({"num_texts": 0}, "num_texts must be at least 1"),
        ({"text_tokens": 1}, "text_tokens must be at least 8"),
    ):
        with pytest.raises(ValueError, match=message):
            run(source, **({"out": tmp_path / "out"} | options))  # type: ignore[arg-type]
    run(source, tmp_path / "out")
    with pytest.raises(ModelError, match=r"no linear layers with whole groups of 32 .* use it as it is"):
        run(model_folder("gpt2"), tmp_path / "gpt2")  # its layers are transposed
    with pytest.raises(ModelError, match=r"model: the weights of .* are quantized already; name the model in 16 bits"):
        run(tmp_path / "out", tmp_path / "twice")
    run(model_folder(tokenizer=True), tmp_path / "m.gguf", "q8_0")
    with pytest.raises(ModelError, match=r"model: the weights of .*m\.gguf are a GGUF file; name the model in 16 bits"):
        run(tmp_path / "m.gguf", tmp_path / "twice")


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_by_several_threads_is_that_by_one_and_leaves_pytorchs_own_idle(
    bits: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's threads wait for one another after each operation, on a busy machine 150 times as long as it takes."""
    monkeypatch.setattr(quantization, "_AT_ONCE", 3 * 512)
    weight = torch.randn((400, 500), generator=torch.Generator().manual_seed(0))
    find, numbers = quantization.find_scales, set[int]()

    def note(values: Tensor, bits: Bits) -> Tensor:
        numbers.add(torch.get_num_threads())
        return find(values, bits)

    monkeypatch.setattr(quantization, "find_scales", note)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = quantize(weight, bits)
    finally:
        torch.set_num_threads(before)
    assert numbers == {1}
    monkeypatch.setattr(quantization, "_SMALL", weight.numel() * 2)
    wanted = quantize(weight, bits)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)
