"""Enlarge a trained model so that it computes the same function at a bigger model's cost.

The old weights become one block of each bigger matrix. Added weights are random where they cannot affect the logits,
and zero only where they would write to the residual: new rows of q, k, v, gate and up are random, new columns of o and
down are zero, and new residual dimensions stay zero throughout. Function-preserving growth as in Net2Net (Chen et al.
2016, arXiv:1511.05641), by zero blocks. Whole added layers write nothing but zeros, and are computed all the same.
"""

import copy
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.growth.shard_writer import ShardWriter
from specinfer.model.definition import load_plain
from specinfer.planning.growth_shape import GROWABLE, Shape, head_dim_of, shape_of

MARKER_NAME = "grown.json"
MIN_POSITIONS = 8192  # so that long contexts can be timed, though text there is no better than the model's own
# Standard deviation 0.02, Llama's own initial scale: activations stay near 1 at every width.
_FILL_BOUND = 0.02 * math.sqrt(3)
_CPU = torch.device("cpu")
_RESIDUAL_WRITERS = {"embed_tokens", "o_proj", "down_proj", "fc"}
_COPIED_SUFFIXES = {".json", ".jinja", ".model", ".txt"}


def grow_folder(
    source: Path,
    destination: Path,
    shape: Shape,
    *,
    seed: int = 0,
    dtype: torch.dtype,
    device: torch.device = _CPU,
) -> Path:
    """Grow the model in an HF folder into another HF folder, which appears complete or not at all.

    The weights are made on `device`, one after the other, and no more than one file of them is kept in host memory.
    Random numbers differ between kinds of devices; the function does not.

    A destination grown before from the same source and arguments is kept. One grown from others is replaced.

    Raises:
        ValueError: The source is no folder of a model that can grow, or the destination was not written by growth.
    """
    if not (source / "config.json").is_file():
        raise ValueError(f"source {source} has no config.json: give a Hugging Face model folder")
    kind = json.loads((source / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in GROWABLE:
        raise ValueError(f"source {source} holds model_type {kind!r}: give one of {', '.join(GROWABLE)}")
    sizes = {"shape": asdict(shape), "positions": MIN_POSITIONS, "seed": seed, "dtype": str(dtype)}

    def write(fresh: Path) -> None:
        _write_grown(load_plain(source, "auto").to(device), shape, fresh, seed, dtype)

    return place_grown(source, destination, sizes, write)


def place_grown(source: Path, destination: Path, sizes: Mapping[str, object], write: Callable[[Path], None]) -> Path:
    """Call `write` with a new folder, which becomes the destination with the source's other files; as `grow_folder`.

    Args:
        sizes: What besides the source decides what is written.
    """
    marker = {**sizes, "source": _fingerprint(source)}
    if _is_grown(destination, marker):
        return destination
    is_ours = (destination / MARKER_NAME).is_file() and destination.resolve() != source.resolve()
    if destination.exists() and not is_ours:
        raise ValueError(f"destination {destination} holds something else: remove or rename it")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".grow-") as name:
        fresh = Path(name) / "fresh"
        fresh.mkdir()
        write(fresh)
        for path in sorted(source.iterdir()):
            is_weights = path.name.endswith(".index.json")
            if path.suffix in _COPIED_SUFFIXES and path.name != "config.json" and not is_weights:
                shutil.copyfile(path, fresh / path.name)
        (fresh / MARKER_NAME).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        if destination.exists():
            destination.rename(Path(name) / "stale")
        try:
            fresh.rename(destination)
        except OSError:
            # Another process may have finished the same work first.
            if not _is_grown(destination, marker):
                raise
    return destination


class _Filling:
    """The weights of a grown model, filled in the order of its parameters, which fixes the random numbers."""

    def __init__(self, model: Any, shape: Shape, seed: int) -> None:
        self._shape, self._old = shape, shape_of(model.config)
        self._kept = {new: old for old, new in enumerate(places_in(model.config, shape.num_layers))}
        self._sources = dict(model.named_parameters(remove_duplicate=False))
        self._generator = torch.Generator(model.device).manual_seed(seed)

    def __call__(self, name: str, weight: Tensor) -> None:
        source_name = _source_name(name, self._kept)
        source = self._sources[source_name] if source_name else None
        grow_weight(name.split(".")[-2], weight, source, self._shape, self._old, self._generator)


def places_of_layers(num_old: int, num_layers: int) -> list[int]:
    """Return the new index of each old layer: they are spread evenly, each in the middle of its share."""
    return [(2 * i + 1) * num_layers // (2 * num_old) for i in range(num_old)]


def places_in(config: Any, num_layers: int) -> list[int]:
    """Return the new index of each old layer of a model: the same if layers are of several kinds, whose order stays."""
    is_mixed = len(set(getattr(config, "layer_types", None) or ())) > 1
    return list(range(config.num_hidden_layers)) if is_mixed else places_of_layers(config.num_hidden_layers, num_layers)


@torch.no_grad()
def _write_grown(model: Any, shape: Shape, folder: Path, seed: int, dtype: torch.dtype) -> None:
    """Write the grown model, one weight after the other."""
    old = shape_of(model.config)
    check_contains(shape, old)
    config = _grown_config(model.config, shape, old, dtype)
    with torch.device("meta"):
        grown = type(model)(config)
    grown.tie_weights()
    fill, writer = _Filling(model, shape, seed), ShardWriter(folder)
    for name, planned in grown.named_parameters():  # a tied head is not among them
        weight = torch.empty(planned.shape, dtype=dtype, device=model.device)
        fill(name, weight)
        writer.add(name, weight)
    writer.close()
    config.architectures = [type(grown).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _source_name(name: str, kept: dict[int, int]) -> str | None:
    """Return the name of the old weight that a new one contains, or None in an added layer."""
    parts = name.split(".")
    if parts[1] == "layers":
        index = int(parts[2])
        if index not in kept:
            return None
        parts[2] = str(kept[index])
    return ".".join(parts)


def grow_weight(
    role: str, new: Tensor, old: Tensor | None, shape: Shape, small: Shape, generator: torch.Generator
) -> None:
    """Write `new` around `old`, which is at most as large in every size and None in an added layer."""
    if role in _RESIDUAL_WRITERS:
        new.zero_()
    else:
        new.uniform_(-_FILL_BOUND, _FILL_BOUND, generator=generator)
    if role.endswith("norm"):
        scale = math.sqrt(small.hidden_size / shape.hidden_size)
        new.add_(1.0).mul_(scale)
        # Multiply in float32 and round once. In bfloat16 the error is at most 2**-8 of a weight, as large as the
        # model's own error on each normed activation. Greedy tokens change only where the two best logits nearly tie. A
        # ratio of widths that is a power of 4 rounds nothing.
        old = None if old is None else old.float() * scale
    if old is None:
        return
    if role in {"q_proj", "o_proj"}:
        # Split the heads into [kv_head, query_in_group, head_dim], for old queries to keep their KV.
        axis = 0 if role == "q_proj" else 1
        new = new.unflatten(axis, (shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, -1))
        old = old.unflatten(axis, (small.num_kv_heads, small.num_heads // small.num_kv_heads, -1))
    new[tuple(slice(size) for size in old.shape)].copy_(old)


def _grown_config(config: Any, shape: Shape, old: Shape, dtype: torch.dtype) -> Any:
    """Return a copy of a config with the new sizes; all but sizes, positions, epsilon and dtype stay the same."""
    grown = copy.deepcopy(config)
    grown.head_dim = head_dim_of(config)
    grown.hidden_size, grown.intermediate_size = shape.hidden_size, shape.intermediate_size
    grown.num_hidden_layers = shape.num_layers
    if kinds := getattr(config, "layer_types", None):
        grown.layer_types = [kinds[i % len(kinds)] for i in range(shape.num_layers)]
    grown.num_attention_heads, grown.num_key_value_heads = shape.num_heads, shape.num_kv_heads
    # Zeros appended to the residual shrink its mean square by old/new, and epsilon must follow.
    grown.rms_norm_eps = config.rms_norm_eps * old.hidden_size / shape.hidden_size
    if config.rope_parameters.get("rope_type", "default") == "default":  # does not depend on the maximum
        grown.max_position_embeddings = max(config.max_position_embeddings, MIN_POSITIONS)
    grown.dtype = dtype
    return grown


def check_contains(shape: Shape, old: Shape) -> None:
    for field in fields(Shape):
        size, least = getattr(shape, field.name), getattr(old, field.name)
        if size < least:
            raise ValueError(f"{field.name}={size} is below the model's {least}: give at least that")
    for name, divisor in (("num_heads", "num_kv_heads"), ("hidden_size", "num_heads")):
        if getattr(shape, name) % getattr(shape, divisor):
            raise ValueError(
                f"{name}={getattr(shape, name)} is not a multiple of {divisor}={getattr(shape, divisor)}: make it one"
            )
    group, least = shape.num_heads // shape.num_kv_heads, old.num_heads // old.num_kv_heads
    if group < least:
        raise ValueError(
            f"num_kv_heads={shape.num_kv_heads} leaves {group} query heads to each, below the "
            f"model's {least}: give at most {shape.num_heads // least} KV heads"
        )


def _fingerprint(folder: Path) -> str:
    """Return a hash of a model folder's config and weights."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")]):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    digest.update((folder / "config.json").read_bytes())
    return digest.hexdigest()


def _is_grown(folder: Path, marker: dict[str, object]) -> bool:
    path = folder / MARKER_NAME
    return path.is_file() and json.loads(path.read_text(encoding="utf-8")) == marker
