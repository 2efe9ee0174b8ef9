"""A norm over numbers that are spread over the ranks of a tensor group."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class JoinedNorm(nn.Module):
    """A rank's part of an RMS norm, which may multiply by an activated gate first; ranks add up their squares.

    Args:
        norm: The whole norm.

    Attributes:
        all_reduce: Function that returns the sum of a tensor over all ranks.
    """

    def __init__(self, norm: Any, size: int) -> None:
        super().__init__()
        self.weight, self.eps, self.whole = norm.weight, norm.variance_epsilon, len(norm.weight)
        self.all_reduce: Callable[[Tensor], Tensor] = lambda squares: squares * size

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        hidden = x.float() if gate is None else x.float() * functional.silu(gate.float())
        squares = self.all_reduce(hidden.pow(2).sum(dim=-1, keepdim=True))
        normed: Tensor = self.weight * (hidden * torch.rsqrt(squares / self.whole + self.eps)).to(x.dtype)
        return normed
