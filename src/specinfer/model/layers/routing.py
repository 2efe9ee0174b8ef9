"""Routed experts of native layers: how routers choose, and stacks of matrices, packed for native code, or codes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from specinfer.model.layers.plan import LayerPlan, PartPlan, find
from specinfer.model.quantized_experts import QuantizedExperts
from specinfer.ops import (
    Ending,
    ExpertsCall,
    LinearCall,
    Opening,
    Panels,
    Routing,
    Scores,
    packs_type,
    quantize,
)
from specinfer.ops.quantization import Bits

# By the activation of gates, and of values that have none.
HALVES = {"silu": Opening.SILU_HALVES, "gelu_pytorch_tanh": Opening.GELU_HALVES}
UNGATED = {"relu2": Opening.SQUARES}
OF_INPUTS = {"silu": Opening.SILU_OF_INPUTS, "gelu_pytorch_tanh": Opening.GELU_OF_INPUTS}


def _softmax(router: Any, *, normalizes: bool) -> Routing:
    return Routing(Scores.SOFTMAX, router.top_k, normalizes=normalizes)


def _by_probability(router: Any, _block: Any) -> Routing:
    return _softmax(router, normalizes=router.norm_topk_prob)


def _sigmoids(router: Any, bias: Tensor | None, groups: tuple[int, int] = (1, 1)) -> Routing:
    factor = float(router.routed_scaling_factor)
    return Routing(Scores.SIGMOIDS, router.top_k, router.norm_topk_prob, factor, _as_bias(bias), groups)


def _sigmoids_of(router: Any, block: Any, factor: float) -> Routing:
    bias = _as_bias(block.e_score_correction_bias)
    return Routing(Scores.SIGMOIDS, router.top_k, normalizes=True, factor=float(factor), bias=bias)


def _of_gemma4(router: Any, _block: Any) -> Routing:
    weight = router.scale.detach().float() * router.scalar_root_size
    scales = router.per_expert_scale.detach().float().contiguous()
    return Routing(Scores.SOFTMAX, router.config.top_k_experts, normalizes=True, scales=scales, norm=weight)


def _as_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float().flatten().contiguous()


# How the routers of transformers choose, by class name: functions of a router and the module that it is in.
_ROUTINGS: dict[str, Callable[[Any, Any], Routing]] = {
    **dict.fromkeys(
        ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "OlmoeTopKRouter"), _by_probability
    ),
    **dict.fromkeys(("Qwen3_5MoeTopKRouter", "MixtralTopKRouter"), lambda router, _: _softmax(router, normalizes=True)),
    **dict.fromkeys(
        ("GraniteMoeTopKRouter", "GraniteMoeSharedTopKRouter", "GraniteMoeHybridTopKRouter"),
        lambda router, _: Routing(Scores.SOFTMAX_OF_CHOSEN, router.top_k),
    ),
    **dict.fromkeys(
        ("NemotronHTopkRouter", "Glm4MoeTopkRouter", "Dots1TopkRouter", "SolarOpenTopkRouter", "ExaoneMoeTopkRouter"),
        lambda router, _: _sigmoids(router, router.e_score_correction_bias, (router.num_group, router.topk_group)),
    ),
    "MiniMaxM2TopKRouter": lambda router, block: _sigmoids_of(router, block, 1.0),
    "HYV3TopKRouter": lambda router, block: _sigmoids_of(router, block, router.router_scaling_factor),
    # The sum of the probabilities, which it divides by, is limited to a small number from below.
    "Ernie4_5_MoeTopKRouter": lambda router, _: replace(
        _softmax(router, normalizes=True), bias=_as_bias(router.moe_statics.e_score_correction_bias)
    ),
    "Gemma4TextRouter": _of_gemma4,
    # It adds 1e-6 to the sum of the scores before it divides by it: less than float32 shows, but for tiny scores.
    "Lfm2MoeTopKRouter": lambda router, block: _sigmoids(router, block.expert_bias if router.use_expert_bias else None),
}


def has_numbers(model: nn.Module) -> bool:
    """Return whether a model has stacks of experts that are not stored as codes."""
    return any(isinstance(module._parameters.get("down_proj"), nn.Parameter) for module in model.modules())


def can_fuse_experts(plan: LayerPlan, part: PartPlan) -> bool:
    """Return whether the experts of a layer are stacks of numbers that native kernels multiply, or codes."""
    experts = find(plan.layer, part.kind.output)
    is_latent = not isinstance(getattr(part.module, "fc1_latent_proj", nn.Identity()), nn.Identity)
    opening = _opening(experts, plan.activation)
    weight = getattr(experts, "down_proj", None)
    is_packed = isinstance(weight, nn.Parameter) and packs_type(weight.dtype)
    is_known = type(_router_of(plan, part)).__name__ in _ROUTINGS
    return is_known and not is_latent and opening is not None and (is_packed or isinstance(experts, QuantizedExperts))


def _router_of(plan: LayerPlan, part: PartPlan) -> Any:
    """Return the module that chooses experts, which has the weight, or a linear layer that has it."""
    router = find(plan.layer, part.kind.inputs[0])
    return part.module if isinstance(router, nn.Linear) else router


def _opening(experts: Any, activation: str) -> Opening | None:
    if isinstance(experts, QuantizedExperts):
        if experts.ending is None:
            return None
        return UNGATED.get(activation) if experts.ending == Ending.STORE else Opening.IN_PANELS
    return (HALVES if hasattr(experts, "gate_up_proj") else UNGATED).get(activation)


def experts_of(plan: LayerPlan, part: PartPlan, bits: Bits | None = None) -> tuple[LinearCall, ExpertsCall]:
    """Return the router and the experts of a layer.

    The router multiplies in float32: a small error would choose another expert.

    Args:
        bits: What the matrices of experts are rounded to, or None to keep them.
    """
    router, experts = _router_of(plan, part), find(plan.layer, part.kind.output)
    weight = find(plan.layer, part.kind.inputs[0]).weight.detach()
    opening, routing = _opening(experts, plan.activation), _ROUTINGS[type(router).__name__](router, part.module)
    assert opening is not None
    routing = replace(routing, factor=routing.factor * part.factor)
    if isinstance(experts, QuantizedExperts):
        assert experts.ending is not None
        call = ExpertsCall(experts.pairs, routing, opening, experts.ending)
    else:
        first = experts.gate_up_proj if hasattr(experts, "gate_up_proj") else experts.up_proj
        pairs = [(_call(one, bits), _call(down, bits)) for one, down in zip(first, experts.down_proj, strict=True)]
        call = ExpertsCall(pairs, routing, opening)
    return LinearCall(Panels.from_weight(weight, None), dots=False), call


def _call(weight: Tensor, bits: Bits | None) -> LinearCall:
    weight = weight.detach()
    return LinearCall.from_weight(weight if bits is None else quantize(weight, bits))
