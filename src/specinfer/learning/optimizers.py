"""Optimizers of drafters: Muon for hidden matrices, AdamW for all other weights, and Muon in float32 for CPUs."""

import math
from typing import Any

import torch
from torch import Tensor, nn

_NOT_HIDDEN = ("embed", "lm_head", "wte", "wpe", "pairs", "confidence")  # in the names of matrices


def make_optimizers(model: nn.Module, learning_rate: float, device: torch.device) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices, and AdamW for what reads or writes tokens, vectors, norms and biases."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_hidden = parameter.ndim == 2 and not any(part in name for part in _NOT_HIDDEN)
            (matrices if is_hidden else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        kind = FloatMuon if device.type == "cpu" else torch.optim.Muon
        optimizers.append(kind(matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    return [*optimizers, adamw(others, learning_rate)]


def adamw(weights: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW without decay: weights that no example involves stay as they are."""
    return torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def learning_rate_for(num_parameters: int) -> float:
    """Return a common learning rate for a model of this size: large models take smaller steps."""
    return min(4e-3, 4e-3 * math.sqrt(1e6 / num_parameters))


class FloatMuon(torch.optim.Muon):
    """PyTorch's Muon, which orthogonalizes in bfloat16; in float32 it takes a fraction of the time on most CPUs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have gradients."""
        assert closure is None
        for group in self.param_groups:
            momentum = group["momentum"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("momentum_buffer", torch.zeros_like(gradient)).lerp_(gradient, 1 - momentum)
                update = _orthogonalized(gradient.lerp(mean, momentum), group)
                rate = float(group["lr"])
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update, alpha=-rate * 0.2 * math.sqrt(max(parameter.shape)))  # match_rms_adamw


def _orthogonalized(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Return about U V^T of a matrix U S V^T, by the Newton-Schulz iteration."""
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.shape[0] > matrix.shape[1]
    matrix = matrix.T if is_tall else matrix
    matrix = matrix / matrix.norm().clamp_min(group["eps"])
    for _ in range(group["ns_steps"]):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    return matrix.T if is_tall else matrix
