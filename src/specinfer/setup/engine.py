"""The engine over assembled models, with the drafters and the policy of one configuration."""

from typing import Any

from specinfer.core.config import SpeculativeConfig
from specinfer.core.progress import ProgressCallback
from specinfer.core.sampling import SamplingParams
from specinfer.engine.device.executor import DeviceExecutor
from specinfer.engine.device.processing import READS_LOGITS, Processing, why_not, why_not_sampled
from specinfer.engine.engine import Engine
from specinfer.policy.base import usual_budgets
from specinfer.setup.assembly import Assembly
from specinfer.setup.gpu_path import log_gpu_path


def make_engine(parts: Assembly, config: SpeculativeConfig, progress: ProgressCallback | None) -> Engine:
    """Return an engine whose drafters and policy have learned nothing, and capture the steps that it needs on a GPU.

    Args:
        config: Its drafters are some of those that were loaded; None is all of them.
    """
    target, scheduler, speculator = parts.target, parts.scheduler, parts.speculator
    speculator.configure(config)
    drafter, policy = speculator.drafter, speculator.policy
    executor = DeviceExecutor.of(target, drafter, scheduler, config.verification)
    if executor is not None and not policy.reads_logits:
        executor.prepare(usual_budgets(config.shape), progress)
    else:
        defaults: dict[str, Any] = {**target.loaded.sampling_defaults}
        processing = Processing.of(SamplingParams(**defaults))
        for programs in speculator.draft_programs:
            programs.prepare(usual_budgets(config.shape), processing, progress)
    why_no_steps = why_not(target, drafter) or (READS_LOGITS if policy.reads_logits else None)
    why_no_sampled = why_not_sampled(drafter, config.verification)
    log_gpu_path(target, speculator.why_not_captured, why_no_steps, why_no_sampled, device=target.loaded.device)
    engine = Engine(target, drafter, policy, scheduler, config.verification, executor)
    scheduler.planner = speculator.planner
    return engine
