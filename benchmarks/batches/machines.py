"""Simulated machines: seconds of the parts of a step with the embedded pair, grown to a billion weights in bfloat16.

On a machine of 31 GB/s and 0.39 TFLOP/s the parts are within a tenth of those measured there: passes over 1, 8, 14,
16, 32 and 64 rows took 60, 63, 71, 84, 159 and 330 ms, a draft level of 1, 16 and 64 nodes 0.3, 0.9 and 3.2 ms, its
start 0.5 to 1 ms, and the reading of a prompt's token 50 to 60 us.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specinfer.policy.cost_measurement import SIZES
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve

_TARGET, _DRAFTER = 1.0e9, 1.0e7  # weights, of two bytes, with each of which a row takes two operations
_PASS, _LEVEL, _START = 0.5e-3, 0.25e-3, 0.8e-3  # seconds besides those of weights and rows
_STEP, _REQUEST, _NODE = 0.3e-3, 0.05e-3, 0.01e-3  # of the host: scheduling, verification, commit


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that reads weights and computes at these rates.

    Attributes:
        bandwidth: Bytes per second.
        flops: Operations per second.
    """

    name: str
    bandwidth: float
    flops: float

    def target(self, num_rows: int) -> float:
        """Return the seconds of a pass over this many rows."""
        return max(2 * _TARGET / self.bandwidth, 2 * _TARGET / self.flops * num_rows) + _PASS

    def draft(self, num_nodes: int, num_levels: int) -> float:
        """Return the seconds of drafting this many nodes in this many levels."""
        return _START + num_levels * _LEVEL + num_nodes * self.read_token if num_levels else 0.0

    @property
    def read_token(self) -> float:
        """Seconds in which the drafter reads a token of a prompt, or computes a node."""
        return 2 * _DRAFTER / self.flops

    def host(self, num_requests: int, num_nodes: int) -> float:
        """Return the seconds of a step outside of passes and drafting."""
        return _STEP + num_requests * _REQUEST + num_nodes * _NODE

    def measured(self, errors: Sequence[float] = (1.0,) * len(SIZES)) -> CostModel:
        """Return the costs that an engine measures at its start, with these factors of passes that were disturbed."""
        seconds = [self.target(size) * error for size, error in zip(SIZES, errors, strict=True)]
        levels = (1, 4, 16, 64)
        level = [_LEVEL + size * self.read_token for size in levels]
        return CostModel(Curve(SIZES, seconds), Curve(levels, level), self.read_token, _START)


MACHINES = (
    Machine("31 GB/s, 0.39 TFLOP/s", 31e9, 0.39e12),
    Machine("48 GB/s, 0.8 TFLOP/s", 48e9, 0.8e12),
    Machine("80 GB/s, matrix units", 80e9, 6e12),
)
