"""Quantized checkpoints that are damaged, odd or hostile: read right, or refused by tensor or field, with a remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantized_files import FORMATS, save_quantized
from specinfer import LLM
from specinfer.core.errors import ModelError
from specinfer.model.load import load_model
from specinfer.model.offload.shards import Shards
from tiny import save_model

CPU, LAYER = torch.device("cpu"), "model.layers.1.mlp.up_proj"
Tensors = dict[str, Tensor]
FP8 = "float-quantized"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("source"), hidden_size=64, intermediate_size=96)


def spoiled(
    source: Path, folder: Path, name: str, change: Callable[[Tensors], Any] | None = None, **fields: Any
) -> Path:
    """Write a checkpoint with changed tensors, and with other fields of its quantization_config; None drops one."""
    save_quantized(source, folder, name)
    config = json.loads((folder / "config.json").read_text())
    settings = config["quantization_config"] | fields
    config["quantization_config"] = {key: value for key, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({key: one.contiguous() for key, one in tensors.items()}, folder / "model.safetensors")
    return folder


def edit(end: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    """Return a change of one tensor of `LAYER`."""

    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{end}"] = make(tensors[f"{LAYER}.{end}"])

    return change


def first(value: float) -> Callable[[Tensor], Tensor]:
    """Return a function that changes the first number of a tensor."""

    def make(tensor: Tensor) -> Tensor:
        flat = tensor.float().flatten()
        flat[0] = value
        return flat.view(tensor.shape).to(tensor.dtype)

    return make


NAN = float("nan")
# Format, end of a tensor's name, and what it becomes.
SPOILED: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "scales of too few outputs": ("AWQ", "scales", lambda one: one[:, :-8], "do not fit each other"),
    "scales of too few groups": ("AWQ", "scales", lambda one: one[:-1], "do not fit each other"),
    "zeros of too few outputs": ("AWQ", "qzeros", lambda one: one[:, :-1], "do not fit each other"),
    "codes of fewer inputs": ("GPTQ", "qweight", lambda one: one[:-1], "do not fit each other"),
    "scales of three dimensions": ("pack-quantized", "weight_scale", lambda one: one[..., None], "do not fit"),
    "codes of one dimension": ("AWQ", "qweight", lambda one: one.flatten(), "have shapes that no weight has"),
    "codes of no outputs": ("AWQ", "qweight", lambda one: one[:, :0], "have shapes that no weight has"),
    "groups below 0": ("GPTQ, ordered by activations", "g_idx", first(-1), "g_idx"),
    "groups beyond the last": ("GPTQ, ordered by activations", "g_idx", first(99), "g_idx"),
    "codes of 64 bits": ("AWQ", "qweight", lambda one: one.long(), "qweight is of type int64, not int32"),
    "codes of 16 bits": ("GPTQ", "qweight", lambda one: one.short(), "qweight is of type int16, not int32"),
    "codes of float": ("pack-quantized", "weight_packed", lambda one: one.float(), "weight_packed is of type float32"),
    "unsigned codes": ("int-quantized", "weight", lambda one: one.view(torch.uint8), "weight is of type uint8"),
    "whole scales": ("AWQ", "scales", lambda one: one.int(), "scales is of type int32"),
    "FP8 in 16 bits": (FP8, "weight", lambda one: one.bfloat16(), "weight is of type bfloat16"),
    "exponents for scales": ("FP8", "weight_scale_inv", lambda one: one.to(torch.uint8), "weight_scale_inv is of type"),
    "exponents that are floats": ("MXFP4", "weight_scale", lambda one: one.float(), "weight_scale is of type float32"),
}  # fmt: skip
NOT_FINITE: dict[str, tuple[str, str, Callable[[Tensor], Tensor]]] = {
    "AWQ": ("AWQ", "scales", first(NAN)),
    "GPTQ": ("GPTQ", "scales", first(float("inf"))),
    "pack-quantized": ("pack-quantized", "weight_scale", first(NAN)),
    "int8": ("int-quantized", "weight_scale", first(NAN)),
    "scale of FP8": (FP8, "weight_scale", first(NAN)),
    "scale of FP8 in blocks": ("FP8 of 128", "weight_scale_inv", first(float("inf"))),
    "code of FP8": (FP8, "weight", first(NAN)),
    "code of FP8 in blocks": ("FP8 of 128", "weight", first(NAN)),
    "scale of NVFP4": ("NVFP4", "weight_scale", first(NAN)),
    "scale of a whole matrix of NVFP4": ("NVFP4", "weight_global_scale", first(0.0)),
    "bitsandbytes": ("bitsandbytes nf4", "weight.absmax", first(NAN)),
}


@pytest.mark.parametrize(("name", "end", "make", "message"), SPOILED.values(), ids=SPOILED)
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_tensors_that_cannot_be_are_refused_by_name_with_a_remedy(
    name: str, end: str, make: Any, message: str, dtype: Any, source: Path, tmp_path: Path
) -> None:
    folder = spoiled(source, tmp_path / "m", name, edit(end, make))
    with pytest.raises(ModelError, match=rf"{LAYER}(?s:.*)({message})(?s:.*); fetch") as raised:
        LLM(folder, dtype=dtype)
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize(("name", "end", "make"), NOT_FINITE.values(), ids=NOT_FINITE)
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_numbers_that_are_not_finite_are_refused_by_name(
    name: str, end: str, make: Any, dtype: Any, source: Path, tmp_path: Path
) -> None:
    folder = spoiled(source, tmp_path / "m", name, edit(end, make))
    with pytest.raises(ModelError, match=rf"weight {LAYER}\.weight of .* has NaN or infinity; fetch the model again"):
        LLM(folder, dtype=dtype)


def without(*ends: str) -> Callable[[Tensors], None]:
    """Return a change that takes tensors away from `LAYER`."""

    def change(tensors: Tensors) -> None:
        for end in ends:
            del tensors[f"{LAYER}.{end}"]

    return change


@pytest.mark.parametrize(
    ("name", "end"),
    [("AWQ", "qzeros"), ("GPTQ", "scales"), ("pack-quantized", "weight_shape"), ("NVFP4", "weight_global_scale")],
)
def test_a_tensor_that_is_missing_is_named(name: str, end: str, source: Path, tmp_path: Path) -> None:
    folder = spoiled(source, tmp_path / "m", name, without(end))
    with pytest.raises(ModelError, match=rf"tensor {LAYER}\.{end} is missing; fetch the model again"):
        LLM(folder)


def _groups(bits: int) -> dict[str, Any]:
    """Groups of layers, of which one has other bits."""
    one = FORMATS["pack-quantized"][0]["config_groups"]["group_0"]
    return {"group_0": one, "group_1": one | {"weights": one["weights"] | {"num_bits": bits}}}


ROTATED = {"config_groups": {"u": {"type": "hadamard"}}}
# Fields that change what codes stand for, and that are not read.
FIELDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "rotations": ("pack-quantized", {"transform_config": ROTATED}, "transform_config"),
    "sparse": (FP8, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "layout of AWQ": ("AWQ", {"version": None, "format": "gemv"}, "format 'gemv'"),
    "version of AWQ": ("AWQ", {"version": "gemv_fast"}, "version 'gemv_fast'"),
    "backend of AWQ": ("AWQ", {"backend": "llm-awq"}, "backend 'llm-awq'"),
    "bits of AWQ": ("AWQ", {"bits": 3}, "bits 3"),
    "layout of GPTQ": ("GPTQ", {"format": "marlin"}, "format 'marlin'"),
    "words of GPTQ": ("GPTQ", {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
    "bits of GPTQ": ("GPTQ", {"bits": 3}, "bits 3"),
    "format": ("pack-quantized", {"format": "marlin-24"}, "format 'marlin-24'"),
    "FP8 with a size of blocks": ("FP8", {"weight_block_size": 128}, "weight_block_size"),
    "blocks of FP8": ("FP8", {"weight_block_size": [0, 128]}, "weight_block_size"),
    "no groups": ("pack-quantized", {"config_groups": {}}, "config_groups"),
    "groups that are no groups": ("pack-quantized", {"config_groups": [1]}, "config_groups"),
    "groups without weights": ("pack-quantized", {"config_groups": {"g": {"weights": None}}}, "config_groups"),
    "a format of several that no group has": ("pack-quantized", {"format": "mixed-precision"}, "format 'mixed-prec"),
    "other bits of a group": ("pack-quantized", {"config_groups": _groups(6)}, "num_bits 6"),
    "bits of a rule": ("GPTQ", {"dynamic": {"-:.*head": {}, "+:.*up_proj": {"bits": 3}}}, r"dynamic '\+:\.\*up_proj'"),
    "layout of a rule": ("GPTQ", {"dynamic": {".*up_proj": {"format": "marlin"}}}, r"dynamic '\.\*up_proj'"),
    "adapter of a rule": ("GPTQ", {"dynamic": {".*up_proj": {"adapter": {"name": "lora"}}}}, "dynamic"),
    "rules that are no rules": ("GPTQ", {"dynamic": {".*": 4}}, "TypeError"),
    "bits of a rule of AWQ": ("AWQ", {"dynamic": {".*up_proj": {"bits": 8}}}, "dynamic"),
    "packing of auto-round": ("auto-round", {"packing_format": "auto_round:fp8_static"}, "packing_format 'auto_"),
    "activations of auto-round": ("auto-round", {"act_bits": 8}, "act_bits 8"),
    "numbers of auto-round": ("auto-round", {"data_type": "mx_fp"}, "data_type 'mx_fp'"),
    "bits of a layer of auto-round": ("auto-round", {"extra_config": {LAYER: {"bits": 3}}}, "bits 3 of 'model.lay"),
    "rotations of auto-round": ("auto-round", {"rotation_config": {"hadamard": 1}}, "rotation_config"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "field"), FIELDS.values(), ids=FIELDS)
def test_a_field_that_is_not_read_is_named(
    name: str, fields: dict[str, Any], field: str, source: Path, tmp_path: Path
) -> None:
    folder = spoiled(source, tmp_path / "m", name, **fields)
    with pytest.raises(ModelError, match=rf"quantized already .*{field}.*; use the original one"):
        LLM(folder)


def test_version_2_of_gptq_by_its_newer_field_is_read_as_such(source: Path, tmp_path: Path) -> None:
    folder = spoiled(source, tmp_path / "m", "GPTQ v2 of 8 bits", checkpoint_format=None, format="gptq_v2")
    plain = load_file(tmp_path / "m-plain" / "model.safetensors")
    with Shards(folder, torch.float32) as shards:
        torch.testing.assert_close(shards.sources[f"{LAYER}.weight"].read(), plain[f"{LAYER}.weight"])


@pytest.mark.parametrize("name", ["AWQ", "GPTQ", "pack-quantized", "FP8"])
def test_layers_that_are_left_whole_are_read_whatever_the_settings_list(
    name: str, source: Path, tmp_path: Path
) -> None:
    """Which layers are quantized shows in the tensors; lists of names, and patterns, need not be followed."""
    folder = tmp_path / "m"
    reference = save_quantized(source, folder, name, whole=(f"{LAYER}.weight",))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {
        "modules_to_not_convert": ["up_proj"], "ignore": ["re:.*mlp.up_proj$", "lm_head"],
        "dynamic": {"-:.*up_proj": {}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    plain = load_file(reference / "model.safetensors")
    loaded = load_model(folder, torch.float32, CPU, native=False)
    for key, weight in loaded.model.state_dict().items():
        if key in plain:
            torch.testing.assert_close(weight, plain[key].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["AWQ", "NVFP4", "FP8"])
def test_files_that_are_cut_short_are_refused(name: str, source: Path, tmp_path: Path) -> None:
    folder = spoiled(source, tmp_path / "m", name)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 7, 200, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged .*; fetch the model again"):
            LLM(folder)
