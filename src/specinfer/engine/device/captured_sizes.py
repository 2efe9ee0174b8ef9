"""CapturedSizes: the sizes that programs are captured for, and whether a step runs in its own size or a larger one."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch

from specinfer.core.errors import first_line
from specinfer.core.progress import CAPTURING, COMPILING, ProgressCallback, progress_of
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.model.graphs.capture import CaptureError, Graphs, Program
from specinfer.model.runner import ModelRunner

logger = logging.getLogger(__name__)

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
        fitting = [size for size in ready if size.shape.num_slots - 1 <= most_nodes]
        larger = [size for size in fitting if size.holds(wanted)]
        if not larger:
            # With the trees of a size that is ready, so that other trees need no further captures.
            same = [replace(wanted, num_rows=size.num_rows, shape=size.shape) for size in fitting]
            if holding := [size for size in same if size.holds(wanted) and has_memory(size)]:
                return min(holding, key=_cost)
            cut = [size for size in fitting if size.shape.num_nodes and replace(size, shape=wanted.shape).holds(wanted)]
            if not cut or not may_cut or not wanted.shape.num_nodes:
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


class SizedPrograms(Protocol):
    """The programs of one size, over static buffers."""

    @property
    def parts(self) -> Sequence[Program | None]:
        """The programs in their order; None in the place of one that the size does not have."""
        ...


P = TypeVar("P", bound=SizedPrograms)


@dataclass(frozen=True, slots=True)
class Captured(Generic[P]):
    """The programs of one size, and their parts as they are run: captured, on devices that support it."""

    programs: P
    runs: tuple[Program | None, ...]


class CapturedSizes(Generic[P]):
    """The captured programs of each size, which are dropped when weights change.

    Args:
        runners: Runners whose weights captured programs read.
        name: Name of the programs, for messages.

    Attributes:
        found: What is captured, by size.
        captured_at: Time at which the programs of a size were last captured, by `time.perf_counter`.
        is_capturable: False after a capture that failed for another reason than a lack of memory.
    """

    def __init__(self, graphs: Graphs, runners: Sequence[ModelRunner], name: str) -> None:
        self._graphs, self._runners, self._name = graphs, runners, name
        self._choice = SizeChoice()
        self.found: OrderedDict[LaunchSize, Captured[P]] = OrderedDict()
        self._too_large: list[LaunchSize] = []  # there was no memory to capture them
        self._versions = self._now()
        self.captured_at, self.is_capturable = 0.0, True

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

    def of(self, size: LaunchSize, make: Callable[[LaunchSize], P], *, compiles: bool = False) -> Captured[P]:
        """Return the programs of a size, which are captured if they were not before.

        Args:
            make: Function that makes the programs of a size, without requests, as captures run them.
            compiles: Whether to compile their kernels together first.

        Raises:
            CaptureError: They cannot be captured.
            torch.OutOfMemoryError: There is no memory to capture them.
        """
        self._drop_old()
        if size not in self.found:
            if len(self.found) >= _MAX_SIZES:
                self._graphs.wait()
                self._choice.forget(self.found.popitem(last=False)[0])
            try:
                programs = make(size)
                if compiles:
                    self._graphs.compile(filter(None, programs.parts))
                runs = tuple(part and self._graphs.captured(part) for part in programs.parts)
                self.found[size] = Captured(programs, runs)
            except torch.OutOfMemoryError:
                self._too_large.append(size)
                raise
            except CaptureError:
                self.is_capturable = False
                raise
            self.captured_at = time.perf_counter()
        self.found.move_to_end(size)
        return self.found[size]

    def try_of(
        self, size: LaunchSize, make: Callable[[LaunchSize], P], instead: str = "", *, compiles: bool = False
    ) -> Captured[P] | None:
        """Return the programs of a size, or None, with a warning, if they cannot be captured.

        Args:
            instead: What is done then, for the warning.
        """
        try:
            return self.of(size, make, compiles=compiles)
        except (CaptureError, torch.OutOfMemoryError) as error:
            requests = f" for {size.num_rows} requests" if self.is_capturable else ""  # smaller sizes may be, then
            logger.warning("%s cannot be captured%s%s: %s", self._name, requests, instead, first_line(error))
            return None

    def prepare(
        self,
        sizes: Sequence[LaunchSize],
        make: Callable[[LaunchSize], P],
        progress: ProgressCallback | None,
        rarer: Sequence[LaunchSize] = (),
    ) -> None:
        """Compile and capture each size that there is memory for, until one cannot be captured.

        Args:
            rarer: Sizes with kernels that only some requests need. They are compiled, and captured with the first such
                request.
        """
        programs = (part for size in (*sizes, *rarer) for part in make(size).parts if part is not None)
        self._graphs.compile(programs, progress=progress_of(progress, f"{COMPILING} of {self._name}"))
        report = progress_of(progress, f"{CAPTURING} of {self._name}")
        for done, size in enumerate(sizes):
            report(done, len(sizes))
            if self.try_of(size, make) is None and not self.is_capturable:
                return  # the first step fails too
        report(len(sizes), len(sizes))

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
