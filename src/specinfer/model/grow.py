"""Enlarge a trained Llama so that it computes the same function at a bigger model's cost.

The old weights become one block of each bigger matrix. What is added is random wherever it cannot
reach the logits, and zero only where it would write to the residual: new rows of q, k, v, gate and
up are random, new columns of o and down are zero, new residual dimensions stay zero throughout.
Function-preserving growth as in Net2Net (Chen et al. 2016, arXiv:1511.05641), by zero blocks.
"""

import copy
import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

MARKER_NAME = "grown.json"
MAX_EXCESS = 1.1

# Parameters to layers, in the proportions of published Llama-like models.
_USUAL_DEPTHS = {1e7: 6, 1e8: 12, 3e8: 20, 1e9: 20, 3e9: 28, 7e9: 32, 13e9: 40, 34e9: 48, 70e9: 80}
_USUAL_GROUP = 4
_USUAL_MLP_RATIO = 3.3
MIN_POSITIONS = 8192  # so that long contexts can be timed, though the text there is no better than the model's own
# Standard deviation 0.02, Llama's own initial scale: activations stay near 1 at every width.
_FILL_BOUND = 0.02 * math.sqrt(3)
_COPIED_SUFFIXES = {".json", ".jinja", ".model", ".txt"}


@dataclass(frozen=True, slots=True)
class Shape:
    """The five sizes in which a Llama may grow; head_dim and vocabulary stay."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int

    def num_parameters(self, vocab_size: int, head_dim: int, tied: bool) -> int:
        """Count the weights of a bias-free Llama of this shape, tied embeddings counted once."""
        attention = 2 * self.hidden_size * head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = vocab_size * self.hidden_size * (1 if tied else 2)
        return embeddings + self.num_layers * layer + self.hidden_size


def shape_of(config: LlamaConfig) -> Shape:
    """Read a model's shape; ValueError if it is not a Llama without biases."""
    if config.model_type != "llama":
        raise ValueError(f"model_type is {config.model_type!r}: only 'llama' can grow; give a Llama model")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name):
            raise ValueError(f"{name} is set: only Llama models without biases can grow")
    return Shape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.intermediate_size,
    )


def shape_for(name: str, config: LlamaConfig, *, num_layers: int | None = None) -> Shape:
    """Choose a realistic shape of the named size ("10m", "1b", "2.5b") that the model can grow to.

    The count is at least the named one and at most 10% above. `num_layers` holds the depth, for
    shallow drafters. ValueError for a malformed name, a size below the model's own, a depth below
    its depth, or a size that no shape meets.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mb])", name.lower())
    wanted = float(match[1]) * {"m": 1e6, "b": 1e9}[match[2]] if match else 0.0
    if wanted == 0.0:
        raise ValueError(f"size {name!r} is not a number and 'm' or 'b': write '300m' or '7b'")
    old, head_dim, tied = shape_of(config), _head_dim(config), config.tie_word_embeddings
    own = old.num_parameters(config.vocab_size, head_dim, tied)
    if wanted < own:
        raise ValueError(f"size {name!r} is below the model's own {own / 1e6:.2f}m parameters: name a larger size")
    if num_layers is not None and num_layers < old.num_layers:
        raise ValueError(f"num_layers={num_layers} is below the model's {old.num_layers}: give at least that")
    usual = _USUAL_DEPTHS[min(_USUAL_DEPTHS, key=lambda size: abs(math.log(wanted / size)))]
    depth = num_layers or max(usual, old.num_layers)

    shapes = [
        shape
        for shape in _candidates(old, config, depth, wanted)
        if shape.num_parameters(config.vocab_size, head_dim, tied) <= MAX_EXCESS * wanted
    ]
    if not shapes:
        raise ValueError(f"size {name!r} cannot be met with {depth} layers: change num_layers or name a larger size")
    usual_mlp = math.log(_USUAL_MLP_RATIO)
    return min(shapes, key=lambda s: abs(math.log(s.intermediate_size / s.hidden_size) - usual_mlp))


@torch.no_grad()
def grow(model: LlamaForCausalLM, shape: Shape, *, seed: int = 0, dtype: torch.dtype | None = None) -> LlamaForCausalLM:
    """Return a new model of `shape` with the same logits, dense, on the same device, in eval mode.

    Peak memory is about the result's size. ValueError if the model is not a bias-free Llama or the
    shape does not contain it.
    """
    if not isinstance(model, LlamaForCausalLM):
        raise ValueError(f"model is a {type(model).__name__}: give a LlamaForCausalLM")
    old = shape_of(model.config)
    _check_contains(shape, old)
    config = _grown_config(model.config, shape, old, dtype or model.dtype)
    with torch.device("meta"):
        grown = LlamaForCausalLM(config)
    grown.to(dtype=dtype or model.dtype)
    grown.to_empty(device=model.device)
    grown.tie_weights()
    # The rotary frequencies are not saved and to_empty left them undefined, so they are made anew.
    grown.model.rotary_emb = type(model.model.rotary_emb)(config).to(model.device)
    grown.generation_config = copy.deepcopy(model.generation_config)

    # Old layers are spread evenly, each in the middle of its share: {new index: old index}.
    kept = {(2 * i + 1) * shape.num_layers // (2 * old.num_layers): i for i in range(old.num_layers)}
    sources = dict(model.named_parameters(remove_duplicate=False))
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, weight in grown.named_parameters():
        source_name = _source_name(name, kept)
        source = sources[source_name] if source_name else None
        _grow_weight(name.split(".")[-2], weight, source, shape, old, generator)
    return grown.eval()


def grow_folder(source: Path, destination: Path, shape: Shape, *, seed: int = 0, dtype: torch.dtype) -> Path:
    """Grow the model in an HF folder into another HF folder, appearing whole or not at all.

    A destination grown before from the same source and arguments is kept as it is; one grown from
    others is replaced. ValueError if the source is no Llama folder, or if the destination was not
    written by this function.
    """
    if not (source / "config.json").is_file():
        raise ValueError(f"source {source} has no config.json: give a Hugging Face model folder")
    kind = json.loads((source / "config.json").read_text()).get("model_type")
    if kind != "llama":
        raise ValueError(f"source {source} holds model_type {kind!r}: give a Llama model")
    marker = {
        "shape": asdict(shape),
        "positions": MIN_POSITIONS,
        "seed": seed,
        "dtype": str(dtype),
        "source": _fingerprint(source),
    }
    if _is_grown(destination, marker):
        return destination
    is_ours = (destination / MARKER_NAME).is_file() and destination.resolve() != source.resolve()
    if destination.exists() and not is_ours:
        raise ValueError(f"destination {destination} holds something else: remove or rename it")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".grow-") as name:
        fresh = Path(name) / "fresh"
        fresh.mkdir()
        model = LlamaForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
        grow(model, shape, seed=seed, dtype=dtype).save_pretrained(fresh)
        for path in sorted(source.iterdir()):
            is_weights = path.name.endswith(".index.json")
            if path.suffix in _COPIED_SUFFIXES and path.name != "config.json" and not is_weights:
                shutil.copyfile(path, fresh / path.name)
        (fresh / MARKER_NAME).write_text(json.dumps(marker, indent=2) + "\n")
        if destination.exists():
            destination.rename(Path(name) / "stale")
        try:
            fresh.rename(destination)
        except OSError:
            # Another process may have finished the same work first.
            if not _is_grown(destination, marker):
                raise
    return destination


def _source_name(name: str, kept: dict[int, int]) -> str | None:
    """Name the old weight that a new one holds; None in an added layer."""
    parts = name.split(".")
    if parts[1] == "layers":
        index = int(parts[2])
        if index not in kept:
            return None
        parts[2] = str(kept[index])
    return ".".join(parts)


def _grow_weight(
    role: str, new: Tensor, old: Tensor | None, shape: Shape, small: Shape, generator: torch.Generator
) -> None:
    """Write `new` around `old`, every size of which is at most new's; None in an added layer."""
    if role in {"embed_tokens", "o_proj", "down_proj"}:  # those that write to the residual
        new.zero_()
    else:
        new.uniform_(-_FILL_BOUND, _FILL_BOUND, generator=generator)
    if role.endswith("norm"):
        scale = math.sqrt(small.hidden_size / shape.hidden_size)
        new.add_(1.0).mul_(scale)
        # Multiplied in float32 and rounded once. In bfloat16 that is 2**-8 of a weight at most, the
        # error the model itself makes on each normed activation: greedy tokens change only where the
        # two best logits nearly tie. A ratio of widths that is a power of 4 rounds nothing.
        old = None if old is None else old.float() * scale
    if old is None:
        return
    if role in {"q_proj", "o_proj"}:
        # Split the heads into [kv_head, query_in_group, head_dim], for old queries to keep their KV.
        axis = 0 if role == "q_proj" else 1
        new = new.unflatten(axis, (shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, -1))
        old = old.unflatten(axis, (small.num_kv_heads, small.num_heads // small.num_kv_heads, -1))
    new[tuple(slice(size) for size in old.shape)].copy_(old)


def _grown_config(config: LlamaConfig, shape: Shape, old: Shape, dtype: torch.dtype) -> LlamaConfig:
    """Copy a config with the new sizes; all but the sizes, positions, epsilon and dtype stay."""
    grown = copy.deepcopy(config)
    grown.head_dim = _head_dim(config)
    grown.hidden_size, grown.intermediate_size = shape.hidden_size, shape.intermediate_size
    grown.num_hidden_layers = shape.num_layers
    grown.num_attention_heads, grown.num_key_value_heads = shape.num_heads, shape.num_kv_heads
    # Zeros appended to the residual shrink its mean square by old/new, and epsilon must follow.
    grown.rms_norm_eps = config.rms_norm_eps * old.hidden_size / shape.hidden_size
    if config.rope_parameters.get("rope_type", "default") == "default":  # nothing depends on how many there are
        grown.max_position_embeddings = max(config.max_position_embeddings, MIN_POSITIONS)
    grown.dtype = dtype
    return grown


def _head_dim(config: LlamaConfig) -> int:
    return int(config.head_dim or config.hidden_size // config.num_attention_heads)


def _check_contains(shape: Shape, old: Shape) -> None:
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


def _candidates(old: Shape, config: LlamaConfig, depth: int, wanted: float) -> Iterator[Shape]:
    """Yield shapes of every width, the MLP of each widened until the count is at least `wanted`."""
    head_dim, group = _head_dim(config), old.num_heads // old.num_kv_heads
    step = max(1, (128 if wanted < 1e8 else 256 if wanted < 1e9 else 512) // head_dim)
    most_heads = int(math.sqrt(wanted / (2 * depth)) / head_dim)
    for heads in (old.num_heads, *range(step, most_heads + 1, step)):
        hidden = old.hidden_size if heads == old.num_heads else heads * head_dim
        kv_counts = [n for n in range(old.num_kv_heads, heads // group + 1) if heads % n == 0]
        if heads < old.num_heads or hidden < old.hidden_size or not kv_counts:
            continue
        kv_heads = min(kv_counts, key=lambda n: abs(math.log(heads / n / _USUAL_GROUP)))
        frame = Shape(hidden, depth, heads, kv_heads, old.intermediate_size)
        count = frame.num_parameters(config.vocab_size, head_dim, config.tie_word_embeddings)
        # Matrix kernels tile these multiples without a remainder.
        tile = 128 if hidden >= 1024 else 64
        missing = max(0.0, wanted - count) / (3 * hidden * depth)
        tiles = math.ceil((old.intermediate_size + missing) / tile)
        yield replace(frame, intermediate_size=tiles * tile)


def _fingerprint(folder: Path) -> str:
    """Hash a model folder's config and weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    digest.update((folder / "config.json").read_bytes())
    return digest.hexdigest()


def _is_grown(folder: Path, marker: dict[str, object]) -> bool:
    path = folder / MARKER_NAME
    return path.is_file() and json.loads(path.read_text()) == marker
