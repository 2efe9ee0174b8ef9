"""Adapters in PEFT's format with random matrices, and models with an adapter merged by its formula."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path, base: Path, seed: int = 0, size: float = 0.3, spoil: Mapping[str, Any] | None = None, **config: Any
) -> Path:
    """Write an adapter whose additions are about `size` times as large as the weights of `base`.

    `spoil` replaces or removes (None) tensors by the ends of their names.
    """
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(ALL), "bias": "none"} | config
    fields.setdefault("base_model_name_or_path", str(base))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in _changed(model, fields).items():
        rank, scale = _rank_and_scale(fields, name)
        outputs, inputs = weight.shape[::-1] if _is_transposed(model, name) else weight.shape
        down = torch.randn((rank, inputs), generator=generator)
        up = torch.randn((outputs, rank), generator=generator) * weight.std() * size / scale / math.sqrt(rank)
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    for end, value in (spoil or {}).items():
        for key in [key for key in tensors if key.endswith(end)] or [end]:
            tensors.pop(key, None)
            if value is not None:
                tensors[key] = value
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_model(base: Path, adapter: Path) -> Any:
    """The model with the adapter's products added to its weights, as PEFT's merge_and_unload does."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    fields = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, weight in _changed(model, fields).items():
        _, scale = _rank_and_scale(fields, name)
        key = f"base_model.model.{name}.lora_"
        added = (tensors[f"{key}B.weight"].double() @ tensors[f"{key}A.weight"].double()) * scale
        weight.data += (added.T if _is_transposed(model, name) else added).float()
    return model.eval()


def save_merged(folder: Path, base: Path, adapter: Path) -> Path:
    merged_model(base, adapter).save_pretrained(folder)
    for file in base.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _changed(model: Any, fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights that an adapter changes, by the names of their layers."""
    targets, layers = fields["target_modules"], fields.get("layers_to_transform")
    found = {}
    for name, module in model.named_modules():
        if type(module).__name__ not in ("Linear", "Conv1D") or name == "lm_head":
            continue
        if isinstance(targets, str):
            is_target = targets == "all-linear" or re.fullmatch(targets, name)
        else:
            is_target = name.split(".")[-1] in targets
            if layers is not None:
                numbers = layers if isinstance(layers, list) else [layers]
                is_target = is_target and int(re.search(r"\.(\d+)\.", name)[1]) in numbers
        excluded = fields.get("exclude_modules")
        if is_target and not (isinstance(excluded, str) and re.fullmatch(excluded, name)):
            found[name] = module.weight
    return found


def _is_transposed(model: Any, name: str) -> bool:
    return type(model.get_submodule(name)).__name__ == "Conv1D"


def _rank_and_scale(fields: Mapping[str, Any], name: str) -> tuple[int, float]:
    def found(pattern: str, default: Any) -> Any:
        values = fields.get(pattern, {})
        return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", name)), default)

    rank, alpha = found("rank_pattern", fields["r"]), found("alpha_pattern", fields["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
