"""The sizes that a model may grow to, and the choice of realistic sizes for a number of parameters.

A Llama grows to a published model's proportions. Other families, and files of codes, keep their width and their heads,
so that every norm computes the same bits, and grow in layers and in their MLPs. Drafters get no more layers, and a
hundredth of the target's parameters, so that costs relate as those of real pairs.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

MAX_EXCESS = 1.1
GROWABLE = ("llama", "qwen2", "qwen3", "gemma3_text")  # model types
_DRAFTER_FRACTION = 0.01

# Number of layers by number of parameters, in the proportions of published Llama-like models.
_USUAL_DEPTHS = {1e7: 6, 1e8: 12, 3e8: 20, 1e9: 20, 3e9: 28, 7e9: 32, 13e9: 40, 34e9: 48, 70e9: 80}
_USUAL_GROUP = 4
_USUAL_MLP_RATIO = 3.3
# A wider MLP gets more layers instead: the activations of some rows would leave the caches that hold real ones.
_WIDEST_MLP = 20
_MLP_STEP = 256  # numbers that share a scale in the largest blocks of GGUF files


@dataclass(frozen=True, slots=True)
class Shape:
    """The five sizes in which a model may grow; head_dim and vocabulary stay the same."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int

    def num_parameters(self, vocab_size: int, head_dim: int, tied: bool) -> int:
        """Return the number of weights of a Llama of this shape, without biases; tied embeddings count once."""
        attention = 2 * self.hidden_size * head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = vocab_size * self.hidden_size * (1 if tied else 2)
        return embeddings + self.num_layers * layer + self.hidden_size


def shape_of(config: Any) -> Shape:
    """Return a model's shape.

    Raises:
        ValueError: The model cannot grow.
    """
    if config.model_type not in GROWABLE:
        raise ValueError(f"model_type is {config.model_type!r}, which cannot grow; give one of {', '.join(GROWABLE)}")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise ValueError(f"{name} is set: only models without it can grow; give another model")
    return Shape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.intermediate_size,
    )


def shape_for(name: str, config: Any, *, num_layers: int | None = None, keeps_width: bool | None = None) -> Shape:
    """Choose a realistic shape of the named size ("10m", "1b", "2.5b") that the model can grow to.

    The number of parameters is at least the named one and at most 10% above it.

    Args:
        num_layers: Number of layers of the shape, for shallow drafters. None to choose it.
        keeps_width: Whether width and heads stay the same. None: those of all families but Llama do.

    Raises:
        ValueError: The name is malformed, the size is below the model's own, `num_layers` is below the model's, or no
            shape has this size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mb])", name.lower())
    wanted = float(match[1]) * {"m": 1e6, "b": 1e9}[match[2]] if match else 0.0
    if wanted == 0.0:
        raise ValueError(f"size {name!r} is not a number and 'm' or 'b': write '300m' or '7b'")
    old, head_dim, tied = shape_of(config), head_dim_of(config), config.tie_word_embeddings
    own = old.num_parameters(config.vocab_size, head_dim, tied)
    if wanted < own:
        raise ValueError(f"size {name!r} is below the model's own {own / 1e6:.2f}m parameters: name a larger size")
    if num_layers is not None and num_layers < old.num_layers:
        raise ValueError(f"num_layers={num_layers} is below the model's {old.num_layers}: give at least that")
    if keeps_width is None:
        keeps_width = config.model_type != "llama"
    usual = _USUAL_DEPTHS[min(_USUAL_DEPTHS, key=lambda size: abs(math.log(wanted / size)))]
    depth = num_layers or (old.num_layers if keeps_width else max(usual, old.num_layers))
    if keeps_width:
        candidates = _of_same_width(old, config, num_layers, wanted)
    else:
        candidates = _candidates(old, config, depth, wanted)
    shapes = [
        shape for shape in candidates if shape.num_parameters(config.vocab_size, head_dim, tied) <= MAX_EXCESS * wanted
    ]
    if not shapes:
        raise ValueError(f"size {name!r} cannot be met with {depth} layers: change num_layers or name a larger size")
    if keeps_width:
        return next((shape for shape in shapes if shape.intermediate_size <= _WIDEST_MLP * old.hidden_size), shapes[-1])
    usual_mlp = math.log(_USUAL_MLP_RATIO)
    return min(shapes, key=lambda s: abs(math.log(s.intermediate_size / s.hidden_size) - usual_mlp))


def _candidates(old: Shape, config: Any, depth: int, wanted: float) -> Iterator[Shape]:
    """Yield shapes of every width, the MLP of each widened until the count is at least `wanted`."""
    head_dim, group = head_dim_of(config), old.num_heads // old.num_kv_heads
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


def _of_same_width(old: Shape, config: Any, num_layers: int | None, wanted: float) -> Iterator[Shape]:
    """Yield shapes of the model's own width and heads with ever more layers, as many times the model's own."""
    head_dim, tied = head_dim_of(config), config.tie_word_embeddings
    depths = (old.num_layers * times for times in itertools.count(1)) if num_layers is None else (num_layers,)
    for depth in depths:
        frame = replace(old, num_layers=depth)
        missing = wanted - frame.num_parameters(config.vocab_size, head_dim, tied)
        if missing < 0 and depth > old.num_layers:
            return
        wider = math.ceil(max(0.0, missing) / (3 * old.hidden_size * depth) / _MLP_STEP) * _MLP_STEP
        yield replace(frame, intermediate_size=old.intermediate_size + wider)


def head_dim_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def drafter_shape(target: Shape, target_config: Any, config: Any, *, keeps_width: bool | None = None) -> Shape | None:
    """Return the shape that a drafter grows to with a target of a shape, or None if it is large enough.

    Args:
        target_config, config: Configurations of the target and of the drafter.
        keeps_width: As for `shape_for`.

    Raises:
        ValueError: The drafter cannot grow to it.
    """
    old, wanted = shape_of(config), _DRAFTER_FRACTION * parameters_of(target, target_config)
    if parameters_of(old, config) >= wanted:
        return None
    size = f"{math.ceil(wanted / 1e4) / 100:g}m"
    return shape_for(size, config, num_layers=old.num_layers, keeps_width=keeps_width)


def parameters_of(shape: Shape, config: Any) -> int:
    """Return the number of parameters of a model of a shape, with the other sizes of a configuration."""
    return shape.num_parameters(config.vocab_size, head_dim_of(config), config.tie_word_embeddings)
