"""Measured costs, kept between runs: a model that starts on a machine it knows need not measure again.

Each file holds what one target and its drafters cost on one machine with one installation. Such a file only saves
time: where it cannot be read or written, costs are measured.
"""

import hashlib
import importlib.metadata
import json
import logging
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from specinfer import kernels
from specinfer.cpus import usable_cpus
from specinfer.drafters.base import Drafter
from specinfer.drafters.merged import MergedDrafter
from specinfer.engine.costs import SIZES, StepCosts, measure_costs
from specinfer.model.device import device_name
from specinfer.model.runner import TargetRunner
from specinfer.places import cache_folder
from specinfer.progress import ProgressCallback

MAX_AGE = 30 * 24 * 3600  # seconds: drivers and machines change without a name for it
# Share of the measuring in which this process was not running: what a busy machine gives must not stay for weeks.
_MAX_IDLE = 0.25
_PER_OCTAVE = 4  # bytes read for a pass are told apart in steps of a fifth
logger = logging.getLogger(__name__)


def cached_costs(
    target: TargetRunner, drafter: Drafter, *, fresh: bool = False, progress: ProgressCallback | None = None
) -> StepCosts:
    """What steps cost: as measured by an earlier run in the last 30 days, or else measured now, and kept; those of a
    target that several ranks hold are measured each time.

    Args:
        fresh: Measure in any case.
        progress: Told of passes that are slow.
    """
    if not target.loaded.share.is_whole:  # what lies between ranks may be another network the next time
        return measure_costs(target, drafter, progress=progress)
    situation = _situation(target, drafter)
    key = hashlib.sha256(json.dumps(situation, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / f"costs-{key}.json"
    costs = None if fresh else _read(path, situation)
    if costs is None:
        is_idle = target.cache.num_available == target.cache.num_slots  # else the larger sizes may find no room
        # While a pass waits for weights the process does not run, but nobody keeps it from running.
        started, worked = time.perf_counter(), time.process_time() + target.loaded.seconds_waiting
        costs = measure_costs(target, drafter, progress=progress)
        seconds, worked = time.perf_counter() - started, time.process_time() + target.loaded.seconds_waiting - worked
        if not is_idle or seconds - worked > _MAX_IDLE * seconds + 0.05:
            logger.info("measured costs are not kept: other requests or processes held the measurement up")
            return costs
        _write(path, {"situation": situation, "time": time.time(), "costs": costs.as_dict()})
    return costs


def _situation(target: TargetRunner, drafter: Drafter) -> dict[str, Any]:
    """All that costs depend on."""
    parts = drafter.drafters if isinstance(drafter, MergedDrafter) else (drafter,)
    selection = drafter.selection if isinstance(drafter, MergedDrafter) else None
    return {
        "device": device_name(target.loaded.device),
        "cores": usable_cpus(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernels": kernels.describe(),
        "specinfer": importlib.metadata.version("specinfer"),
        "dtype": str(target.loaded.dtype),
        "target": _shape(target),
        "drafters": [[part.name, _shape(getattr(part, "runner", None))] for part in parts],
        **({"num_asked": selection.num_asked} if selection else {}),
        **_streaming(target),
        # A small cache leaves the larger sizes unmeasured.
        "num_sizes": sum(size <= target.cache.num_slots // 2 for size in SIZES),
    }


def _streaming(target: TargetRunner) -> dict[str, Any]:
    """How much is read for a pass, and where from; nothing of a target that is held.

    Where the memory at hand decides how many layers stay, some more or fewer are the same situation: what a pass costs
    is brought up to date by every step.
    """
    stream = target.loaded.stream
    if stream is None or not stream.bytes_per_pass:
        return {}
    # "passes" are what is kept; what earlier versions kept was a curve, whose bend could be a slow moment of the disk.
    return {
        "streamed": [
            "passes",
            round(_PER_OCTAVE * math.log2(stream.bytes_per_pass)),
            str(target.loaded.folder.resolve()),
        ]
    }


def _shape(runner: TargetRunner | None) -> list[Any] | None:
    """None: a drafter that is no model."""
    if runner is None:
        return None
    loaded = runner.loaded
    shape = [loaded.num_parameters, len(loaded.layer_shapes), loaded.num_logits]
    return [type(loaded.model).__name__, *shape, loaded.quantization]


def _read(path: Path, situation: dict[str, Any]) -> StepCosts | None:
    try:
        stored = json.loads(path.read_text())
        age = time.time() - float(stored["time"])
        costs = StepCosts.from_dict(stored["costs"])
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
    """In one move, so that no reader meets half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=2)
            os.replace(partial, path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.info("measured costs are not kept: %s cannot be written (%s)", path, error.strerror)
