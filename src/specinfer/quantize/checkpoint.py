"""Quantized checkpoints in the pack-quantized format of compressed-tensors, which vLLM and transformers read too.

A weight [out, in] of a linear layer becomes `weight_packed` [out, in * bits / 32] int32, whose lowest bits have the
first inputs, `weight_scale` [out, groups] and `weight_shape` [2]. All other tensors stay as they are.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.core.progress import ProgressCallback, progress_of
from specinfer.model.definition import load_config, load_plain, load_tokenizer
from specinfer.model.folder import replacing
from specinfer.model.gguf.folder import weights_file
from specinfer.model.gguf.tokenizer_writing import tokenizer_metadata
from specinfer.model.gguf.writing import write_gguf
from specinfer.model.offload.shards import Shards, has_safetensors, weight_paths
from specinfer.ops.quantization import BITS, Bits, quantize
from specinfer.ops.quantized_weight import GROUP_SIZES, QuantizedWeight
from specinfer.quantize.calibration import Calibrated, calibrate, read_texts
from specinfer.quantize.layers import Layers
from specinfer.quantize.options import QuantizeConfig
from specinfer.reporting.files import naming
from specinfer.setup.model_names import find_target

_FORMAT, _METHOD = "pack-quantized", "compressed-tensors"
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
_INDEX = "model.safetensors.index.json"
_WRITING = "writing"


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """Size of a quantized checkpoint, and its loss of quality.

    Attributes:
        num_layers: Number of quantized linear layers; each matrix of an expert is one.
        num_uncalibrated: Number of these that are rounded to nearest: all without data, or experts that no token of a
            calibration text was routed to.
        num_bytes_before, num_bytes: Sizes of the weight files.
        perplexity_before, perplexity: Of held-out texts with unrounded activations, or None without data.
    """

    folder: Path
    num_layers: int
    num_uncalibrated: int
    num_bytes_before: int
    num_bytes: int
    perplexity_before: float | None = None
    perplexity: float | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the report as values that JSON can hold."""
        return {
            "folder": str(self.folder),
            "num_quantized_layers": self.num_layers,
            "num_uncalibrated_layers": self.num_uncalibrated,
            "num_bytes_before": self.num_bytes_before,
            "num_bytes": self.num_bytes,
            "perplexity_before": self.perplexity_before,
            "perplexity": self.perplexity,
        }


def write_quantized(config: QuantizeConfig, progress: ProgressCallback | None = None) -> QuantizeReport:
    """Quantize the linear layers of a model and write the folder, all of it or nothing.

    Args:
        progress: Receives the name of the work, its steps that are done, and their number.

    Raises:
        ModelError: The model cannot be quantized.
        ValueError: The data cannot be used, or the folder or file cannot be written.
    """
    source = find_target(config.model)
    if not has_safetensors(source):
        what = "are quantized already" if weights_file(source) is None else "are a GGUF file"
        raise ModelError(
            f"model: the weights of {config.model} {what}; name the model in 16 bits that they were made of"
        )
    if config.is_gguf:
        with naming("out", config.path):
            return _write_file(config, source, progress_of(progress, _WRITING))
    bits = BITS[config.to]
    layers = Layers.from_folder(source, bits)
    calibrated = Calibrated({}, set(layers.places), None, None)
    if config.data:
        data = [Path(name) for name in config.data]
        texts = read_texts(source, data, config.num_texts, config.text_tokens)
        calibrated = calibrate(source, layers.places, texts, bits, progress_of(progress, "calibrating layers"))
    out, index = config.path, dict[str, str]()
    files, note = weight_paths(source), progress_of(progress, _WRITING)
    with naming("out", out), replacing(out) as partial:
        for number, file in enumerate(files, start=1):
            tensors = _rounded_tensors(file, layers, calibrated.rounded, bits)
            save_file(tensors, partial / file.name, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, file.name)
            note(number, len(files))
        _write_fields(source, partial, quantization_fields(bits, layers.ignored), index if len(files) > 1 else None)
    before, after = (sum(file.stat().st_size for file in paths) for paths in (files, weight_paths(out)))
    counts = len(layers.places), len(calibrated.unseen)
    return QuantizeReport(out, *counts, before, after, calibrated.perplexity_before, calibrated.perplexity)


def _write_file(config: QuantizeConfig, source: Path, note: Callable[[int, int], None]) -> QuantizeReport:
    """Write a GGUF file, all of it or nothing."""
    tokenizer, out = load_tokenizer(source), config.path
    if tokenizer is None:
        raise ModelError(f"model: {config.model} has no tokenizer, which a GGUF file needs; put tokenizer.json into it")
    partial = out.with_name(f".{out.name}-partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with Shards(source) as shards:
            total = len(shards.sources)
            note(0, total)
            count = write_gguf(
                partial, load_config(source), shards.sources, lambda: load_plain(source, "auto").state_dict(),
                lambda size: tokenizer_metadata(tokenizer, size), config.to, lambda done: note(done, total),
            )  # fmt: skip
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    before = sum(file.stat().st_size for file in weight_paths(source))
    return QuantizeReport(out, count, count, before, out.stat().st_size)


def _rounded_tensors(file: Path, layers: Layers, rounded: dict[str, QuantizedWeight], bits: Bits) -> dict[str, Tensor]:
    """Return the tensors of a file, with the layers to quantize rounded and packed, and experts split."""
    tensors: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118 - it is no dict
            for name, tensor in layers.experts.split(key, opened.get_tensor(key)):
                layer = name.removesuffix(".weight")
                if layer in layers.places and name != layer:
                    weight = rounded.pop(layer) if layer in rounded else quantize(tensor.contiguous(), bits)
                    tensors |= {f"{layer}.{end}": part for end, part in packed(weight, tensor.dtype).items()}
                else:
                    tensors[name] = tensor if name == key else tensor.clone(memory_format=torch.contiguous_format)
    return tensors


def packed(weight: QuantizedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a weight's tensors in the pack-quantized format, by the ends of their names.

    Args:
        dtype: Type of the scales, the model's.
    """
    codes = weight.codes.contiguous().numpy()  # NumPy computes on one thread, which waits for no other
    words = torch.from_numpy((codes if weight.bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4).view("<i4"))
    shape = torch.tensor([weight.out_features, weight.in_features])
    scales = weight.scales.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": shape}


def _write_fields(source: Path, out: Path, quantization: dict[str, Any], index: dict[str, str] | None) -> None:
    """Write config.json and the index, and copy tokenizer, template and generation defaults."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name != _INDEX:
                shutil.copyfile(file, out / file.name)
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    fields["quantization_config"] = quantization
    (out / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if index is not None:
        total = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (out / _INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def quantization_fields(bits: Bits, ignored: Sequence[str]) -> dict[str, Any]:
    """Return `quantization_config` of config.json; all linear layers but the ignored ones have this many bits."""
    weights: dict[str, Any] = {
        "num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZES[bits],
        "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": _METHOD, "format": _FORMAT, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": list(ignored), "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }  # fmt: skip
