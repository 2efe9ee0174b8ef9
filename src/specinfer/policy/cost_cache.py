"""Measured costs, kept between runs, so that a model need not be measured again on a known machine.

Each file has the costs of one target and its drafters on one machine with one installation. A file only saves
time: if it cannot be read or written, costs are measured.
"""

import hashlib
import importlib.metadata
import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from specinfer import ops
from specinfer.core.files import cache_folder, write_atomically
from specinfer.core.progress import ProgressCallback
from specinfer.core.systems import usable_cpus
from specinfer.drafters.base import Drafter
from specinfer.drafters.merge.merged import MergedDrafter, parts_of, reads_prompts
from specinfer.model.device import device_name
from specinfer.model.pass_work import PassWork
from specinfer.model.runner import TargetRunner
from specinfer.policy.cost_measurement import is_alike, measure_costs, pass_sizes, speeds_now
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import ContextCurve, Curve

MAX_AGE = 30 * 24 * 3600  # seconds: drivers and machines change without a change of name
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
    key = hashlib.sha256(json.dumps(situation, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / f"costs-{key}.json"
    costs = None if fresh else _read(path, situation)
    if costs is not None and (costs := _as_now(costs, target, drafter, path)) is not None:
        return costs
    watch = _Stopwatch(target)
    costs = measure_costs(target, drafter, progress=progress)
    costs.is_provisional = watch.is_delayed
    if costs.is_provisional:
        logger.info("other requests or processes delayed the measurement of costs: the next steps will correct them")
    if not (fresh and costs.is_provisional and path.exists()):
        _write(path, {"situation": situation, "time": time.time(), "costs": costs.as_dict()})
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
        self._started, self._worked = time.perf_counter(), _worked(target)

    @property
    def is_delayed(self) -> bool:
        seconds, worked = time.perf_counter() - self._started, _worked(self._target) - self._worked
        return not self._is_idle or seconds - worked > _MAX_IDLE * seconds + 0.05


def _worked(target: TargetRunner) -> float:
    """Return the seconds in which this process ran, waited for weights or for compilers that it had started."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system + target.loaded.seconds_waiting


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


def _read(path: Path, situation: dict[str, Any]) -> CostModel | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        age = time.time() - float(stored["time"])
        costs = CostModel.from_dict(stored["costs"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("costs are measured again: %s cannot be used (%s)", path, type(error).__name__)
        return None
    if not 0 <= age < MAX_AGE or stored.get("situation") != situation:
        logger.info("costs are measured again: those in %s are old", path)
        return None
    return costs


def _write(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"), is_shared=True)
    except OSError as error:
        logger.info("measured costs are not kept: %s cannot be written (%s)", path, error.strerror)
