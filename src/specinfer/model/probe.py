"""A tiny pass through a model that was just loaded, which shows what it stores and whether it can be used."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError, WeightsError, first_line
from specinfer.model.attention import UnsupportedAttentionError
from specinfer.model.batch import Piece, pack
from specinfer.model.context_length import max_position_of
from specinfer.model.definition import shared_layers
from specinfer.model.forward import attends_by_itself, forward
from specinfer.model.kv_cache import NO_SLOTS
from specinfer.model.kv_tensors import LayerShape
from specinfer.model.layers.check import Reference, Verdict, judge, recording
from specinfer.model.past import PACKED, way_of
from specinfer.model.recurrent.layers import num_stored, stores
from specinfer.model.recurrent.states import RecurrentStates
from specinfer.model.sharding.stage import check_stage, random_hidden
from specinfer.ops.kv_types import NO_SCALES

# Vocabularies have their most common words after the special tokens and bytes.
_FIRST_COMMON, _APART = 261, 37
# With gaps, so that few tokens cover long distances; positions around a sliding window's end are added.
_POSITIONS = (0, 1, 2, 3, 4, 5, 6, 30, 31, 100, 250)
BYPASSED = "do not call the attention interface of transformers"  # part of a message


@dataclass(frozen=True, slots=True)
class Probe:
    """The results of the pass.

    Attributes:
        logits: [tokens, vocab], or [tokens, width] of a stage without a head.
        reference: Recorded results to check rebuilt layers against, or None if it was not asked for.
    """

    layer_shapes: tuple[LayerShape, ...]
    logits: Tensor
    reference: Reference | None = None

    def judge(self, model: nn.Module, dtype: torch.dtype, rounded_to: str | None) -> Verdict:
        """Check a model with rebuilt layers against the reference; see `check.judge`."""
        assert self.reference is not None
        return judge(model, self.reference, self.logits, self.layer_shapes, dtype, rounded_to)


def common_tokens(vocab_size: int, count: int) -> list[int]:
    """Return different tokens that are common in texts; random ones cause rounding errors that no text does."""
    return [(_FIRST_COMMON + _APART * i) % vocab_size for i in range(count)]


class _ProbeStore:
    """A replacement for the cache in the probing pass, which records what each layer stores."""

    def __init__(self, num_layers: int) -> None:
        self.keys: list[Tensor] = [torch.empty(0, 0, 0)] * num_layers
        self.values: list[Tensor] = [torch.empty(0, 0, 0)] * num_layers
        self.scales = [NO_SCALES] * num_layers
        self.taps: dict[int, Tensor] = {}
        self.states = RecurrentStates({}, 0, 0, torch.device("cpu"))
        self.num_calls = [0] * num_layers

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        del slots  # always 0, 1, 2, ... here
        self.num_calls[layer] += 1
        self.keys[layer], self.values[layer] = key.contiguous(), value.contiguous()

    def cut(self, count: int) -> None:
        """Forget the places after the first of them."""
        del self.keys[count:], self.values[count:], self.num_calls[count:]


def probe(
    model: nn.Module, config: Any, device: torch.device, layers: range | None = None, *, records: bool = False
) -> Probe:
    """Run one tiny pass, and check that every layer calls our attention exactly once.

    Args:
        layers: Layers of a stage, or None for all.
        records: Whether to record a reference; only for definitions that can be fused.

    Raises:
        ModelError: A layer does not, or the results are not usable.
    """
    family = config.model_type
    layers = layers or range(config.get_text_config().num_hidden_layers)
    piece = _piece(config)
    count = num_stored(config, len(layers))
    if is_own := not records and attends_by_itself(model):  # indexers of keys store beside attention
        count = 2 * len(layers)
    store, spare = _ProbeStore(count), _ProbeStore(count)
    # Without native kernels, because their results are compared with this pass.
    batch, recorded = (pack([piece], each, device, native=False) for each in (store, spare))
    dtype = next(model.parameters()).dtype
    hidden = random_hidden(model, len(piece.tokens), dtype, device) if layers.start else None
    reference = Reference(piece) if records else None
    try:
        with torch.inference_mode():
            with nullcontext() if reference is None else recording(model, reference, recorded):
                logits = forward(model, batch, hidden if hidden is None or reference is None else hidden.float())
            if hidden is not None:
                check_stage(model, pack([piece], _ProbeStore(len(layers)), device, native=False), hidden)
    except (ModelError, WeightsError):  # of weights that are read during the pass
        raise
    except UnsupportedAttentionError as error:
        raise ModelError(f"model: family {family!r} is not supported: {error}") from error
    except Exception as error:
        raise ModelError(
            f"model: family {family!r} is not supported: it does not run with tree attention ({first_line(error)})"
        ) from error
    if is_own and not any(store.num_calls[len(layers) :]):
        store.cut(len(layers))
    calls = enumerate(store.num_calls[: len(layers)] if is_own else store.num_calls)
    if silent := [layer for layer, num_calls in calls if num_calls != stores(config, layers.start + layer)]:
        raise ModelError(
            f"model: family {family!r} is not supported: layers {_ranges(silent)} of {len(store.num_calls)} "
            f"{BYPASSED} once a pass"
        )
    if way_of(model) == PACKED and _has_window(config, layers) and set(batch.windows.values()) == {None}:
        raise ModelError(
            f"model: family {family!r} is not supported with a sliding window: it does not hand the window to attention"
        )
    if not bool(logits.isfinite().all()):
        raise ModelError(
            f"model: {family!r} computes values that are not finite in this dtype; try bfloat16 or float32"
        )
    stored, shared = zip(store.keys, store.values, strict=True), shared_layers(config)
    shapes = tuple(
        LayerShape(k.shape[1], k.shape[2], v.shape[2], attends=i in batch.windows, shares=shared.get(i))
        for i, (k, v) in enumerate(stored)
    )
    return Probe(shapes, logits, reference)


def _piece(config: Any) -> Piece:
    """Return a piece whose tokens resemble the beginning of a text."""
    text_config = config.get_text_config()
    window, first = getattr(text_config, "sliding_window", None), getattr(text_config, "bos_token_id", None)
    ends = range(window - 1, window + 2) if isinstance(window, int) and window else ()  # 0 is none, in qwen2_moe
    positions = sorted(place for place in {*_POSITIONS, *ends} if place < max_position_of(config))
    tokens, count = common_tokens(text_config.vocab_size, len(positions)), len(positions)
    if isinstance(first, int) and 0 <= first < text_config.vocab_size:
        tokens[0] = first
    return Piece(tokens, positions, NO_SLOTS, np.arange(count), np.tri(count, dtype=np.bool_), count)


def _has_window(config: Any, layers: range) -> bool:
    config = config.get_text_config()
    if (types := getattr(config, "layer_types", None)) is not None:
        return "sliding_attention" in types[layers.start : layers.stop]
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))


def _ranges(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
