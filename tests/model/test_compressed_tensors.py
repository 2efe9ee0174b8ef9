"""Checkpoints written by the library of the compressed-tensors format, and ours read by it.

It is a package of its name; orders of activations are written by earlier versions, such as 0.15.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.model.load import load_model
from specinfer.model.offload.shards import Shards
from specinfer.ops.quantization import dequantize
from specinfer.quantize.checkpoint import write_quantized
from specinfer.quantize.options import QuantizeConfig
from tiny import make_model

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the library's own
]
compressors = pytest.importorskip("compressed_tensors.compressors")
library = pytest.importorskip("compressed_tensors.quantization")
forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
utils = pytest.importorskip("compressed_tensors.quantization.utils")

_ACTIVATIONS = {
    "int": library.QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True),
    "float": library.QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True),
}
_KNOWS_ORDER = "g_idx" in inspect.signature(forward.dequantize).parameters
_GROUP, _CHANNEL, _TENSOR = {"strategy": "group", "group_size": 32}, {"strategy": "channel"}, {"strategy": "tensor"}
_BLOCK = {"strategy": "block", "block_structure": [32, 32]}
CASES = [
    *(
        ("pack-quantized", {"num_bits": bits, "symmetric": symmetric} | strategy)
        for bits in (2, 4, 8)
        for symmetric in (True, False)
        for strategy in (_GROUP, _GROUP | {"actorder": "group"}, _GROUP | {"actorder": "static"}, _CHANNEL)
    ),
    *(
        ("int-quantized", {"num_bits": 8, "symmetric": symmetric} | strategy)
        for symmetric in (True, False)
        for strategy in (_TENSOR, _CHANNEL, _GROUP, _GROUP | {"actorder": "group"})
    ),
    *(("float-quantized", {"num_bits": 8, "type": "float"} | strategy) for strategy in (_TENSOR, _CHANNEL, _BLOCK)),
    ("naive-quantized", {"num_bits": 8, "type": "float"} | _GROUP),
    ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "scale_dtype": torch.uint8} | _GROUP),
]


def _extremes(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest weight that share a scale, in the shape of the scales."""
    rows, columns = weight.shape
    down, across = {
        "tensor": (rows, columns), "channel": (1, columns), "group": (1, args.group_size),
        "tensor_group": (1, args.group_size),
        "block": tuple(args.block_structure or (1, 1)),
    }[args.strategy]  # fmt: skip
    blocks = weight.reshape(rows // down, down, columns // across, across)
    least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
    return (least.reshape(1), most.reshape(1)) if args.strategy == "tensor" else (least, most)


def _compress(weight: Tensor, scheme: Any, form: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return a weight's tensors as the library writes them, and the weight that it makes of these."""
    args = scheme.weights
    state = {}
    ordered = weight
    if args.actorder == "group":
        state["weight_g_idx"] = torch.randperm(weight.shape[1]).int() // args.group_size
        ordered = weight[:, state["weight_g_idx"].argsort(stable=True)]
    extremes, whole = _extremes(ordered, args), {}
    if args.strategy == "tensor_group":
        whole["global_scale"] = state["weight_global_scale"] = utils.generate_gparam(weight.amin(), weight.amax())
    scales, zeros = utils.calculate_qparams(*extremes, args, **whole)
    state |= {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    try:
        return stored, compressor.decompress(stored, scheme)["weight"]
    except NotImplementedError:
        pytest.skip(f"this version of the library writes {form}, and does not read it")


def _save(source: Path, folder: Path, form: str, weights: dict[str, Any]) -> dict[str, Tensor]:
    """Write a model whose linear layers the library has compressed, and return these layers' weights."""
    args = library.QuantizationArgs(**weights)
    activations = None if form.endswith("pack-quantized") else _ACTIVATIONS[args.type]
    scheme = library.QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    config = library.QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, ignore=["lm_head"], quantization_status="compressed"
    )
    tensors, plain = {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if "_proj" in key:
            stored, plain[key] = _compress(tensor, scheme, form)
            tensors |= {f"{key.removesuffix('weight')}{end}": one.contiguous() for end, one in stored.items()}
        else:
            tensors[key] = tensor
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((source / "config.json").read_text())
    fields["quantization_config"] = config.model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps(fields))
    return plain


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("source")
    model = make_model("llama", hidden_size=64, intermediate_size=128)
    model.to(request.param).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("form", "weights"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_weights_are_those_of_the_library_to_the_last_bit(
    form: str, weights: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    if weights.get("actorder") == "group" and not _KNOWS_ORDER:
        pytest.skip("this version of the library writes no order of activations")
    plain = _save(source, tmp_path / "quantized", form, weights)
    assert len(plain) > 6
    dtype = next(iter(plain.values())).dtype
    with Shards(tmp_path / "quantized", dtype) as shards:
        for key, weight in plain.items():
            assert torch.equal(shards.sources[key].read(), weight), key


@pytest.mark.parametrize(("to", "bits"), [("int4", 4), ("int8", 8)])
def test_the_library_reads_what_quantize_writes_as_what_is_computed_with(
    to: str, bits: int, source: Path, tmp_path: Path
) -> None:
    """Where codes are decoded, and where they are computed with as they are."""
    write_quantized(QuantizeConfig(model=str(source), to=to, out=tmp_path / "out"))
    fields = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = library.QuantizationConfig.model_validate(fields)
    scheme = config.config_groups["group_0"]
    assert (config.format, scheme.weights.num_bits) == ("pack-quantized", bits)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    compressor = compressors.BaseCompressor.get_value_from_registry(config.format)
    loaded = load_model(tmp_path / "out", torch.bfloat16, torch.device("cpu"), native=False)
    layers = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
    assert len(layers) > 6
    with Shards(tmp_path / "out", torch.bfloat16) as shards:
        for layer in layers:
            ends = ("weight_packed", "weight_scale", "weight_shape")
            found = compressor.decompress({end: tensors[f"{layer}.{end}"] for end in ends}, scheme)["weight"]
            own: Any = shards.sources[f"{layer}.weight"]
            assert own.has_codes
            kind, codes = own.codes()
            assert kind == to
            for computed in (loaded.model.get_submodule(layer).weight, dequantize(codes)):
                assert torch.equal(computed.to(torch.bfloat16), found.to(torch.bfloat16))
