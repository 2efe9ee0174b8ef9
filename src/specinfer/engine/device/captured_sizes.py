"""CapturedSizes: the sizes that programs are captured for, and whether a step runs in its own size or a larger one."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from specinfer.core.errors import first_line
from specinfer.core.progress import CAPTURING, COMPILING, ProgressCallback, progress_of
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.drafters.kind import DraftKind
from specinfer.engine.device.draft_shape import DraftShape, holds, shape_of, shape_of_guesses
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.logprobs import Asked
from specinfer.engine.device.processing import Processing
from specinfer.engine.device.rows import DeviceRows
from specinfer.model.graphs.capture import CaptureError, Graphs
from specinfer.model.graphs.sizes import REQUESTS
from specinfer.model.runner import ModelRunner

T = TypeVar("T")

_MEMORY = 0.8  # decay per step of what is remembered of a size's time
_MAX_SIZES = 64  # captured at the same time; the least recently used one is dropped
_CUT = 0.1  # of the time of a step, counted as lost if trees are cut: tokens that they would have had in addition


class SizeChoice:
    """A choice that loses little time to captures and to steps that are too large.

    A capture delays all requests. So a step runs in a larger size that is ready, or with trees cut to a smaller one,
    until the time lost that way is as long as a capture: then its own size is captured. This loses at most twice as
    much as the best choice in hindsight (the ski rental problem; Karlin et al., "Competitive snoopy caching", 1988).
    """

    def __init__(self) -> None:
        self._seconds: dict[LaunchSize, float] = {}  # of a step
        self._lost: dict[LaunchSize, float] = {}  # seconds, of sizes that were not ready

    def observe(self, size: LaunchSize, seconds: float) -> None:
        """Learn how long a step took on the device."""
        self._seconds[size] = _MEMORY * self._seconds.get(size, seconds) + (1 - _MEMORY) * seconds

    def forget(self, size: LaunchSize) -> None:
        """Start anew with a size that is no longer ready."""
        self._lost.pop(size, None)

    def choose(
        self,
        wanted: LaunchSize,
        ready: Collection[LaunchSize],
        most_nodes: int,
        capture_seconds: float,
        *,
        may_cut: bool = False,
        has_memory: Callable[[LaunchSize], bool] = lambda _: True,
    ) -> LaunchSize | None:
        """Return the size to run a step in, which is captured if it is not ready, or None if there is none.

        Args:
            wanted: The smallest size of the step.
            ready: Sizes that are captured.
            most_nodes: Draft tokens of a tree that there are slots for.
            capture_seconds: Time that a capture takes.
            may_cut: Whether trees may be smaller than wanted, which fixed expansions may not.
            has_memory: Function that returns whether there is memory to capture a size.
        """
        if wanted in ready:
            return wanted
        anew = wanted if has_memory(wanted) else None
        fitting = [size for size in ready if size.num_slots - 1 <= most_nodes]
        larger = [size for size in fitting if size.holds(wanted)]
        if not larger:
            # With the trees of a size that is ready, so that other trees need no further captures.
            same = [replace(wanted, num_rows=size.num_rows, shape=size.shape) for size in fitting]
            if holding := [size for size in same if size.holds(wanted) and has_memory(size)]:
                return min(holding, key=_cost)
            cut = [size for size in fitting if size.shape and replace(size, shape=wanted.shape).holds(wanted)]
            if not cut or not may_cut or wanted.shape is None:
                return anew
            deepest = max((size.max_depth, size.num_nodes) for size in cut)
            best = min((size for size in cut if (size.max_depth, size.num_nodes) == deepest), key=_cost)
            lost = _CUT * self._seconds.get(best, 0.0)
        else:
            best = min(larger, key=_cost)
            least = max((self._seconds.get(size, 0.0) for size in ready if wanted.holds(size)), default=0.0)
            lost = max(self._seconds.get(best, least) - least, 0.0)
        self._lost[wanted] = self._lost.get(wanted, 0.0) + lost
        return best if anew is None or self._lost[wanted] < capture_seconds else anew


class CapturedSizes(Generic[T]):
    """The captured programs of each size, which are dropped when weights change.

    Args:
        runners: Runners whose weights captured programs read.

    Attributes:
        found: What is captured, by size.
    """

    def __init__(self, graphs: Graphs, runners: Sequence[ModelRunner]) -> None:
        self._graphs, self._runners = graphs, runners
        self._choice = SizeChoice()
        self.found: OrderedDict[LaunchSize, T] = OrderedDict()
        self._too_large: list[LaunchSize] = []  # there was no memory to capture them
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [runner.num_replaced for runner in self._runners]

    def choose(
        self, wanted: LaunchSize, most_nodes: int, *, num_captures: int, may_cut: bool = False
    ) -> LaunchSize | None:
        """Return the size to run a step in, as `SizeChoice.choose` does.

        Args:
            num_captures: Programs that a size has.
        """
        self._drop_old()
        seconds = num_captures * self._graphs.median_seconds
        return self._choice.choose(
            wanted, self.found, most_nodes, seconds, may_cut=may_cut, has_memory=self.has_memory
        )  # fmt: skip

    def has_memory(self, size: LaunchSize) -> bool:
        """Return whether a size is captured, or may be: there was memory for each that it holds."""
        return size in self.found or not any(map(size.holds, self._too_large))

    def observe(self, size: LaunchSize, seconds: float) -> None:
        """Learn how long a step took on the device."""
        self._choice.observe(size, seconds)

    def of(self, size: LaunchSize, capture: Callable[[LaunchSize], T]) -> T:
        """Return what is captured of a size.

        Args:
            capture: Function that captures what the size needs, if it was not captured before.

        Raises:
            CaptureError: It cannot be captured.
            torch.OutOfMemoryError: There is no memory to capture it.
        """
        self._drop_old()
        if size not in self.found:
            if len(self.found) >= _MAX_SIZES:
                self._graphs.wait()
                self._choice.forget(self.found.popitem(last=False)[0])
            try:
                self.found[size] = capture(size)
            except torch.OutOfMemoryError:
                self._too_large.append(size)
                raise
        self.found.move_to_end(size)
        return self.found[size]

    def _drop_old(self) -> None:
        """Drop what is captured if weights have changed since: captured programs read the old ones."""
        if self._versions != self._now():
            self._graphs.wait()  # they may still run
            self.found.clear()
            self._too_large.clear()
            self._versions = self._now()


def _cost(size: LaunchSize) -> tuple[int, ...]:
    """Return what orders sizes by the time of a step."""
    of_logprobs = (size.asked.others, size.asked.best) if size.asked else (-1, -1)
    return (
        size.max_depth,
        size.num_rows * size.num_nodes,
        size.processing,
        *of_logprobs,
        size.adapts,
        size.is_traced,
        size.num_recomputed,
    )


logger = logging.getLogger(__name__)


def usual_processing(rows: DeviceRows, sampling_defaults: Mapping[str, Any], *, may_sample: bool) -> Processing:
    """Return the processing of logits that a model's own sampling parameters need, as far as there is memory for it."""
    defaults = dict(sampling_defaults)
    if not may_sample:
        defaults["temperature"] = 0.0
    processing = Processing.of(SamplingParams(**defaults))
    can_process = processing < Processing.ADJUSTMENT or rows.can_adjust()
    return processing if can_process else Processing.TRUNCATION


def usual_sizes(
    rows: DeviceRows,
    budgets: Sequence[TreeBudget],
    processing: Processing,
    rule: str | None,
    kinds: Sequence[DraftKind],
    *,
    has_lookups: bool,
) -> list[LaunchSize]:
    """Return the sizes of plain steps and of those with trees of these budgets, the largest first.

    Args:
        rule: Verification rule of requests whose tokens are drawn, or None if there are none.
        kinds: Those of the drafters that grow a tree each.
        has_lookups: Whether lookups propose tokens, too.
    """
    sizes: list[LaunchSize] = []
    for count in [count for count in REQUESTS if count <= rows.num_rows][::-1]:
        most = rows.max_rows // count
        shapes: list[DraftShape | None] = [None]
        for budget in filter(holds, budgets if kinds or has_lookups else ()):
            guess_depth = budget.max_depth if has_lookups else 0
            shapes.append(
                shape_of([budget], most - 1, most, guess_depth, kinds)
                if kinds
                else shape_of_guesses(min(budget.max_nodes, most - 1), budget.max_depth, most - 1)
            )
        recomputed = rows.num_recomputed(max(shape.max_depth for shape in shapes if shape) if any(shapes) else 1)
        sizes += dict.fromkeys(
            LaunchSize(count, shape, processing, rule=rule, num_recomputed=recomputed) for shape in shapes[::-1]
        )
    return sizes


def capture_sizes(rows: DeviceRows, sizes: Sequence[LaunchSize], progress: ProgressCallback | None) -> None:
    """Compile and capture the programs of each size that there is memory for, until one cannot be captured.

    Kernels that only some requests need are compiled, too. Their steps are captured when the first such request comes.
    """
    largest = next((size for size in sizes if size.shape is not None), sizes[0])
    rarer = replace(
        largest, processing=Processing.ADJUSTMENT, asked=Asked(1, 1), adapts=rows.takes_adapters, is_masked=True
    )
    rows.compile([*sizes, rarer], progress_of(progress, f"{COMPILING} of whole steps"))
    report = progress_of(progress, f"{CAPTURING} of whole steps")
    for done, size in enumerate(sizes):
        report(done, len(sizes))
        try:
            rows.prepare(size)
        except torch.OutOfMemoryError as error:
            logger.warning("not all steps on the device could be captured: %s", first_line(error))
        except CaptureError as error:  # the first step fails too
            logger.warning("steps on the device could not be captured: %s", first_line(error))
            return
    report(len(sizes), len(sizes))
