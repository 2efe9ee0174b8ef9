"""Reach: which keys a token sees, as a function of two positions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MaskFunction = Callable[[Any, Any, Any, Any], Any]  # of row, head, and the positions of token and key


@dataclass(frozen=True, slots=True)
class Reach:
    """The keys that a token may see, by its position and theirs, as a definition chose them for a kind of layer.

    A node of a tree sees those of them that are in its request's prefix, or its ancestors.
    """

    allows: MaskFunction

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return [requests, new, context] bool, of [requests, new] and [requests, context] positions."""
        first = torch.zeros((), dtype=torch.int64, device=query_positions.device)  # rows and heads make no difference
        allowed: Tensor = self.allows(first, first, query_positions.unsqueeze(2), key_positions.unsqueeze(1))
        return allowed
