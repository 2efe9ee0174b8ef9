"""Measured costs, kept between runs, so that a model need not be measured again on a known machine.

Each file has the costs of one target and its drafters on one machine with one installation.
"""

import importlib.metadata
import logging
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from specinfer import ops
from specinfer.core.progress import ProgressCallback, begin
from specinfer.core.systems import usable_cpus
from specinfer.drafters.base import Drafter
from specinfer.drafters.merge.merged import MergedDrafter, parts_of, reads_prompts
from specinfer.model.device import device_name
from specinfer.model.pass_work import PassWork
from specinfer.model.runner import TargetRunner
from specinfer.policy.cost_measurement import is_alike, measure_costs, pass_sizes, speeds_now
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import ContextCurve, Curve
from specinfer.policy.kept_file import KeptFile

# Maximum share of the measuring time in which this process did not run: a busy machine's costs are kept as such.
_MAX_IDLE = 0.25
_PER_OCTAVE = 4  # the bytes read per pass are distinguished in steps of a fifth
logger = logging.getLogger(__name__)


def cached_costs(
    target: TargetRunner, drafter: Drafter | None, *, fresh: bool = False, progress: ProgressCallback | None = None
) -> CostModel:
    """Return the costs of steps: those measured in the last 30 days, or new ones, which are kept.

    Costs of a target that is sharded over several ranks are measured each time. Those of attention to long contexts
    are assumed at first.

    Args:
        target: The runner of the target.
        drafter: The drafter whose costs are measured with it, or None.
        fresh: Measure in any case.
        progress: Callback for the progress of slow passes.
    """
    costs = _measured_costs(target, drafter, fresh, progress)
    if isinstance(costs.target, Curve) and (work := PassWork.from_loaded(target.loaded)) is not None:
        costs.target = ContextCurve.assumed(costs.target, work)
    return costs


def _measured_costs(
    target: TargetRunner, drafter: Drafter | None, fresh: bool, progress: ProgressCallback | None
) -> CostModel:
    """Return costs of steps without long contexts, arguments as for `cached_costs`."""
    if not target.loaded.shard.is_whole:  # the network between ranks may be another one the next time
        return measure_costs(target, drafter, progress=progress)
    situation = _situation(target, drafter)
    kept = KeptFile("costs", situation)
    costs = None if fresh else kept.read(CostModel.from_dict)
    if costs is not None and (costs := _as_now(costs, target, drafter, kept.path)) is not None:
        return costs
    begin(progress, "measuring costs")
    watch = _Stopwatch(target)
    costs = measure_costs(target, drafter, progress=progress)
    costs.is_provisional = watch.is_delayed
    if costs.is_provisional:
        logger.info("other requests or processes delayed the measurement of costs: the next steps will correct them")
    if not (fresh and costs.is_provisional and kept.path.exists()):
        kept.write(costs.as_dict())
    return costs


def _as_now(costs: CostModel, target: TargetRunner, drafter: Drafter | None, path: Path) -> CostModel | None:
    """Return kept costs at the speed of the machine now, or None if they are to be measured again.

    On a busy machine a new measurement would be no better than the kept one, and steps will correct it. Costs that were
    measured on a busy one are measured again as soon as it is quiet.
    """
    watch = _Stopwatch(target)
    passes, drafting = speeds_now(costs, target, drafter)
    is_delayed = watch.is_delayed
    if is_alike(passes, 1.0) and is_alike(drafting, 1.0):
        if is_delayed or not costs.is_provisional:
            return costs
    elif is_delayed and isinstance(costs.target, Curve):
        logger.info("costs are those in %s at the present speed of the machine: others use it, too", path)
        costs.scale(passes, drafting)
        costs.is_provisional = True
        return costs
    logger.info("costs are measured again: those in %s are of another load", path)
    return None


class _Stopwatch:
    """A stopwatch that shows whether other requests or processes delayed a measurement."""

    def __init__(self, target: TargetRunner) -> None:
        self._target = target
        # Otherwise the larger sizes may not fit.
        self._is_idle = target.cache.num_available == target.cache.num_slots
        self._started, self._worked, self._queued = time.perf_counter(), _worked(target), _queued()

    @property
    def is_delayed(self) -> bool:
        seconds, worked = time.perf_counter() - self._started, _worked(self._target) - self._worked
        lost = max(seconds - worked, _queued() - self._queued)  # several threads may have worked
        return not self._is_idle or lost > _MAX_IDLE * seconds + 0.05


def _worked(target: TargetRunner) -> float:
    """Return the seconds in which this process ran, waited for weights or for compilers that it had started."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system + target.loaded.seconds_waiting


def _queued() -> float:
    """Return the seconds in which threads of this process could run, and waited for a core; 0 where none reports it."""
    total = 0
    for place in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # the thread has ended
            total += int(place.read_text().split()[1])
    return total / 1e9


def _situation(target: TargetRunner, drafter: Drafter | None) -> dict[str, Any]:
    """Return everything that costs depend on."""
    selection = drafter.selection if isinstance(drafter, MergedDrafter) else None
    return {
        "device": device_name(target.loaded.device),
        "cores": usable_cpus(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernels": ops.describe(),
        "specinfer": importlib.metadata.version("specinfer"),
        "dtype": str(target.loaded.dtype),
        "target": _shape(target),
        "drafters": [[part.name, _shape(getattr(part, "runner", None))] for part in parts_of(drafter)]
        if drafter
        else [],
        # Earlier versions stored a time of reading for drafters that read nothing.
        **({} if drafter is None or reads_prompts(drafter) else {"reads_prompts": False}),
        **({"num_asked": selection.num_asked} if selection else {}),
        **_streaming(target),
        # With a small cache the larger sizes are not measured.
        "num_sizes": sum(size <= target.cache.num_slots // 2 for size in pass_sizes(target)),
    }


def _streaming(target: TargetRunner) -> dict[str, Any]:
    """Return how much is read for a pass, and from where; nothing for a target that stays in memory.

    If the available memory decides how many layers stay, a few more or fewer count as the same situation: every step
    updates the cost of a pass.
    """
    stream = target.loaded.stream
    if stream is None or not stream.bytes_per_pass:
        return {}
    # "passes" is the stored format. Earlier versions stored a curve, whose bend could be a slow moment of the disk.
    return {
        "streamed": [
            "passes",
            round(_PER_OCTAVE * math.log2(stream.bytes_per_pass)),
            str(target.loaded.folder.resolve()),
        ]
    }


def _shape(runner: TargetRunner | None) -> list[Any] | None:
    """Return what the costs of a model depend on, or None for a lookup drafter."""
    if runner is None:
        return None
    loaded = runner.loaded
    shape = [loaded.num_parameters, len(loaded.layer_shapes), loaded.num_logits]
    types = [loaded.quantization or loaded.stored_types]
    if loaded.kv_dtype is not None:
        types.append(str(loaded.kv_dtype))
    return [type(loaded.model).__name__, *shape, *types]
