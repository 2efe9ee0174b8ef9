"""Enlarge an EAGLE-3 head together with its target, so that it drafts the same tokens at a bigger head's cost.

As in `grow.py`, new residual dimensions stay zero. The head reads the hidden states of a grown target, which are zero
there too. Where a weight reads several vectors side by side, each of them gets its own new columns.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.bench.grow import MIN_POSITIONS, check_contains, grow_weight, place_grown, places_of_layers
from specinfer.bench.shape import Shape, head_dim_of, shape_of
from specinfer.model.definition import make_trunk
from specinfer.model.heads.eagle3 import usual_reads

_IDS = "eagle_aux_hidden_state_layer_ids"


def head_shape(source: Path, old_target: Shape, target: Shape) -> Shape:
    """Return the shape of a head's layers for a target that grows from one shape to another: like the target's layers.

    Raises:
        ValueError: The head cannot be grown to it.
    """
    old = shape_of(_layer_config(source))
    if old.hidden_size != old_target.hidden_size or not _files(source):
        raise ValueError(f"{source} has a hidden size of its own, or no safetensors: leave grow out")
    shape = replace(target, num_layers=old.num_layers)
    check_contains(shape, old)
    return shape


def grow_head(
    source: Path, destination: Path, old_target: Shape, target: Shape, *, seed: int = 0, dtype: torch.dtype
) -> Path:
    """Grow the EAGLE-3 head in a folder for a target that grows from one shape to another; see `grow.grow_folder`."""
    old, shape = shape_of(_layer_config(source)), head_shape(source, old_target, target)
    sizes = {"shape": asdict(shape), "target": asdict(target), "seed": seed, "dtype": str(dtype)}

    def write(fresh: Path) -> None:
        generator, grown = torch.Generator().manual_seed(seed), {}
        for file in _files(source):
            for name, tensor in load_file(file).items():
                grown[name] = _grown_tensor(name, tensor, old, shape, dtype, generator)
        save_file(grown, fresh / "model.safetensors")
        fields = _grown_fields(_fields(source), _layer_config(source), shape, old_target, target)
        (fresh / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

    return place_grown(source, destination, sizes, write)


def grown_parameters(source: Path, shape: Shape) -> int:
    """Return the number of parameters of a head whose layers grow to this shape."""
    old, count = shape_of(_layer_config(source)), 0
    for file in _files(source):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                count += math.prod(_grown_sizes(name, opened.get_slice(name).get_shape(), old, shape))
    return count


def _files(source: Path) -> list[Path]:
    return sorted(source.glob("*.safetensors"))


def _fields(source: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return fields


def _layer_config(source: Path) -> Any:
    """Return the configuration of a head's layers."""
    fields = _fields(source)
    own = fields.get("transformer_layer_config", fields)
    if own.get("model_type", "llama") != "llama":
        raise ValueError(f"{source} has layers of family {own['model_type']!r}: only heads of Llama layers can grow")
    kept = {name: value for name, value in own.items() if name not in ("architectures", "torch_dtype", "dtype")}
    changes = {"model_type": "llama", "num_hidden_layers": int(own.get("num_hidden_layers") or 1)}
    return make_trunk(kept | changes).config


def _role(name: str) -> str:
    return "norm" if "norm" in name else name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]


def _units(role: str, old: Shape, shape: Shape) -> tuple[tuple[int, int], ...]:
    """Return for each axis what its size is a multiple of, before and after growth; (1, 1) for one that stays."""
    width, mlp = (old.hidden_size, shape.hidden_size), (old.intermediate_size, shape.intermediate_size)
    queries, keys, same = (old.num_heads, shape.num_heads), (old.num_kv_heads, shape.num_kv_heads), (1, 1)
    return {
        "q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width), "o_proj": (width, queries),
        "gate_proj": (mlp, width), "up_proj": (mlp, width), "down_proj": (width, mlp),
        "fc": (width, width), "norm": (width,), "lm_head": (same, width), "embed_tokens": (same, width),
        "mask_hidden": (same, same, width), "d2t": (same,), "t2d": (same,),
    }[role]  # fmt: skip


def _grown_sizes(name: str, sizes: Sequence[int], old: Shape, shape: Shape) -> list[int]:
    units = _units(_role(name), old, shape)[: len(sizes)]
    return [size // before * after for size, (before, after) in zip(sizes, units, strict=True)]


def _grown_tensor(
    name: str, tensor: Tensor, old: Shape, shape: Shape, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    role, sizes = _role(name), _grown_sizes(name, tensor.shape, old, shape)
    if not tensor.is_floating_point() or role in ("d2t", "t2d"):
        return tensor
    grown = torch.empty(sizes, dtype=dtype)
    new, width = grown, (old.hidden_size, shape.hidden_size)
    if _units(role, old, shape)[tensor.ndim - 1] == width:  # vectors side by side
        new, tensor = (one.unflatten(-1, (-1, size)) for one, size in zip((grown, tensor), width[::-1], strict=True))
    grow_weight(role, new, tensor, shape, old, generator)
    return grown


def _grown_fields(
    fields: dict[str, Any], config: Any, shape: Shape, old_target: Shape, target: Shape
) -> dict[str, Any]:
    """Return the fields of config.json with the new sizes, and the new numbers of the layers that are read."""
    sizes = {
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "head_dim": head_dim_of(config),
        "rms_norm_eps": config.rms_norm_eps * config.hidden_size / shape.hidden_size,
        "max_position_embeddings": max(config.max_position_embeddings, MIN_POSITIONS),
    }  # fmt: skip
    own = fields.get("transformer_layer_config")
    fields |= {"transformer_layer_config": own | sizes} if own else sizes
    if "target_hidden_size" in fields:
        fields["target_hidden_size"] = target.hidden_size
    # The hidden states before an old layer are those before its new place, whichever of the two an id means.
    places = [*places_of_layers(old_target.num_layers, target.num_layers), target.num_layers]
    nested = fields.get("eagle_config") or {}
    ids = fields.get(_IDS) or nested.get(_IDS)
    if ids is None:
        ids = [layer - (0 if own else 1) for layer in usual_reads(old_target.num_layers)]
    new_ids = [places[layer] for layer in ids]
    return fields | ({"eagle_config": nested | {_IDS: new_ids}} if nested.get(_IDS) else {_IDS: new_ids})
