"""Acceptance of a pair of target and drafters on the target's own answers, measured once and kept for 30 days.

What is expected of a pair depends on its text. A target with a chat template answers messages of several kinds, in its
own template. Others are given no text, as nobody knows what they will continue.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.core.progress import ACCEPTANCE, ProgressCallback
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree_shape import parse_tree
from specinfer.demo.pair import is_demo_target
from specinfer.drafters import MergedDrafter
from specinfer.drafters.merge.merged import parts_of
from specinfer.engine.engine import Engine
from specinfer.engine.scheduler import Scheduler
from specinfer.inputs.chat.samples import KINDS, in_turn, rendered
from specinfer.inputs.chat.template import ChatTemplate
from specinfer.model.runner import TargetRunner
from specinfer.policy.acceptance import AcceptanceProfile
from specinfer.policy.acceptance_measurement import AcceptanceCounter
from specinfer.policy.base import budget_of
from specinfer.policy.kept_file import KeptFile

CHAT_PROMPTS = "chat prompts"
TREE = "3,1,1"  # few rows, and three levels
_MAX_TOKENS, _MAX_SECONDS = 32, 10.0  # a quiet machine takes less
_MAX_LEN = 512  # of a prompt
_LEAST_TREES = 16  # else nothing is kept
_numbers = itertools.count()
logger = logging.getLogger(__name__)


def measure_acceptance(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    text: str,
    max_seconds: float = float("inf"),
    progress: ProgressCallback | None = None,
) -> AcceptanceProfile | None:
    """Let the target answer all prompts with one tree, and return what was accepted; None if nothing was drafted.

    The engine may serve no other request; its policy is put back.

    Args:
        text: What the prompts are.
        max_seconds: Time after which the answers are cut.

    Raises:
        RuntimeError: A request failed.
    """
    assert engine.drafter is not None
    usual, counter = engine.policy, AcceptanceCounter(budget_of(parse_tree(TREE), _num_drafters(engine)))
    salt, ends = f"acceptance-{next(_numbers)}", engine.target.loaded.eos_token_ids
    requests = [
        Request(f"{salt}-{i}", list(ids), params, seed=i, eos_token_ids=ends, cache_salt=f"{salt}-{i}")
        for i, ids in enumerate(prompts)
    ]
    engine.policy, started = counter, time.perf_counter()
    try:
        for request in requests:
            engine.add(request)
        while engine.has_work and time.perf_counter() - started < max_seconds:
            engine.step()
            if progress is not None:
                progress(ACCEPTANCE, sum(each.num_output for each in requests), len(requests) * _total(params))
    finally:
        for request in requests:
            engine.abort(request)
        engine.policy = usual
    for number, request in enumerate(requests):
        if request.error is not None:
            raise RuntimeError(f"prompt {number}: {request.error}")
    return counter.profile(text)


def _num_drafters(engine: Engine) -> int:
    return engine.drafter.num_drafters if isinstance(engine.drafter, MergedDrafter) else 1


def _total(params: SamplingParams) -> int:
    return params.max_tokens or 1


class ProfileSource:
    """The acceptance profiles of one target, by drafters.

    Args:
        target, scheduler: Those of the engine.
        tokenizer: The target's, or None.
        progress: Callback for the progress of measurements.
    """

    def __init__(
        self, target: TargetRunner, scheduler: Scheduler, tokenizer: Any, progress: ProgressCallback | None
    ) -> None:
        self._target, self._scheduler, self._tokenizer, self._progress = target, scheduler, tokenizer, progress

    def kept(self, drafter: MergedDrafter) -> KeptFile:
        """Return the file of the profile with these drafters."""
        return KeptFile("acceptance", _situation(self._target, drafter))

    def find(
        self, drafter: MergedDrafter, make: Callable[[], MergedDrafter | None], *, may_measure: bool
    ) -> AcceptanceProfile | None:
        """Return the kept profile, or measure it if it is allowed and there is a chat template; else None.

        Args:
            drafter: The drafter that serves.
            make: Function that makes one like it, which learns from the answers.
            may_measure: Whether passes are quick enough.
        """
        kept = self.kept(drafter)
        if (profile := kept.read(AcceptanceProfile.from_dict)) is not None:
            return profile
        is_busy = next(iter(self._scheduler.requests()), None) is not None
        prompts = [] if is_busy or not may_measure else self._prompts()
        if not prompts:
            return None
        engine = Engine(self._target, make(), AcceptanceCounter(budget_of(parse_tree("1"))), self._scheduler)
        params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS)
        try:
            profile = measure_acceptance(engine, prompts, params, CHAT_PROMPTS, _MAX_SECONDS, self._progress)
        except RuntimeError as error:
            logger.warning("acceptance is assumed, because measuring it failed: %s", error)
            return None
        if profile is None or profile.num_trees < _LEAST_TREES:
            return None
        kept.write(profile.as_dict())
        return profile

    def _prompts(self) -> list[list[int]]:
        """Return a message of each kind in the target's template, or nothing without one."""
        folder = self._target.loaded.folder
        if not getattr(self._tokenizer, "chat_template", None) or is_demo_target(folder):
            return []
        template = ChatTemplate(self._tokenizer, min(self._target.loaded.max_position, self._target.cache.num_slots))
        try:
            ids = rendered(template.read, [text for _, text in in_turn(KINDS, len(KINDS))])
        except RequestError as error:
            logger.info("acceptance is assumed, because chat prompts cannot be read: %s", error)
            return []
        room = self._target.cache.num_slots // len(ids) - 2 * _MAX_TOKENS
        return [prompt for prompt in ids if len(prompt) <= min(_MAX_LEN, room)]


def _situation(target: TargetRunner, drafter: MergedDrafter) -> dict[str, Any]:
    """Return everything that acceptance depends on; the machine is not part of it."""
    parts = [[part.name, _identity(getattr(part, "runner", None))] for part in parts_of(drafter)]
    return {"target": _identity(target), "drafters": parts, "tree": TREE}


def _identity(runner: TargetRunner | None) -> list[Any] | None:
    """Return what distinguishes a model from others, or None for a lookup."""
    if runner is None:
        return None
    loaded = runner.loaded
    settings = [str(loaded.dtype), loaded.quantization, loaded.num_logits]
    return [str(loaded.folder.resolve()), _newest(loaded.folder), *settings]


def _newest(folder: Path) -> list[Any]:
    """Return the sizes and times of a model's files."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
