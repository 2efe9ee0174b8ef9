"""Costs of simulated machines, spans and step records, for tests of speculation policies."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specinfer.core.request import Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree
from specinfer.policy.cost_model import CostModel, Curve
from specinfer.verify import Acceptance
from tiny import make_request

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GROWING = (1.0, 1.0, 1.1, 1.2, 1.4, 2.0, 4.0, 8.0, 16.0, 32.0)
# A tree of which nothing is accepted, and one that is accepted whole.
WRONG = TokenTree((0, 5, 6, 7, 8), (-1, 0, 0, 0, 0)), Acceptance((), 9)
RIGHT = TokenTree((0, 5, 6, 7), (-1, 0, 1, 2)), Acceptance((1, 2, 3), 9)


def make_costs(
    seconds: Sequence[float] = (1.0,) * len(SIZES), draft_level: float = 0.01, read_token: float = 0.0
) -> CostModel:
    """Return the costs of a machine whose passes over 1, 2, 4, ... rows take this long."""
    return CostModel(Curve(SIZES, seconds), Curve((1, 64), [draft_level] * 2), read_token)


def bent_costs(bend: int, seconds: float = 4.0, draft_level: float = 0.02) -> CostModel:
    """Return the costs of a machine that reads weights for some seconds, and computes longer from `bend` rows on."""
    curve = Curve([1, bend, 1024], [seconds, seconds, seconds * 1024 / bend])
    return CostModel(curve, Curve((1, 64), [draft_level] * 2))


def make_span(num_output: int = 0, max_tokens: int = 100, length: int = 10, tree: str | None = None) -> Span:
    """Return a span of a request that is about to emit a token."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, tree=tree)
    request = make_request("a", range(length), params)
    request.token_ids += [1] * num_output
    return Span(request, len(request.token_ids) - 1, len(request.token_ids))


def make_record(**changes: Any) -> StepRecord:
    """Return the record of a plain step of one request that took a second, with these changes."""
    return replace(StepRecord(1, 1, 0, 0, 1, 0, 0.0, 1.0, 0.0), **changes)


class StreamedTarget:
    """A clock, and passes over a target whose weights are read while rows are computed."""

    bytes_per_pass = 10**9

    def __init__(self, row_seconds: float, read_seconds: float = 4.0) -> None:
        self.now = self.seconds_waiting = 0.0
        self.sizes: list[int] = []
        self._row, self._read = row_seconds, read_seconds

    def run(self, size: int) -> None:
        computing = self._row * size
        self.sizes.append(size)
        self.now += max(self._read, computing)
        self.seconds_waiting += max(self._read - computing, 0.0)

    def true(self, size: float) -> float:
        return max(self._read, self._row * size)
