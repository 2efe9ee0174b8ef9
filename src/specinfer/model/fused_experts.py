"""Routed experts of fused layers: stacks of matrices, of which each is packed for the native kernels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from specinfer.kernels import ExpertsCall, LinearCall, Opening, Panels, Routing, Scores, choose, packs_type
from specinfer.model.layer_kind import PartKind, find

# By the activation of gates, and of values that have none.
HALVES = {"silu": Opening.SILU_HALVES, "gelu_pytorch_tanh": Opening.GELU_HALVES}
UNGATED = {"relu2": Opening.SQUARES}


def _softmax(router: Any, *, normalizes: bool) -> Routing:
    return Routing(Scores.SOFTMAX, router.top_k, normalizes=normalizes)


def _sigmoids(router: Any) -> Routing:
    return Routing(
        Scores.SIGMOIDS, router.top_k, router.norm_topk_prob, float(router.routed_scaling_factor),
        router.e_score_correction_bias.detach().float().contiguous(), (router.num_group, router.topk_group),
    )  # fmt: skip


# How the routers of transformers choose, by class name.
_ROUTINGS: dict[str, Callable[[Any], Routing]] = {
    "Qwen3NextTopKRouter": lambda router: _softmax(router, normalizes=router.norm_topk_prob),
    "Qwen3_5MoeTopKRouter": lambda router: _softmax(router, normalizes=True),
    "GraniteMoeHybridTopKRouter": lambda router: Routing(Scores.SOFTMAX_OF_CHOSEN, router.top_k),
    "NemotronHTopkRouter": _sigmoids,
}


def has_experts(model: nn.Module) -> bool:
    """Return whether a model has routed experts of a known kind."""
    return any(type(module).__name__ in _ROUTINGS for module in model.modules())


def can_fuse_experts(layer: Any, part: PartKind, activation: str) -> bool:
    """Return whether the experts of a layer are stacks of numbers that native kernels multiply."""
    experts, block = find(layer, part.second), find(layer, part.module)
    is_latent = not isinstance(getattr(block, "fc1_latent_proj", nn.Identity()), nn.Identity)
    opening = _opening(experts, activation)
    weight = getattr(experts, "down_proj", None)
    is_known = type(find(layer, part.first[0])).__name__ in _ROUTINGS and isinstance(weight, nn.Parameter)
    return is_known and not is_latent and opening is not None and packs_type(weight.dtype)  # type: ignore[union-attr]


def _opening(experts: Any, activation: str) -> Opening | None:
    return (HALVES if hasattr(experts, "gate_up_proj") else UNGATED).get(activation)


def experts_of(layer: Any, part: PartKind, activation: str, factor: float) -> tuple[LinearCall, ExpertsCall]:
    """Return the router and the experts of a layer.

    The router multiplies in float32: a small error would choose another expert.
    """
    router, experts = find(layer, part.first[0]), find(layer, part.second)
    opening, routing = _opening(experts, activation), _ROUTINGS[type(router).__name__](router)
    assert opening is not None
    first = experts.gate_up_proj if hasattr(experts, "gate_up_proj") else experts.up_proj
    pairs = [(_call(one), _call(other)) for one, other in zip(first, experts.down_proj, strict=True)]
    scaled = replace(routing, factor=routing.factor * factor)
    return LinearCall(Panels.of(router.weight.detach(), None), dots=False), ExpertsCall(pairs, scaled, opening)


def _call(weight: Tensor) -> LinearCall:
    weight = weight.detach()
    return LinearCall(Panels.of(weight, None), dots=choose(weight.dtype).dots)
