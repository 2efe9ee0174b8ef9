"""A tiny pass through a model that was just loaded: what it stores, and whether it can be trusted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.errors import ModelError, WeightsError, first_line
from specinfer.model.attention import UnsupportedAttentionError
from specinfer.model.batch import ForwardBatch, KVStore, Piece, pack
from specinfer.model.forward import forward
from specinfer.model.kv_cache import KVTensors, LayerShape
from specinfer.model.stage import check_stage, received
from specinfer.tree import TokenTree

_TOKENS = (0, 1, 0)  # different ones: with equal values it would not matter what attention sees


@dataclass(frozen=True, slots=True)
class Probe:
    """What a pass showed."""

    layer_shapes: tuple[LayerShape, ...]
    hidden: Tensor | None  # [tokens, width] what a stage that is not the first was given
    logits: Tensor  # [tokens, vocab]; or [tokens, width] of a stage without a head


class _ProbeStore:
    """Stands in for the cache in the probing pass and notes what each layer stores."""

    def __init__(self, num_layers: int) -> None:
        self.keys: list[Tensor] = [torch.empty(0)] * num_layers
        self.values: list[Tensor] = [torch.empty(0)] * num_layers
        self.num_calls = [0] * num_layers

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        del slots  # always 0, 1, 2, ... here
        self.num_calls[layer] += 1
        self.keys[layer], self.values[layer] = key.contiguous(), value.contiguous()


def probe(model: nn.Module, config: Any, device: torch.device, layers: range | None = None) -> Probe:
    """One tiny pass: does every layer call our attention exactly once, and what does it store?

    Args:
        layers: Those that a stage holds; None: all.

    Raises:
        ModelError: It does not, or what it computes is of no use.
    """
    family = config.model_type
    layers = layers or range(config.get_text_config().num_hidden_layers)
    store = _ProbeStore(len(layers))
    batch = _batch(store, device, native=False)  # what native kernels compute is held against it
    hidden = _hidden(model, device) if layers.start else None
    try:
        with torch.inference_mode():
            logits = forward(model, batch, hidden)
            if hidden is not None:
                check_stage(model, _batch(_ProbeStore(len(layers)), device, native=False), hidden)
    except (ModelError, WeightsError):  # of weights that are read meanwhile
        raise
    except UnsupportedAttentionError as error:
        raise ModelError(f"model: family {family!r} is not supported: {error}") from error
    except Exception as error:
        raise ModelError(
            f"model: family {family!r} is not supported: it does not run with tree attention ({first_line(error)})"
        ) from error
    if silent := [layer for layer, calls in enumerate(store.num_calls) if calls != 1]:
        raise ModelError(
            f"model: family {family!r} is not supported: layers {_ranges(silent)} of {len(store.num_calls)} "
            "do not call the attention interface of transformers once a pass"
        )
    if _has_window(config, layers) and batch.windows == {None}:
        raise ModelError(
            f"model: family {family!r} is not supported with a sliding window: it does not hand the window to attention"
        )
    if not bool(logits.isfinite().all()):
        raise ModelError(
            f"model: {family!r} computes values that are not finite in this dtype; try bfloat16 or float32"
        )
    stored = zip(store.keys, store.values, strict=True)
    return Probe(tuple(LayerShape(k.shape[1], k.shape[2], v.shape[2]) for k, v in stored), hidden, logits)


def agrees(model: nn.Module, probe: Probe, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether another model computes the logits that were seen, but for rounding."""
    hidden = None if probe.hidden is None else probe.hidden.float()
    with torch.inference_mode():
        store = KVTensors(probe.layer_shapes, len(_TOKENS), dtype, device)
        logits = forward(model, _batch(store, device, native=True), hidden)
    spread = (probe.logits - probe.logits.mean(dim=-1, keepdim=True)).norm()
    tolerance = 1e-3 if dtype == torch.float32 else 0.1  # errors of half precision add up from layer to layer
    return bool((logits - probe.logits).norm() <= tolerance * spread + 1e-5)


def _batch(store: KVStore, device: torch.device, *, native: bool) -> ForwardBatch:
    chain = TokenTree.chain(_TOKENS[0], _TOKENS[1:])
    none, slots = torch.arange(0).numpy(), torch.arange(len(_TOKENS)).numpy()
    return pack([Piece.of_span(_TOKENS[:1], chain, none, slots)], store, device, native=native)


def _hidden(model: nn.Module, device: torch.device) -> Tensor:
    like = received(model, len(_TOKENS), next(model.parameters()).dtype, device)
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)


def _has_window(config: Any, layers: range) -> bool:
    config = config.get_text_config()
    if (types := getattr(config, "layer_types", None)) is not None:
        return "sliding_attention" in types[layers.start : layers.stop]
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))


def _ranges(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
