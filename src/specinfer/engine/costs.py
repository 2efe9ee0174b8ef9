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
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CONTEXT = 32  # tokens before the measured ones: some attention, but mostly weights
_PROMPT = 64  # tokens for a drafter to read
_DRAFT_LEVELS = 4
_PROBE = "cost-probe"
# Weight of a new observation: a few steps follow a growing context, one slow step does not count much.
_LEARNING_RATE = 0.1
_MAX_RATIO = 3.0


class StepCosts:
    """Seconds of the parts of a step, as functions of its size.

    Args:
        sizes: Numbers of tokens in a pass, ascending.
        target: [sizes] seconds of a target pass over that many tokens.
        draft_level: Seconds of growing a tree by one level.
        read_token: Seconds the drafter takes to read one token of a prompt.
    """

    def __init__(
        self, sizes: Sequence[int], target: Sequence[float], draft_level: float, read_token: float = 0.0
    ) -> None:
        self._sizes = np.asarray(sizes, dtype=np.float64)
        self._target = np.maximum.accumulate(np.asarray(target, dtype=np.float64))  # more never costs less
        self.draft_level = draft_level
        self.read_token = read_token
        self.rest = 0.0

    def target(self, num_tokens: npt.ArrayLike) -> Floats:
        """Seconds of a target pass; between the measured sizes on straight lines.

        Beyond the largest one nothing is known to be cheap: every token is taken to cost its full share.
        """
        wanted = np.asarray(num_tokens, dtype=np.float64)
        beyond = np.maximum(wanted / self._sizes[-1], 1.0)
        return np.asarray(np.interp(wanted, self._sizes, self._target) * beyond)

    def step(self, num_tokens: npt.ArrayLike, num_levels: npt.ArrayLike) -> Floats:
        """Seconds of a whole step with `num_levels` levels drafted."""
        return np.asarray(num_levels) * self.draft_level + self.target(num_tokens) + self.rest

    def observe(self, step: StepRecord) -> None:
        """Learns from a step in which no prompt was read by the target."""
        ratio = min(step.target_time / float(self.target(step.num_rows)), _MAX_RATIO)
        # Sizes beside the observed one learn most; the others follow, since a longer context slows all of them.
        right = int(np.searchsorted(self._sizes, step.num_rows))
        rates = np.full(len(self._sizes), _LEARNING_RATE / 4)
        rates[max(right - 1, 0) : right + 1] = _LEARNING_RATE
        self._target = np.maximum.accumulate(self._target * (1.0 + rates * (ratio - 1.0)))
        self.rest += _LEARNING_RATE * (step.rest_time - self.rest)
        if step.num_read:
            reading = max(step.draft_time - step.num_levels * self.draft_level, 0.0) / step.num_read
            self.read_token += _LEARNING_RATE * (reading - self.read_token)
        elif step.num_levels:
            self.draft_level += _LEARNING_RATE * (step.draft_time / step.num_levels - self.draft_level)


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
    return StepCosts(sizes, costs, *_draft_costs(drafter))


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


def _draft_costs(drafter: Drafter) -> tuple[float, float]:
    """Seconds of a level, and of reading a token."""
    request = Request(_PROBE, [0] * _PROMPT, SamplingParams(temperature=0.0), seed=0)
    span = Span(request, _PROMPT - 1, _PROMPT)
    budget = TreeBudget((1,) * _DRAFT_LEVELS)

    def draft() -> None:
        drafter.draft([span], [budget])

    try:
        first = _fastest(draft, repeats=1)  # reads the prompt
        level = _fastest(draft) / _DRAFT_LEVELS
        return level, max(first - _DRAFT_LEVELS * level, 0.0) / _PROMPT
    finally:
        drafter.forget(_PROBE)
