"""Acceptance probabilities of draft tokens as tables on a device, which `drafters.growth.calibration` learns."""

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY, SAMPLED, DRAWN = range(3)  # tables of a `ChanceTable`: sampled tokens are chosen by the noise of the target


@dataclass(frozen=True, slots=True)
class ChanceTable:
    """Acceptance probabilities as lines over the confidence: tables for tokens by how they are found."""

    points: Tensor  # [points] float32, the confidences at which the lines meet
    heights: Tensor  # [3, ranks * (points + 1)] float32, the lines' values at 0
    slopes: Tensor  # [3, ranks * (points + 1)]

    @property
    def num_ranks(self) -> int:
        return self.heights.shape[1] // (len(self.points) + 1)

    def chance(self, numbers: Tensor, confidence: Tensor) -> Tensor:
        """Return the probability that a token is accepted once its parent is, [requests, nodes, width].

        Args:
            numbers: [requests] int64 numbers of tables.
            confidence: [requests, nodes, width] float32, the best candidate of a node first.
        """
        num_lines = len(self.points) + 1
        ranks = torch.arange(confidence.shape[2], device=confidence.device).clamp(max=self.num_ranks - 1)
        line = torch.searchsorted(self.points, confidence.contiguous()) + ranks * num_lines
        line = line + numbers[:, None, None] * (self.num_ranks * num_lines)
        # Rounding could give more than 1, and a child a higher path probability than its parent.
        return (self.heights.flatten()[line] + self.slopes.flatten()[line] * confidence).clamp(0.0, 1.0)
