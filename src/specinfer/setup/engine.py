"""The engine over assembled models, with the drafters and the policy of one configuration, and its path on a GPU."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from specinfer.core.config import SpeculativeConfig
from specinfer.core.errors import first_line
from specinfer.core.progress import ProgressCallback
from specinfer.core.sampling import SamplingParams
from specinfer.engine.device.conditions import READS_LOGITS, why_not, why_not_sampled
from specinfer.engine.device.executor import DeviceExecutor
from specinfer.engine.device.processing import Processing
from specinfer.engine.engine import Engine
from specinfer.model.graphs.capture import CaptureError, Graphs
from specinfer.model.runner import TargetRunner
from specinfer.ops.triton import why_not_on
from specinfer.policy.base import usual_budgets
from specinfer.setup.assembly import Assembly


def make_engine(parts: Assembly, config: SpeculativeConfig, progress: ProgressCallback | None) -> Engine:
    """Return an engine whose drafters and policy have learned nothing, and capture the steps that it needs on a GPU.

    Args:
        config: Its drafters are some of those that were loaded; None is all of them.
    """
    target, scheduler, speculator = parts.target, parts.scheduler, parts.speculator
    speculator.configure(config)
    drafter, policy = speculator.drafter, speculator.policy
    executor = DeviceExecutor.from_drafter(target, drafter, scheduler, config.verification)
    if executor is not None and not policy.reads_logits:
        executor.prepare(usual_budgets(config.shape), progress)
    else:
        defaults: dict[str, Any] = {**target.loaded.sampling_defaults}
        processing = Processing.from_params(SamplingParams(**defaults))
        for programs in speculator.draft_programs:
            programs.prepare(usual_budgets(config.shape), processing, progress)
    why_no_steps = why_not(target, drafter) or (READS_LOGITS if policy.reads_logits else None)
    why_no_sampled = why_not_sampled(drafter, config.verification)
    log_gpu_path(target, speculator.why_not_captured, why_no_steps, why_no_sampled, device=target.loaded.device)
    engine = Engine(target, drafter, policy, scheduler, config.verification, executor)
    scheduler.plan_with(policy.planner)
    return engine


logger = logging.getLogger(__name__)

Parts = Mapping[str, str | None]  # name of a part -> why it is not used, or None


def log_gpu_path(
    target: TargetRunner,
    drafters: Parts,
    why_no_steps: str | None,
    why_no_sampled: str | None = None,
    *,
    device: torch.device,
) -> None:
    """Log once what is used on a GPU: a warning if any part is not, since generation is then several times as slow.

    Args:
        drafters: Why passes of drafters are not captured, by name.
        why_no_steps: Reason why steps do not run on the device alone, or None if they do.
        why_no_sampled: Reason why those of sampled requests do not.
    """
    if device.type != "cuda":
        return
    parts: dict[str, str | None] = {
        "Triton kernels": why_not_on(device),
        "captured passes of the target": target.why_not_captured,
        **{f"captured passes of {name}": why for name, why in drafters.items()},
        "steps on the device": why_no_steps,
    }
    if why_no_steps is None and why_no_sampled is not None:
        parts["steps on the device of sampled requests"] = why_no_sampled
    level = logging.WARNING if any(parts.values()) else logging.INFO
    logger.log(level, "%s: %s", device, "; ".join(described(parts)))


def described(parts: Parts) -> list[str]:
    """Return "part: yes" or "part: no, because ..." for each part."""
    return [f"{name}: yes" if why is None else f"{name}: no, {why}" for name, why in parts.items()]


def gpu_abilities(device: torch.device) -> Parts:
    """Return what a GPU can do, by trying the smallest kernel and the smallest capture; no model is needed."""
    why_no_triton, why_no_capture = why_not_on(device), None

    def add() -> None:
        total.add_(1)

    try:
        total = torch.zeros(1, device=device)
        Graphs(device).captured(add)()
    except (CaptureError, RuntimeError) as error:
        why_no_capture = first_line(error)
    why_no_steps = why_no_capture if why_no_triton is None else "they need Triton's kernels"
    return {"Triton": why_no_triton, "captured": why_no_capture, "device step": why_no_steps}
