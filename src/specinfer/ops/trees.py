"""Trees of the requests of a launch as tensors on a device: what its operations take and write.

Node 0 of a tree is its root, and parents come before their children. Shapes do not depend on contents.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specinfer.ops.cpu.choice import NAN as NAN
from specinfer.ops.cpu.choice import NO_VALID_TOKEN as NO_VALID_TOKEN
from specinfer.ops.cpu.choice import SUPPORT

MOST_TOKENS = 4 * SUPPORT  # that draws of a node may come from: a kernel has their probabilities in registers
GREEDY, SAMPLED, DRAWN = range(3)  # tables of a `ChanceTable`: sampled tokens are chosen by the noise of the target
Walk = tuple[Tensor, Tensor, Tensor]  # path, lengths, next


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the tree of each request of a launch, in integers of any size."""

    max_nodes: Tensor  # [requests]; 0 for no draft
    max_depth: Tensor  # [requests]
    min_path_prob: Tensor  # [requests] float32; less likely nodes are left out
    widths: Tensor  # [requests, levels] children of each node in a fixed expansion; 0 for best first


@dataclass(frozen=True, slots=True)
class Sampling:
    """The inputs that decide the tokens of each request of a launch."""

    seeds: Tensor  # [requests] int64
    temperatures: Tensor  # [requests] float32; 0 is greedy
    positions: Tensor  # [requests] integers, position of the root


@dataclass(frozen=True, slots=True)
class ChanceTable:
    """Acceptance probabilities as lines over the confidence: tables for tokens by how they are found.

    `drafters.growth.calibration` learns them.
    """

    points: Tensor  # [points] float32, the confidences at which the lines meet
    heights: Tensor  # [3, ranks * (points + 1)] float32, the lines' values at 0
    slopes: Tensor  # [3, ranks * (points + 1)]

    @property
    def num_ranks(self) -> int:
        return self.heights.shape[1] // (len(self.points) + 1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """All candidates of a launch, level by level, as the levels add them. All are [requests, candidates]."""

    tokens: Tensor  # int64; 0 where there is none
    confidence: Tensor  # float32; -1 for guesses of lookups alone
    path_prob: Tensor  # float32; -1 for what may not be taken
    parents: Tensor  # int32 numbers of their parents among the candidates; -1 for the root
    columns: Tensor  # int32 columns in which the drafter computes them; -1 if it does not

    @classmethod
    def empty(cls, num_requests: int, num_candidates: int, device: torch.device) -> "Candidates":
        def room(dtype: torch.dtype) -> Tensor:
            return torch.empty((num_requests, num_candidates), dtype=dtype, device=device)

        return cls(
            room(torch.int64), room(torch.float32), room(torch.float32), room(torch.int32), room(torch.int32)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes of one level that may have children, in the order of their numbers; padding last."""

    level: int
    tokens: Tensor  # [requests, width] int64; 0 for padding
    sees: Tensor  # [requests, width, words] int32 bits: the drafter's columns that the node sees, its own included
    numbers: Tensor  # [requests, width] int32 numbers among the candidates; -1 for the root and for padding
    path_prob: Tensor  # [requests, width] float32; -1 for padding


@dataclass(frozen=True, slots=True)
class DeviceTrees:
    """The trees of a launch; node 0 is the root."""

    tokens: Tensor  # [requests, 1 + nodes] int32; 0 from `sizes` on
    parents: Tensor  # [requests, 1 + nodes] int32; the root's, and those from `sizes` on, are 0
    sizes: Tensor  # [requests] int32, including the root
    confidence: Tensor  # [requests, 1 + nodes] float32
    columns: Tensor  # [requests, 1 + nodes] int32, the drafter's column of the node; -1 if not computed
    path_prob: Tensor  # [requests, levels] float32, sum over each level's frontier


class Guesses(NamedTuple):
    """Trees of lookups, parents before children, no two children of a node alike. All are [requests, guesses]."""

    tokens: Tensor  # int32
    parents: Tensor  # int32 numbers of guesses; -1 for the root
    path_prob: Tensor  # float32, never above the parent's; -1 where there is none


@dataclass(frozen=True, slots=True)
class DeviceDraws:
    """Draws, and the tokens that each could have produced, as `walk_multi_step` and `walk_traversal` take them."""

    nodes: Tensor  # [requests, draws] int32; -1 where nothing was drawn
    tokens: Tensor  # [requests, draws, support] int32
    probs: Tensor  # [requests, draws, support] float64

    @classmethod
    def empty(cls, num_requests: int, num_draws: int, support: int, device: torch.device) -> "DeviceDraws":
        """Return room for draws, of which there are none yet."""
        shape = num_requests, max(num_draws, 1)
        return cls(
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.empty((*shape, support), dtype=torch.int32, device=device),
            torch.empty((*shape, support), dtype=torch.float64, device=device),
        )


class DrawnRows(NamedTuple):
    """The requests whose tokens are drawn, and the noise of a level's draws."""

    is_drawn: Tensor  # [requests] bool
    streams: Tensor  # [requests] int64 seeds
    numbers: Tensor  # [requests] int64 number of the frontier's first node; each further node has the next one
    temperatures: Tensor  # [requests] float32, above 0 where tokens are drawn


class WalkInputs(NamedTuple):
    """The inputs of a walk with random numbers.

    Attributes:
        logits: [rows, vocab].
        starts: [requests] row of each request's root in `logits`; its other nodes follow.
        temperatures: [requests] float32, above 0.
        tokens, parents: [requests, max_nodes] of the trees, the root first.
        sizes: [requests] nodes in use, or 0 for no tree.
        draws: [requests, max_draws] node that each draw produced, in draw order; -1 after the last.
        distribution_tokens: [requests, max_draws, support] tokens that the draw could have produced; -1 for padding.
            The Triton kernels need the same ones in the same order for all draws of a node, as those of one race have,
            and at most `MOST_TOKENS`.
        distribution_probs: [requests, max_draws, support] float64 probabilities, which sum to 1.
        uniforms: [requests] int64 states of the requests' random numbers (`noise.UniformStream`), advanced in place.
        least: [rows] float32 least score, divided by the temperature, of a token that may follow; None to keep all.
    """

    logits: Tensor
    starts: Tensor
    temperatures: Tensor
    tokens: Tensor
    parents: Tensor
    sizes: Tensor
    draws: Tensor
    distribution_tokens: Tensor
    distribution_probs: Tensor
    uniforms: Tensor
    least: Tensor | None = None
