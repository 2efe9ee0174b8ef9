"""Measurement of the costs of a step at start-up: passes of growing size, and a few draft levels.

On a GPU the first pass of a size is captured, and its kernels are compiled. That takes a hundred times as long as the
pass, and never again. So each size runs once before it is timed.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from specinfer.core.progress import ProgressCallback
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.base import Drafter
from specinfer.drafters.growth.tree_batch import BEST_FIRST_WIDTH
from specinfer.drafters.kind import draft_kind
from specinfer.drafters.merge.merged import parts_of, reads_prompts
from specinfer.model.batch import Piece
from specinfer.model.device import prompt_tokens
from specinfer.model.kv_cache import NO_SLOTS
from specinfer.model.recurrent.layers import is_hybrid, state_bytes
from specinfer.model.runner import ModelRunner, TargetRunner
from specinfer.policy import streamed_costs
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve, falling
from specinfer.policy.streamed_costs import StreamedCurve, measure_streamed

# Between 8 and 32 the price of a row changes most: native kernels keep up to 14 rows in registers.
SIZES = (1, 2, 4, 8, 14, 16, 24, 32, 64, 128, 256, 512)
_PROMPT_SIZES = (1024, 2048)  # of GPUs that read so much at a time: a token costs less there than in a pass over 512
_FIRST_LEVEL = 0  # in place of a size: one level of one node, which is timed in turns with the trees
_DRAFT_SIZES = (_FIRST_LEVEL, 1, 4, 16, 64)
_CONTEXT = 32  # tokens before the measured ones: some attention, but mostly weights
_DEPTH = 8  # of measured trees: learned positions end with the context, which may be shorter than the largest size
_PROMPT = 64  # prompt tokens that a drafter reads
_DRAFT_LEVELS = 4
_ROUNDS, _MOST_ROUNDS = 5, 15  # quick passes take more rounds, so that not all of them meet the same load
_CHECKED, _LIKENESS = (1, 8), 1.4  # sizes that kept costs are checked at, and the largest factor of a difference
_NUM_QUICK = 15  # passes slower than the available time divided by this are measured once
_MORE_THAN_CACHED = 2**24  # floats
_PROBE, _CONTEXT_PROBE = "cost-probe", "cost-probe-context"
_salts = map(str, itertools.count())  # one for each prompt, so that no prefix of an earlier one is found


def measure_costs(
    target: TargetRunner, drafter: Drafter | None, max_seconds: float = 3.0, progress: ProgressCallback | None = None
) -> CostModel:
    """Time passes of growing size and a few draft levels; larger sizes are left out when time is up.

    Slow passes of a streamed target are timed once each, and only a few of them.

    Args:
        target: The runner of the target.
        drafter: The drafter that is measured, or None without speculation: then a draft level costs as much as a pass.
        max_seconds: Time limit for each of the two measurements.
        progress: Callback for the progress of slow passes.
    """
    with _context_read(target):
        curve = _target_costs(target, max_seconds, progress)
    if drafter is None:
        return CostModel(curve, Curve([1], [float(curve(1))]))
    return CostModel(curve, *_draft_costs(target, drafter, max_seconds))


def _target_costs(target: TargetRunner, max_seconds: float, progress: ProgressCallback | None) -> Curve | StreamedCurve:
    """Return the seconds of passes; arguments as for `measure_costs`."""
    run: Callable[[int], None] = partial(_target_pass, target)
    stream = target.loaded.stream
    curve: Curve | StreamedCurve | None = None
    if stream is not None and stream.bytes_per_pass:
        if progress is not None:
            run = _with_progress(run, progress, stream.bytes_per_pass)
        sizes = _sizes_that_fit(streamed_costs.SIZES, target)
        for size in sizes if _has_slow_first_runs(target) else ():
            run(size)
        before = time.perf_counter()
        run(1)  # also reads the layers that stay in memory
        if time.perf_counter() - before > max_seconds / _NUM_QUICK:
            curve = measure_streamed(sizes, run, lambda: stream.seconds_waiting)
    if curve is None:
        sizes = _sizes_that_fit(pass_sizes(target), target)
        curve = _fastest(sizes, run, max_seconds, runs_first=_has_slow_first_runs(target))
    return curve


def speeds_now(
    costs: CostModel, target: TargetRunner, drafter: Drafter | None, max_seconds: float = 3.0
) -> tuple[float, float]:
    """Return by which factors passes and drafting take longer now than costs say, by a few passes and draft levels.

    Costs may date from a busy hour, or from another speed of the machine. Slow passes are not repeated for this: every
    step updates their costs.
    """
    sizes = [size for size in _sizes_that_fit(_CHECKED, target) if float(costs.target(size)) < max_seconds / _NUM_QUICK]
    if not sizes:
        return 1.0, 1.0
    run = partial(_target_pass, target)
    with _context_read(target):
        run(1)  # the first pass may take longer
        now = _fastest(sizes, run, max_seconds, runs_first=_has_slow_first_runs(target))
    # Of several sizes the one that differs most.
    changes = [float(now(size)) / float(costs.target(size)) for size in now.sizes]
    passes = max(changes, key=lambda change: max(change, 1.0 / change))
    if drafter is None:
        return passes, 1.0
    levels, _, start = _draft_costs(target, drafter, max_seconds / _ROUNDS)
    before = float(costs.draft(_DRAFT_LEVELS, _DRAFT_LEVELS))
    # Beside a pass, drafting may be too quick for its costs to matter.
    pass_time = float(costs.target(1))
    return passes, (_DRAFT_LEVELS * float(levels(1)) + start + pass_time) / (before + pass_time)


def _has_slow_first_runs(target: TargetRunner) -> bool:
    """Return whether the first pass of a size captures it or compiles kernels."""
    graphs = target.graphs if isinstance(target, ModelRunner) else None
    return graphs is not None or target.loaded.device.type != "cpu"


def is_alike(seconds: float, others: float) -> bool:
    """Return whether two times are those of one machine at one speed."""
    return max(seconds, others) <= _LIKENESS * min(seconds, others)


def pass_sizes(target: TargetRunner) -> list[int]:
    """Return the sizes of passes that are measured if there are slots and time."""
    loaded = target.loaded
    if is_hybrid(loaded.model):
        return [*SIZES]  # chunks of their prompts are no larger
    most = min(prompt_tokens(loaded.device), loaded.max_position - _CONTEXT)
    return [*SIZES, *(size for size in _PROMPT_SIZES if size <= most)]


def _sizes_that_fit(sizes: Sequence[int], target: TargetRunner) -> list[int]:
    return [size for size in sizes if size == 1 or size <= target.cache.num_available // 2]


def _with_progress(run: Callable[[int], None], progress: ProgressCallback, num_bytes: int) -> Callable[[int], None]:
    """Wrap a pass so that it reports progress: the first one, which is not timed, and at most one of each size."""
    num_done = itertools.count()

    def report_and_run(size: int) -> None:
        total = len(streamed_costs.SIZES) + 1
        progress("timing passes", min(next(num_done), total) * num_bytes, total * num_bytes)
        run(size)

    return report_and_run


def _fastest(
    sizes: Sequence[int],
    run: Callable[[int], None],
    max_seconds: float,
    *,
    runs_first: bool = False,
    prepare: Callable[[], object] = lambda: None,
) -> Curve:
    """Return the seconds of the fastest run of each size, in rounds, because other load only ever adds time.

    Sizes that take a large part of the time come last, and once: mainly small sizes decide between trees.

    Args:
        runs_first: Run each size once before it is timed; this does not count as time.
        prepare: Function called before each run that is timed.
    """
    started = time.perf_counter()
    best: dict[int, float] = {}

    def measure(size: int) -> bool:
        """Run one size and return True, or return False if time is up."""
        nonlocal started
        before = time.perf_counter()
        if best and before - started > max_seconds:
            return False
        if runs_first and size not in best:
            run(size)
            started += time.perf_counter() - before
        prepare()
        before = time.perf_counter()
        run(size)
        best[size] = min(best.get(size, np.inf), time.perf_counter() - before)
        return True

    quick: list[int] = []
    for size in sizes:
        if not measure(size) or best[size] > max_seconds / _NUM_QUICK:
            break
        quick.append(size)
    for number in range(1, _MOST_ROUNDS if quick else 1):
        is_enough = number >= _ROUNDS and time.perf_counter() - started > max_seconds / 3
        if is_enough or not all(measure(size) for size in quick):
            break
    for size in sizes[len(quick) + 1 :]:
        if not measure(size):
            break
    return Curve(list(best), falling(np.asarray(list(best.values()))).tolist())


def _emptying_caches(target: TargetRunner) -> Callable[[], object]:
    """Return a function that leaves the CPU's caches as a pass of the target does: with nothing of a drafter.

    It does nothing for a GPU, and for a target whose passes take so long that this does not count.
    """
    if target.loaded.device.type != "cpu" or target.loaded.stream is not None:
        return lambda: None
    # By numpy, on this thread: PyTorch's others would go on spinning on the cores that drafting needs.
    return np.ones(_MORE_THAN_CACHED, dtype=np.float32).sum


@contextmanager
def _context_read(target: TargetRunner) -> Iterator[None]:
    """Return a context in which recurrent layers continue from a state, as they do in requests that go on.

    Else each pass would compute the states of its context once more. Of keys and values any contents will do.
    """
    cache = target.cache
    size = min(_CONTEXT, cache.num_available // 2, target.loaded.max_position - 1 - _DEPTH)
    if size < 1 or not state_bytes(target.loaded.model):
        yield
        return
    try:
        target.forward([Piece.from_span([0] * size, None, NO_SLOTS, cache.reserve(_CONTEXT_PROBE, size))])
        cache.commit(_CONTEXT_PROBE, range(size))
        yield
    finally:
        cache.free(_CONTEXT_PROBE)


def _target_pass(target: TargetRunner, size: int) -> None:
    cache = target.cache
    try:
        last, is_prompt = target.loaded.max_position - 1, size > SIZES[-1]
        depth = size if is_prompt else max(min(_DEPTH, last), 1)
        prefix = cache.slots(_CONTEXT_PROBE)
        if not len(prefix):
            prefix = cache.reserve(_PROBE, min(_CONTEXT, cache.num_available // 2, last - min(depth, size - 1)))
        chain, tree = [0] * size, TokenTree.root(0)
        if not is_prompt:
            parents = (-1, *(node if node % depth else 0 for node in range(size - 1)))  # chains from the root
            chain, tree = [0], TokenTree((0,) * size, parents)
        target.forward([Piece.from_span(chain, tree, prefix, cache.reserve(_PROBE, size))])[0, 0].item()
    finally:
        cache.free(_PROBE)


def _draft_costs(target: TargetRunner, drafter: Drafter, max_seconds: float) -> tuple[Curve, float, float]:
    """Return the seconds of a level, of reading a token, and of the first level beyond those of a further one."""
    prompt = [0] * _PROMPT

    def begin() -> Span:
        request = Request(_PROBE, prompt, SamplingParams(temperature=0.0), seed=0, cache_salt=next(_salts))
        return Span(request, _PROMPT - 1, _PROMPT)

    def draft(width: int) -> None:
        drafter.draft([span], [TreeBudget.expansion((1,) if width == _FIRST_LEVEL else _widths(width, target))])

    try:
        if any(kind.reads_target for part in parts_of(drafter) if (kind := draft_kind(part)) is not None):
            known = target.cache.reserve(_PROBE, _PROMPT - 1)
            target.forward([Piece.from_span(prompt[1:], None, NO_SLOTS, known)])
            target.cache.commit(_PROBE, range(_PROMPT - 1))
        span = begin()
        draft(1)  # reads a prompt for the first time
        drafter.forget(_PROBE)
        span = begin()
        started = time.perf_counter()
        draft(1)  # reads another one
        first = time.perf_counter() - started
        is_slow = _has_slow_first_runs(target)
        timed = _fastest(_DRAFT_SIZES, draft, max_seconds, runs_first=is_slow, prepare=_emptying_caches(target))
        if len(timed.sizes) == 1:  # time was up after one level
            return Curve([1], timed.seconds.tolist()), 0.0, 0.0
        one_level, chain = timed.seconds[:2].tolist()
        # If other load slowed the single level down, all levels are taken to cost the same.
        later = (chain - one_level) / (_DRAFT_LEVELS - 1)
        start = max(one_level - later, 0.0) if later > 0 else 0.0
        levels = Curve(timed.sizes[1:].tolist(), ((timed.seconds[1:] - start) / _DRAFT_LEVELS).tolist())
        reading = max(first - chain, 0.0) / _PROMPT if reads_prompts(drafter) else 0.0
        return levels, reading, start
    finally:
        drafter.forget(_PROBE)
        target.cache.free(_PROBE)


def _widths(width: int, target: TargetRunner) -> tuple[int, ...]:
    """Return an expansion whose levels have as many nodes.

    On GPUs a node has no more children than best first: kernels are compiled for their number.
    """
    children = width if target.loaded.device.type == "cpu" else min(width, BEST_FIRST_WIDTH)
    assert width % children == 0
    return (children, width // children, *[1] * (_DRAFT_LEVELS - 2))
