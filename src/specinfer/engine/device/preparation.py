"""Captures of whole steps at the start, so that the first requests do not wait for them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from specinfer.core.errors import first_line
from specinfer.core.progress import CAPTURING, COMPILING, ProgressCallback, progress_of
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.drafters.kind import DraftKind
from specinfer.engine.device.growth import DraftShape
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.logprobs import Asked
from specinfer.engine.device.processing import Processing
from specinfer.engine.device.rows import DeviceRows
from specinfer.engine.device.sizes import holds, shape_of, shape_of_guesses
from specinfer.model.graphs.capture import CaptureError
from specinfer.model.graphs.sizes import REQUESTS

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
