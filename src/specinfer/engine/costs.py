"""What a step costs on the machine at hand: measured at start-up, kept up to date by every step.

A pass over n tokens does not cost n passes over one: the weights are read once. How the cost grows with n
differs from machine to machine, and decides which tree pays.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer.drafters.base import Drafter
from specinfer.engine import streamed_costs
from specinfer.engine.metrics import StepRecord
from specinfer.engine.streamed_costs import StreamedCurve, measure_streamed
from specinfer.model.batch import Piece
from specinfer.model.runner import TargetRunner
from specinfer.progress import ProgressCallback
from specinfer.request import Request, Span
from specinfer.sampling import SamplingParams
from specinfer.tree import TokenTree, TreeBudget

Floats = npt.NDArray[np.float64]
# Between 8 and 32 the price of a row changes most: native kernels keep up to 14 rows in registers.
SIZES = (1, 2, 4, 8, 14, 16, 24, 32, 64, 128, 256, 512)
_DRAFT_SIZES = (1, 4, 16, 64)
_CONTEXT = 32  # tokens before the measured ones: some attention, but mostly weights
_PROMPT = 64  # tokens for a drafter to read
_DRAFT_LEVELS = 4
_ROUNDS = 5
_NUM_QUICK = 15  # passes as slow as this part of the time are measured once
_PROBE = "cost-probe"
# Weight of a new observation: a few steps follow a growing context, one slow step does not count much.
_LEARNING_RATE = 0.1
_SHARED = 0.9  # of it, for sizes that were not observed
_MAX_RATIO, _LEAST_RATIO = 3.0, 0.1
_START_SHARE = 4.0  # levels that the start of drafting counts for, where its share of a surprise is concerned
# A pass much faster than thought counts more: the thought comes from a time when other load was there.
_FAST, _FAST_RATE = 0.7, 0.5


class Curve:
    """Seconds as a function of a number of tokens, on straight lines between measured sizes.

    Args:
        sizes: Ascending.
        seconds: [sizes].
    """

    def __init__(self, sizes: Sequence[float], seconds: Sequence[float]) -> None:
        self.sizes = np.asarray(sizes, dtype=np.float64)
        self.seconds = np.maximum.accumulate(np.asarray(seconds, dtype=np.float64))  # more never costs less

    def __call__(self, num_tokens: npt.ArrayLike) -> Floats:
        """Beyond the largest size nothing is known to be cheap: every token is taken to cost its full share."""
        wanted = np.asarray(num_tokens, dtype=np.float64)
        beyond = np.maximum(wanted / self.sizes[-1], 1.0)
        return np.asarray(np.interp(wanted, self.sizes, self.seconds) * beyond)

    def observe(self, num_tokens: float, seconds: float, waited: float = 0.0) -> None:
        """All sizes follow: a longer context slows all of them, and so does other load. What is one size's own, and not
        the machine's for a while, shows in many steps only. What a pass `waited` is no question of its size here.
        """
        ratio = min(seconds / float(self(num_tokens)), _MAX_RATIO)
        right = int(np.searchsorted(self.sizes, num_tokens))
        rate = _FAST_RATE if ratio < _FAST else _LEARNING_RATE
        rates = np.full(len(self.sizes), rate * _SHARED)
        rates[max(right - 1, 0) : right + 1] = rate
        learned = self.seconds * (1.0 + rates * (ratio - 1.0))
        # More never costs less: what was fast tells that less is too, what was slow that more is.
        self.seconds = _falling(learned) if ratio < _FAST else np.maximum.accumulate(learned)


def _falling(seconds: Floats) -> Floats:
    """[sizes] less never costs more: what a larger size took is enough for a smaller one."""
    return np.minimum.accumulate(seconds[::-1])[::-1]


class StepCosts:
    """Seconds of the parts of a step.

    Args:
        target: A target pass over so many tokens.
        draft_level: Growing trees by one level of so many nodes.
        read_token: Seconds the drafter takes to read one token of a prompt.
        draft_start: Seconds that the first level takes more than a further one.
    """

    def __init__(
        self,
        target: Curve | StreamedCurve,
        draft_level: Curve,
        read_token: float = 0.0,
        draft_start: float = 0.0,
    ) -> None:
        self.target = target
        self.draft_level = draft_level
        self.read_token = read_token
        self.draft_start = draft_start
        self.rest = 0.0

    def step(self, num_requests: int, num_nodes: npt.ArrayLike, num_levels: npt.ArrayLike) -> Floats:
        """Seconds of a whole step with so many guesses for each request, in so many levels."""
        nodes = np.asarray(num_nodes)
        drafting = self.draft(num_requests * nodes, num_levels)
        return np.asarray(drafting + self.target(num_requests * (1 + nodes)) + self.rest)

    def draft(self, num_nodes: npt.ArrayLike, num_levels: npt.ArrayLike) -> Floats:
        """Seconds of drafting so many nodes in all, in so many levels."""
        levels = np.asarray(num_levels)
        level = self.draft_level(np.asarray(num_nodes) / np.maximum(levels, 1))
        return np.asarray(levels * level + self.draft_start * np.minimum(levels, 1))

    def observe(self, step: StepRecord) -> None:
        """Learns from a step in which no prompt was read by the target."""
        self.target.observe(step.num_rows, step.target_time, step.waiting_time)
        self.rest += _LEARNING_RATE * (step.rest_time - self.rest)
        # A lookup's long chain is no level of a model, and would make levels seem free.
        num_levels = step.num_levels if step.num_model_levels is None else step.num_model_levels
        if not num_levels:
            return
        excess = step.draft_time - float(self.draft(step.num_guessed, num_levels))
        if step.num_read:
            reading = max(excess, 0.0) / step.num_read
            self.read_token += _LEARNING_RATE * (reading - self.read_token)
        else:
            self._observe_drafting(step.num_guessed / num_levels, num_levels, excess)

    def _observe_drafting(self, per_level: float, num_levels: int, excess: float) -> None:
        """Shares what drafting took more than was thought between the start and the levels (normalized least squares).

        The start takes more of it: after a pass of the target no cache holds anything of the drafter.
        """
        level = float(self.draft_level(per_level))
        start, levels = _START_SHARE * level, num_levels * level
        excess = min(excess, (_MAX_RATIO - 1.0) * (self.draft_start + levels))
        norm = start**2 + levels**2
        self.draft_start = max(self.draft_start + _LEARNING_RATE * excess * start**2 / norm, 0.0)
        self.draft_level.observe(per_level, level * max(1.0 + excess * levels / norm, _LEAST_RATIO))

    def observe_prompts(self, step: StepRecord) -> None:
        """Learns from a step in which prompts were read: such passes tell where computing takes longer than reading."""
        if isinstance(self.target, StreamedCurve) and step.num_rows <= streamed_costs.MOST_ROWS:
            self.target.observe(step.num_rows, step.target_time, step.waiting_time)

    def as_dict(self) -> dict[str, object]:
        """Plain numbers, to be kept in a file."""
        return {
            "target": self.target.as_dict() if isinstance(self.target, StreamedCurve) else _points(self.target),
            "draft_level": _points(self.draft_level),
            "read_token": self.read_token,
            "draft_start": self.draft_start,
        }

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "StepCosts":
        """Raises KeyError, TypeError or ValueError if these are no costs."""
        passes, draft_level = numbers["target"], _read_curve(*numbers["draft_level"])
        target = StreamedCurve.from_dict(passes) if isinstance(passes, dict) else _read_curve(*passes)
        read_token, draft_start = float(numbers["read_token"]), float(numbers["draft_start"])
        if not (0 <= read_token < math.inf and 0 <= draft_start < math.inf):
            raise ValueError("read_token or draft_start is no time")
        return cls(target, draft_level, read_token, draft_start)


def _points(curve: Curve) -> list[list[float]]:
    return [curve.sizes.tolist(), curve.seconds.tolist()]


def _read_curve(sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
    curve = Curve([float(size) for size in sizes], [float(second) for second in seconds])
    usable = len(curve.sizes) == len(curve.seconds) >= 1
    usable = usable and bool((np.diff(curve.sizes, prepend=0.0) > 0).all())
    if not (usable and bool((np.isfinite(curve.seconds) & (curve.seconds > 0)).all())):
        raise ValueError("no curve: sizes must grow, and each needs a time")
    return curve


def measure_costs(
    target: TargetRunner, drafter: Drafter, max_seconds: float = 3.0, progress: ProgressCallback | None = None
) -> StepCosts:
    """Times passes of growing size and a few draft levels; larger sizes are left out when time is up.

    Passes of a target that is streamed, and slow, are timed once each, and only a few.

    Args:
        progress: Told of such passes.
    """
    run: Callable[[int], None] = partial(_target_pass, target)
    stream = target.loaded.stream
    curve: Curve | StreamedCurve | None = None
    if stream is not None and stream.bytes_per_pass:
        if progress is not None:
            run = _told(run, progress, stream.bytes_per_pass)
        before = time.perf_counter()
        run(1)  # what stays is read with it
        if time.perf_counter() - before > max_seconds / _NUM_QUICK:
            sizes = [size for size in streamed_costs.SIZES if size <= target.cache.num_available // 2]
            curve = measure_streamed(sizes or [1], run, lambda: stream.seconds_waiting)
    if curve is None:
        curve = _fastest([size for size in SIZES if size <= target.cache.num_available // 2], run, max_seconds)
    return StepCosts(curve, *_draft_costs(drafter, max_seconds))


def _told(run: Callable[[int], None], progress: ProgressCallback, num_bytes: int) -> Callable[[int], None]:
    """Passes that are told of: the first one, which is not timed, and at most one of each size."""
    num_done = itertools.count()

    def report_and_run(size: int) -> None:
        total = len(streamed_costs.SIZES) + 1
        progress("timing passes", min(next(num_done), total) * num_bytes, total * num_bytes)
        run(size)

    return report_and_run


def _fastest(sizes: Sequence[int], run: Callable[[int], None], max_seconds: float) -> Curve:
    """Seconds of the fastest of some runs of each size, in rounds: other load only ever adds, and it comes and goes.

    What takes a large part of the time by itself comes last, and once: small sizes are what trees are weighed by.
    """
    started = time.perf_counter()
    best: dict[int, float] = {}

    def measure(size: int) -> bool:
        """Whether there was time for it."""
        before = time.perf_counter()
        if best and before - started > max_seconds:
            return False
        run(size)
        best[size] = min(best.get(size, np.inf), time.perf_counter() - before)
        return True

    quick: list[int] = []
    for size in sizes:
        if not measure(size) or best[size] > max_seconds / _NUM_QUICK:
            break
        quick.append(size)
    for _ in range(_ROUNDS - 1):
        if not all(measure(size) for size in quick):
            break
    for size in sizes[len(quick) + 1 :]:
        if not measure(size):
            break
    return Curve(list(best), _falling(np.asarray(list(best.values()))).tolist())


def _target_pass(target: TargetRunner, size: int) -> None:
    cache = target.cache
    try:
        prefix = cache.reserve(_PROBE, min(_CONTEXT, cache.num_available // 2))
        tree = TokenTree.chain(0, [0] * (size - 1))
        target.forward([Piece.of_span([0], tree, prefix, cache.reserve(_PROBE, size))])[0, 0].item()
    finally:
        cache.free(_PROBE)


def _draft_costs(drafter: Drafter, max_seconds: float) -> tuple[Curve, float, float]:
    """Seconds of a level, of reading a token, and what the first level takes more than a further one."""
    request = Request(_PROBE, [0] * _PROMPT, SamplingParams(temperature=0.0), seed=0, cache_salt=None)
    span = Span(request, _PROMPT - 1, _PROMPT)

    def draft(width: int, num_levels: int = _DRAFT_LEVELS) -> None:
        drafter.draft([span], [TreeBudget.expansion((width,) + (1,) * (num_levels - 1))])

    try:
        started = time.perf_counter()
        draft(1)  # reads the prompt
        first = time.perf_counter() - started
        trees = _fastest(_DRAFT_SIZES, draft, max_seconds)
        one_level = float(_fastest((1,), partial(draft, num_levels=1), max_seconds).seconds[0])
        # Where other load held the single level up, all levels are taken to cost the same.
        later = (float(trees.seconds[0]) - one_level) / (_DRAFT_LEVELS - 1)
        start = max(one_level - later, 0.0) if later > 0 else 0.0
        levels = Curve(trees.sizes.tolist(), ((trees.seconds - start) / _DRAFT_LEVELS).tolist())
        return levels, max(first - float(trees.seconds[0]), 0.0) / _PROMPT, start
    finally:
        drafter.forget(_PROBE)
