"""Enlarge an EAGLE-3 or block head together with its target, so that it drafts the same at a bigger head's cost.

As in `targets.py`, new residual dimensions stay zero. The head reads the hidden states of a grown target, which are
zero there too. Where a weight reads several vectors side by side, each of them gets its own new columns. Heads of
attention and the vectors of DSpark's pairs keep their sizes.
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

from benchmarks.growth.targets import MIN_POSITIONS, check_contains, grow_weight, place_grown, places_of_layers
from specinfer.model.definition import make_trunk
from specinfer.model.heads import block, eagle3
from specinfer.planning.growth_shape import Shape, head_dim_of, shape_of

GROWABLE = ("EAGLE-3", "DFlash", "JetSpec", "DSpark")  # formats
_FAMILIES = ("llama", "qwen3")  # of layers
_NESTED = ("eagle_config", "dflash_config", "dspark_config")  # objects with a part of a configuration's fields
_EAGLE_IDS, _IDS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"  # numbers of the target's layers
_OWN_IDS = "target_layer_ids"
_KEPT = ("d2t", "t2d", "head_norm", "markov_w1", "markov_w2")


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
    """Grow the head in a folder for a target that grows from one shape to another; see `grow_folder`."""
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
    """Return the sizes of a head's layers as the configuration of Llama layers, which Qwen3's are besides two norms."""
    fields = _fields(source)
    own = fields.get("transformer_layer_config", fields)
    family = own.get("model_type", "llama")
    if family not in _FAMILIES:
        raise ValueError(f"{source} has layers of family {family!r}: only those of {' and '.join(_FAMILIES)} can grow")
    kept = {name: value for name, value in own.items() if name not in ("architectures", "torch_dtype", "dtype")}
    changes = {"model_type": "llama", "num_hidden_layers": int(own.get("num_hidden_layers") or 1)}
    return make_trunk(kept | changes).config


def _role(name: str) -> str:
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return "head_norm"
    if name.startswith("confidence_head."):
        return "confidence"
    return "norm" if "norm" in name else name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]


def _units(role: str, old: Shape, shape: Shape) -> tuple[tuple[int, int], ...]:
    """Return for each axis what its size is a multiple of, before and after growth; (1, 1) for one that stays."""
    width, mlp = (old.hidden_size, shape.hidden_size), (old.intermediate_size, shape.intermediate_size)
    queries, keys, same = (old.num_heads, shape.num_heads), (old.num_kv_heads, shape.num_kv_heads), (1, 1)
    return {
        "q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width), "o_proj": (width, queries),
        "gate_proj": (mlp, width), "up_proj": (mlp, width), "down_proj": (width, mlp),
        "fc": (width, width), "norm": (width,), "lm_head": (same, width), "embed_tokens": (same, width),
        "mask_hidden": (same, same, width), **dict.fromkeys(_KEPT, (same, same)),
    }[role]  # fmt: skip


def _grown_sizes(name: str, sizes: Sequence[int], old: Shape, shape: Shape) -> list[int]:
    if _role(name) == "confidence":  # of a row of the block and, after it, the vector of a token
        return [*sizes[:-1], sizes[-1] + shape.hidden_size - old.hidden_size] if len(sizes) > 1 else list(sizes)
    units = _units(_role(name), old, shape)[: len(sizes)]
    return [size // before * after for size, (before, after) in zip(sizes, units, strict=True)]


def _grown_tensor(
    name: str, tensor: Tensor, old: Shape, shape: Shape, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    role, sizes = _role(name), _grown_sizes(name, tensor.shape, old, shape)
    if role in _KEPT:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor
    if role == "confidence":
        parts = tensor.split([old.hidden_size, tensor.shape[-1] - old.hidden_size], -1) if tensor.ndim > 1 else ()
        added = (parts[0], parts[0].new_zeros(1, shape.hidden_size - old.hidden_size), parts[1]) if parts else (tensor,)
        return torch.cat(added, dim=-1).to(dtype)
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
    stated = {"target_hidden_size": target.hidden_size, "num_target_layers": target.num_layers}
    fields |= {name: size for name, size in stated.items() if name in fields}
    # The hidden states before an old layer are those before its new place, whichever of the two an id means.
    places = [*places_of_layers(old_target.num_layers, target.num_layers), target.num_layers]
    if not any({_EAGLE_IDS, _IDS, _OWN_IDS} & part.keys() for part in _parts(fields)):
        fields |= _usual_ids(fields, old_target.num_layers, config.num_hidden_layers)
    for part in _parts(fields):
        part |= {name: [places[i] for i in part[name]] for name in (_EAGLE_IDS, _IDS, _OWN_IDS) if part.get(name)}
    return fields


def _parts(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that have a head's fields."""
    return [fields, *(fields[name] for name in _NESTED if fields.get(name))]


def _usual_ids(fields: dict[str, Any], num_layers: int, num_own: int) -> dict[str, list[int]]:
    """Return the ids of the layers that are read where a configuration names none."""
    is_speculators = "transformer_layer_config" in fields
    if any("block_size" in part for part in _parts(fields)):
        reads, name = block.usual_reads(num_layers, num_own), _IDS if is_speculators else _OWN_IDS
    else:
        reads, name = list(eagle3.usual_reads(num_layers)), _EAGLE_IDS
    return {name: reads if is_speculators else [layer - 1 for layer in reads]}
