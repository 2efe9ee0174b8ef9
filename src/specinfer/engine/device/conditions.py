"""Conditions of steps on a device: why a target, its drafters or a request take host steps instead."""

from specinfer.core.lookups import AUTOMATIC
from specinfer.core.request import Request
from specinfer.core.rules import AUTO, RULES, TRAVERSAL, is_random
from specinfer.drafters import Drafter, MergedDrafter, SmallModelDrafter
from specinfer.engine.device.processing import can_adjust
from specinfer.model.recurrent.layers import is_hybrid
from specinfer.model.runner import ModelRunner, TargetRunner
from specinfer.ops.logits import MAX_ENDS, host_fields

# Why all requests take host steps where `Observer.reads_logits` or `SpeculationPolicy.reads_logits` is true.
READS_LOGITS = "logits are read by the learned policy, a step log, a trace file or a drafter that learns"


def why_not(target: TargetRunner, drafter: Drafter | None) -> str | None:
    """Return why this target and drafter cannot take steps on the device, or None if they can.

    `why_not_sampled` has the reasons that concern some requests only.
    """
    if not isinstance(target, ModelRunner):
        return "the target is on several ranks"
    if target.padded is None:
        return "passes of the target are not captured"
    if drafter is None:
        return None
    if not isinstance(drafter, MergedDrafter) or drafter.selection is not None:
        return "the drafters are chosen among for each request"
    for small in (part for part in drafter.drafters if part.name not in drafter.lookups):
        if not isinstance(small, SmallModelDrafter):
            return f"the drafter {small.name} drafts in another way"
        if small.runner.padded is None and not small.kind.reads_features:
            return f"passes of the drafter {small.name} are not captured"
        if is_hybrid(small.runner.loaded.model):
            return f"the drafter {small.name} has convolutions or recurrent layers"
        if small.kind.window is not None:
            return f"the drafter {small.name} skips a part of long prompts (drafter_window)"
        if not small.shares_vocabulary:
            return f"the drafter {small.name} has another vocabulary"
    return None


def why_not_sampled(drafter: Drafter | None, verification: str) -> str | None:
    """Return why sampled requests take host steps, or None if they need not.

    Greedy requests are drafted for and walked alike under every rule.
    """
    if drafter is None:  # every rule is plain decoding
        return None
    draws = is_random(verification)
    if verification not in ("coupled", AUTO) and not (draws and RULES[verification].gpu_walk):
        return f"verification is {verification}, which has no walk on a device"
    kinds, models = (drafter.drafters, drafter.models) if isinstance(drafter, MergedDrafter) else ((), [])
    if draws and sum(kind.name not in AUTOMATIC for kind in kinds) > 1:
        return f"verification is {verification}, with several drafters"
    if draws and not models:
        return f"verification is {verification}, and no drafter is a model"
    wanted = "without-replacement" if draws else "shared-noise"
    others = {model.draft_sampling for model in models} - {wanted, AUTO}
    return f"draft_sampling is {others.pop()}" if others else None


def drawn_rule(drafter: Drafter | None, verification: str) -> str | None:
    """Return the rule of sampled requests whose tokens are drawn on a device, or None if they take host steps.

    Args:
        drafter: The drafters.
        verification: Verification rule; "auto" has requests under traversal, too.
    """
    rule = TRAVERSAL if verification == AUTO else verification
    return rule if drafter is not None and is_random(rule) and why_not_sampled(drafter, rule) is None else None


def why_on_host(request: Request, *, may_follow: bool, may_sample: bool) -> str | None:
    """Return why this request takes host steps now, or None if its steps can be taken on a device.

    Args:
        may_follow: Whether guesses of lookups are merged there, and so predictions.
        may_sample: Whether sampled requests are drafted for and verified there.
    """
    params = request.params
    if not (may_sample or params.is_greedy):
        return "sampled requests have this verification rule or draft sampling"
    if names := host_fields(params):
        return f"{', '.join(names)} cannot be applied on the device"
    if not can_adjust(request):
        return f"min_tokens, with a grammar or more than {MAX_ENDS} stop tokens"
    if request.prediction_ids and not may_follow:
        return "a prediction, without a lookup among the drafters"
    return None
