"""Norms over numbers that several ranks have: each rank adds the sum of its squares to those of the others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specinfer.ops.cpu.layer_part import AllReduce


class JoinedNorm(nn.Module):
    """A rank's part of an RMS norm, which may multiply by an activated gate first.

    Args:
        norm: The whole norm, whose weight is cut afterwards.

    Attributes:
        all_reduce: Sum over all ranks. Before they are connected, the others count as if they had the same numbers.
    """

    def __init__(self, norm: Any, num_ranks: int) -> None:
        super().__init__()
        self.weight, self.eps, self._num_ranks = norm.weight, norm.variance_epsilon, num_ranks
        self.all_reduce: AllReduce = lambda squares: squares * num_ranks

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        hidden = x.float() if gate is None else x.float() * functional.silu(gate.float())
        normed: Tensor = self.weight * (hidden * self.scale(self.all_reduce(_squares(hidden)))).to(x.dtype)
        return normed

    def scale(self, squares: Tensor) -> Tensor:
        """Return what numbers are multiplied by, from the sum of all squares; both [..., 1] float32."""
        return torch.rsqrt(squares / (len(self.weight) * self._num_ranks) + self.eps)


class JoinedHeadNorms:
    """The norms of queries and of keys over the heads of all ranks, which native layers need in one sum."""

    def __init__(self, norms: Sequence[JoinedNorm]) -> None:
        self._norms = norms
        self._weights = [norm.weight.detach().float() for norm in norms]

    def __call__(self, rows: Tensor, all_reduce: AllReduce) -> None:
        """Norm queries and keys in place: the first columns of [tokens, columns] float32 `rows`."""
        sizes = list(map(len, self._weights))
        parts = rows[:, : sum(sizes)].split(sizes, dim=1)
        squares = all_reduce(torch.cat([_squares(part) for part in parts], dim=1))
        for part, norm, weight, total in zip(parts, self._norms, self._weights, squares.split(1, dim=1), strict=True):
            part *= norm.scale(total) * weight


def _squares(x: Tensor) -> Tensor:
    return x.pow(2).sum(dim=-1, keepdim=True)
