"""Tiny GGUF files, written by the library of llama.cpp's tools, with its table of names.

What the converter changes is written here from its formulas, apart from the package's code that undoes it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tests.model.gguf_families import FAMILIES, metadata_of
from tiny import make_model, make_tokenizer

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
# Parts of names of weights here, and what the library's table has for them.
_RENAMED = {
    "dt_bias": "dt_proj.bias", "e_score_correction_bias": "e_score_correction.bias", "expert_bias": "expert_bias.bias",
    "block_sparse_moe.router.": "block_sparse_moe.router.layer.", "block_sparse_moe.experts": "mlp.experts",
    "forget_gate.": "",
}  # fmt: skip
# Not quantized, whatever the file's type.
_EXACT = (
    "ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "ssm_a", "ssm_d", "ssm_norm", "shortconv.conv",
    "ffn_gate_inp", "ffn_gate_inp_shexp",
)  # fmt: skip


def write_model(
    path: Path, arch: str = "llama", kind: str = "F32", seed: int = 0, kinds: Mapping[str, str] = {}, **changes: Any
) -> Any:
    """Write a random model, and return it as transformers has it, with the weights that the file holds.

    Args:
        arch: One of those whose matrices the converter leaves as they are, or with other rows.
        kind: The type of its matrices; a row must hold whole blocks.
        kinds: Types of some matrices, by the ends of their names in the file without ".weight".
        changes: Of the metadata by their names in the file, with "__" for a dot; None: left out. A name that is
            a field of the model's configuration changes that.
    """
    model, metadata = _made(arch, seed, changes)
    tensors: dict[str, np.ndarray] = {}
    types: dict[str, Kind] = {}
    for name, weight in _tensors(model, arch):
        types[name] = _kind_of(name, weight, kind, kinds)
        blocks = blocks_of(weight.numpy(), types[name])
        weight.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, types[name])))
        if types[name] is Kind.NVFP4:
            tensors |= _factors(name.removesuffix("weight"), weight)
        for stored, data in FAMILIES[arch].change(name, torch.from_numpy(blocks), model.config):
            tensors[stored] = data.numpy()
    for kind in ("short", "long"):
        if f"{kind}_factor" in (getattr(model.config, "rope_parameters", None) or {}):
            factors = model.config.rope_parameters[f"{kind}_factor"]
            tensors[f"rope_factors_{kind}.weight"] = np.array(factors, dtype=np.float32)
    _write(path, arch, metadata, tensors, types)
    return model


def write_family(
    path: Path,
    arch: str,
    kind: str = "F32",
    kinds: Mapping[str, str] = {},
    seed: int = 0,
    rewrite: Callable[[dict[str, Tensor], Any], None] = lambda *_: None,
    **changes: Any,
) -> Any:
    """Write a random model, and return it as transformers has it; arguments as for `write_model`.

    `rewrite` changes the file's tensors in place; its second argument is the model.

    A file of quantized weights is `path`; one of the same numbers in float32 is beside it, as `path.stem`-exact.gguf.
    """
    model, metadata = _made(arch, seed, changes)
    tensors: dict[str, Tensor] = {}
    for name, weight in _tensors(model, arch):
        tensors |= FAMILIES[arch].change(name, weight, model.config)
    rewrite(tensors, model)
    types = {name: _kind_of(name, tensor, kind, kinds) for name, tensor in tensors.items()}
    blocks = {name: blocks_of(tensor.contiguous().numpy(), types[name]) for name, tensor in tensors.items()}
    _write(path, arch, metadata, blocks, types)
    if kind != "F32":
        exact = {name: gguf.quants.dequantize(data, types[name]) for name, data in blocks.items()}
        _write(path.with_name(f"{path.stem}-exact.gguf"), arch, metadata, exact, {})
    return model


def _made(arch: str, seed: int, changes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model and its metadata."""
    fields = {name: value for name, value in changes.items() if "__" not in name}
    model = make_model(fields.pop("family", FAMILIES[arch].name), seed, **fields)
    for name, weight in model.state_dict().items():
        if weight.ndim == 1 and "A_log" not in name:
            weight += torch.randn_like(weight) * 0.2
    metadata = {f"{arch}.{key}": value for key, value in metadata_of(arch, model.config).items()} | tokenizer_metadata()
    return model, metadata | {name.replace("__", "."): value for name, value in changes.items() if "__" in name}


def _tensors(model: Any, arch: str) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by their names in files, those of experts apart, as views."""
    archs = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(archs[arch], model.config.num_hidden_layers)
    for ours, weight in model.state_dict().items():
        if ours == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for name, view in _apart(ours, weight, is_turned=arch == "gpt-oss"):
            for part, other in (_RENAMED | FAMILIES[arch].renamed).items():
                name = name.replace(part, other)
            if ".mixer.experts." in name:
                name = name.replace("backbone", "model").replace("mixer", "mlp")
            stored = names.get_name(name, (".weight", ".bias"))
            assert stored is not None, name
            yield stored, view


def _apart(name: str, weight: Tensor, *, is_turned: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield joined weights apart; is_turned: they are transposed, with gates and values in turn."""
    if not any(part in name for part in (".experts.", "shared_mlp.")):
        yield name, weight
        return
    end = "bias" if name.endswith("bias") else "weight"
    whole = name.removesuffix("_bias").removesuffix(".weight")
    whole = whole.replace("input_linear", "gate_up_proj").replace("output_linear", "down_proj")
    weight = weight.mT if is_turned and end == "weight" else weight
    if not whole.endswith("gate_up_proj"):
        yield f"{whole}.{end}", weight
        return
    halves = (weight[:, ::2], weight[:, 1::2]) if is_turned else weight.chunk(2, dim=-2)
    for part, half in zip(("gate", "up"), halves, strict=True):
        yield f"{whole.replace('gate_up', part)}.{end}", half


def _kind_of(name: str, tensor: Tensor, kind: str, kinds: Mapping[str, str]) -> Kind:
    role = name.removesuffix(".weight")
    if tensor.ndim < 2 or name.endswith("bias") or role.split(".", 2)[-1] in _EXACT:
        return Kind.F32
    return Kind[next((other for end, other in kinds.items() if role.endswith(end)), kind)]


def _factors(name: str, weight: Tensor) -> dict[str, np.ndarray]:
    """A factor for a matrix, or for each of a stack, with another one for inputs; the weights are multiplied by it."""
    factors = torch.linspace(0.75, 1.3, len(weight)) if weight.ndim == 3 else torch.tensor([0.9])
    weight *= factors.view(-1, *[1] * (weight.ndim - 1))
    return {f"{name}scale": factors.numpy(), f"{name}input_scale": (factors * 100).numpy()}


def _write(
    path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], kinds: Mapping[str, Kind]
) -> None:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add(writer, key, value)
    for name, data in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kinds.get(name))
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def tokenizer_metadata() -> dict[str, Any]:
    """The tokenizer of tiny models."""
    tokenizer = make_tokenizer()
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
    merges = json.loads(tokenizer.backend_tokenizer.model.__getstate__())["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [" ".join(pair) if isinstance(pair, list) else pair for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_parts(path: Path, count: int) -> list[Path]:
    """Split a file as llama-gguf-split does, and return the parts; only the first has metadata of the model."""
    reader = gguf.GGUFReader(path)
    parts = []
    for number in range(count):
        parts.append(path.with_name(f"{path.stem}-{number + 1:05d}-of-{count:05d}.gguf"))
        writer = gguf.GGUFWriter(parts[-1], "llama")
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    add(writer, key, field.contents())
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        _finish(writer)
    return parts


# ---------------------------------------------------------------------------------------------- blocks


def blocks_of(weight: np.ndarray, kind: Kind) -> np.ndarray:
    """Return the weights in blocks, or random ones of the same size where the library cannot quantize."""
    try:
        return gguf.quants.quantize(np.ascontiguousarray(weight), kind)
    except NotImplementedError:
        num_rows = int(np.prod(weight.shape[:-1]))
        rows = random_blocks(kind, num_rows, weight.shape[-1] // gguf.GGML_QUANT_SIZES[kind][0])
        size = np.abs(gguf.quants.dequantize(scaled(rows, kind, 1.0), kind)).std()
        return scaled(rows, kind, float(weight.std() / size)).reshape(*weight.shape[:-1], -1)


# Where a block has its float16 scales, and those of what is added or subtracted.
_SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
           "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}  # fmt: skip


def scaled(rows: np.ndarray, kind: Kind, scale: float) -> np.ndarray:
    """[rows, bytes] with this scale, and for what is added or subtracted ten times that, up to a half more or less."""
    blocks = rows.reshape(len(rows), -1, gguf.GGML_QUANT_SIZES[kind][1]).copy()
    factors = np.random.default_rng(1).uniform(0.5, 1.5, (2, *blocks.shape[:2]))
    if kind.name == "MXFP4":
        blocks[..., 0] = 127 + np.round(np.log2(scale * factors[0]))
    if kind.name == "NVFP4":
        blocks[..., :4] = gguf.quants.NVFP4.fp32_to_ue4m3(scale * factors[0])[..., None]
    for at, factor, more in zip(_SCALES.get(kind.name, ()), factors, (1, 10), strict=False):
        blocks[..., at : at + 2] = (scale * more * factor).astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows.shape)


def random_blocks(kind: Kind, num_rows: int, num_blocks: int) -> np.ndarray:
    """[num_rows, bytes of a row]; random codes, with scales that are numbers."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (num_rows, num_blocks * block_bytes), dtype=np.uint8)
    return data & 0x3B if kind.name in ("F16", "BF16", "F32") else data
