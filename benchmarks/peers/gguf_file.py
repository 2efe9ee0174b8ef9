"""Conversion of a model folder to one GGUF file, for peers that read no other format.

Weights keep their values except for rounding to the requested type. llama.cpp applies RoPE to neighbouring pairs of a
head, and Llama to its two halves, so rows of q and k are reordered. Peers receive and return token ids, so the
vocabulary in the file has the right size but placeholder tokens.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.process import WorkerError
from specinfer.model.definition import load_config
from specinfer.model.gguf.config import gguf_sources
from specinfer.model.gguf.folder import weights_file
from specinfer.model.gguf.metadata import llama3_factors

Reader = Callable[[], Tensor]

# Model type -> gguf's architecture, and whether rows of q and k are reordered.
_ARCHITECTURES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, True),
    "mistral": (gguf.MODEL_ARCH.LLAMA, True),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, False),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, False),
}
# The file type in the header, which OpenVINO relies on.
_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}


def write_gguf(folder: Path, destination: Path, weights: str) -> None:
    """Write the model of `folder` to a GGUF file, with one weight tensor in memory at a time.

    Args:
        weights: GGUF type of the matrices, such as "q8_0". Vectors are written in float32.

    Raises:
        WorkerError: This kind of model cannot be converted.
    """
    config = load_config(folder)
    architecture, is_paired = _check(config)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    wanted = gguf.GGMLQuantizationType[weights.upper()]
    tensors: list[tuple[Any, Reader]] = []
    writer = gguf.GGUFWriter(destination, gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, config)
    _add_vocabulary(writer, config.vocab_size)
    writer.add_file_type(_FILE_TYPES[weights])
    for name, shape, read in _read(folder):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise WorkerError(f"its weight {name} has no place in a GGUF file")
        if is_paired and (heads := _heads(name, config)):
            read = partial(_paired, read, heads)
        kind = wanted if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        tensors.append((kind, read))
        _announce(writer, stored, shape, kind)
    if config.rope_parameters["rope_type"] == "llama3":
        factors = llama3_factors(config.rope_parameters, _head_dim(config))
        tensors.append((gguf.GGMLQuantizationType.F32, partial(torch.tensor, factors)))
        _announce(writer, "rope_freqs.weight", (len(factors),), gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for kind, read in tensors:
        writer.write_tensor_data(gguf.quants.quantize(read().float().numpy(), kind))
    writer.close()


def _check(config: Any) -> tuple[Any, bool]:
    """Return the entry of the model's architecture, or raise `WorkerError` if a GGUF file cannot describe the model."""
    kind = config.model_type
    if kind not in _ARCHITECTURES:
        raise WorkerError(f"GGUF files are written of {', '.join(_ARCHITECTURES)} models, not of {kind!r}")
    types = set(getattr(config, "layer_types", None) or ()) | {getattr(config, "use_sliding_window", False)}
    if "sliding_attention" in types or True in types or (kind == "mistral" and config.sliding_window is not None):
        raise WorkerError("no GGUF file is written of a model with sliding windows")
    rope = config.rope_parameters["rope_type"]
    if rope not in ("default", "llama3"):
        raise WorkerError(f"no GGUF file is written of a model with rope_type {rope!r}")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise WorkerError(f"no GGUF file is written of a model with hidden_act {config.hidden_act!r}")
    return _ARCHITECTURES[kind]


def _add_sizes(writer: Any, config: Any) -> None:
    head_dim = _head_dim(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_vocabulary(writer: Any, size: int) -> None:
    """Write the vocabulary that readers require: a control token, a merge, and a byte-level BPE token for each byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    named = ["<>", "ab", *map(chr, range(0x100, 0x100 + 256 - len(shown))), *map(chr, shown)]
    tokens = [*named, *(f"<{number}>" for number in range(len(named), size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens[:size])
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (size - 1))
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)


def _read(folder: Path) -> Iterator[tuple[str, tuple[int, ...], Reader]]:
    """Yield the name, shape and reader of each weight."""
    if (file := weights_file(folder)) is not None:
        yield from ((name, source.shape, source.read) for name, source in gguf_sources(file, None).items())
        return
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        for name, shape in shapes.items():
            if not name.endswith("rotary_emb.inv_freq"):  # old checkpoints store it, but it is computed
                yield name, shape, partial(_tensor, path, name)


def _tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: Any) -> None:
    try:
        size = math.prod(gguf.quant_shape_to_byte_shape(shape, kind))
    except ValueError as error:
        raise WorkerError(f"{name} cannot be written as {kind.name}: {error}") from error
    writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)


def _heads(name: str, config: Any) -> int:
    """Return the number of heads of this weight's output if RoPE applies to it, or 0."""
    role = name.split(".")[-2]
    return int({"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(role, 0))


def _paired(read: Reader, heads: int) -> Tensor:
    """Return the weight with the rows of the two halves of each head interleaved."""
    weight = read()
    halves = weight.view(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
