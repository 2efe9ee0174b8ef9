"""Muon in float32, for CPUs."""

import math
from typing import Any

import torch
from torch import Tensor


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
