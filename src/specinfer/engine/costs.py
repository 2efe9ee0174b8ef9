"""What a step costs on the machine at hand: measured at start-up, kept up to date by every step.

A pass over n tokens does not cost n passes over one: the weights are read once. How the cost grows with n
differs from machine to machine, and decides which tree pays.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from specinfer.drafters.base import Drafter
from specinfer.engine.metrics import StepRecord
from specinfer.model.batch import Piece
from specinfer.model.runner import ModelRunner
from specinfer.request import Request, Span
from specinfer.sampling import SamplingParams
from specinfer.tree import TokenTree, TreeBudget

Floats = npt.NDArray[np.float64]
SIZES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXT = 32  # tokens before the measured ones: some attention, but mostly weights
_DRAFT_LEVELS = 4
_PROBE = "cost-probe"
# Weight of a new observation: a few steps follow a growing context, one slow step does not count much.
_LEARNING_RATE = 0.1


class StepCosts:
    """Seconds of the parts of a step, as functions of its size.

    Args:
        sizes: Numbers of tokens in a pass, ascending.
        target: [sizes] seconds of a target pass over that many tokens.
        draft_level: Seconds of growing a tree by one level.
    """

    def __init__(self, sizes: Sequence[int], target: Sequence[float], draft_level: float) -> None:
        self._sizes = np.asarray(sizes, dtype=np.float64)
        self._target = np.maximum.accumulate(np.asarray(target, dtype=np.float64))  # more never costs less
        self.draft_level = draft_level
        self.rest = 0.0
        self._scale = 1.0  # how much slower than at start-up: context, other load

    def target(self, num_tokens: npt.ArrayLike) -> Floats:
        """Seconds of a target pass, between and beyond the measured sizes on straight lines."""
        return self._scale * self._curve(num_tokens)

    def step(self, num_tokens: npt.ArrayLike, num_levels: npt.ArrayLike) -> Floats:
        """Seconds of a whole step with `num_levels` levels drafted."""
        return np.asarray(num_levels) * self.draft_level + self.target(num_tokens) + self.rest

    def observe(self, step: StepRecord) -> None:
        """Learns from a step without prompt chunks."""
        rate = _LEARNING_RATE
        ratio = step.target_time / float(self._curve(step.num_rows))
        self._scale += rate * (min(ratio, 3 * self._scale) - self._scale)
        self.rest += rate * (step.rest_time - self.rest)
        if step.num_levels:
            level = step.draft_time / step.num_levels
            # The first level of a new request reads its whole prompt; that is not what a level costs.
            self.draft_level += rate * (min(level, 3 * self.draft_level + 1e-4) - self.draft_level)

    def _curve(self, num_tokens: npt.ArrayLike) -> Floats:
        sizes, costs = self._sizes, self._target
        wanted = np.asarray(num_tokens, dtype=np.float64)
        if len(sizes) == 1:
            return np.asarray(costs[0] * wanted / sizes[0])
        right = np.clip(np.searchsorted(sizes, wanted), 1, len(sizes) - 1)
        slope = (costs[right] - costs[right - 1]) / (sizes[right] - sizes[right - 1])
        return np.asarray(np.maximum(costs[right - 1] + slope * (wanted - sizes[right - 1]), 1e-6))


def measure_costs(target: ModelRunner, drafter: Drafter, max_seconds: float = 3.0) -> StepCosts:
    """Times passes of growing size and a few draft levels; larger sizes are left out when time is up."""
    started = time.perf_counter()
    sizes: list[int] = []
    costs: list[float] = []
    for size in SIZES:
        if size > target.cache.num_free // 2 or (costs and time.perf_counter() - started > max_seconds):
            break
        sizes.append(size)
        costs.append(_fastest(lambda size=size: _target_pass(target, size)))  # type: ignore[misc]
    return StepCosts(sizes, costs, _draft_level(drafter))


def _fastest(run: Callable[[], None], repeats: int = 3) -> float:
    """Seconds of the fastest run: other load only ever adds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _target_pass(target: ModelRunner, size: int) -> None:
    cache = target.cache
    try:
        prefix = cache.reserve(_PROBE, min(_CONTEXT, cache.num_free // 2))
        tree = TokenTree.chain(0, [0] * (size - 1))
        target.forward([Piece.of_span([0], tree, prefix, cache.reserve(_PROBE, size))])[0, 0].item()
    finally:
        cache.free(_PROBE)


def _draft_level(drafter: Drafter) -> float:
    request = Request(_PROBE, [0] * _CONTEXT, SamplingParams(temperature=0.0), seed=0)
    span = Span(request, _CONTEXT - 1, _CONTEXT)
    budget = TreeBudget((1,) * _DRAFT_LEVELS)
    try:
        drafter.draft([span], [budget])  # reads the context
        return _fastest(lambda: _discard(drafter.draft([span], [budget]))) / _DRAFT_LEVELS
    finally:
        drafter.forget(_PROBE)


def _discard(_: object) -> None:
    pass
