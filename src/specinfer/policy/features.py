"""Features of a request before a step, from which a learned policy decides.

Features use only earlier steps and known tokens, never a draft token of the coming step, so that rules with random
accept/reject decisions keep their distribution. No feature depends on how large earlier trees were: hits are counted
by position in the text, and a lookup is judged by what it would have proposed, whether it was used or not.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.lookups import AUTOMATIC, LOOKUPS
from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree
from specinfer.drafters.base import Drafter, Lookup, Prospect
from specinfer.drafters.merge.merged import MergedDrafter
from specinfer.policy.request_states import RequestStates
from specinfer.verify import Acceptance

logger = logging.getLogger(__name__)
Floats = npt.NDArray[np.float64]
_OF_TARGET = ("top", "margin", "entropy", "said")  # from the distribution that the last token was sampled from
_OF_REQUEST = ("temperature", "greedy")
_OF_DRAFTER = ("hit_fast", "hit_slow", "streak")
_OF_MODEL = ("sure",)
_OF_LOOKUP = ("match", "chance", "reach")
_FAST, _SLOW, _OVERALL = 0.75, 0.95, 0.995  # decay of the averages per token
_MAX_STREAK = 64


def find_slots(drafter: Drafter) -> dict[str, Drafter]:
    """Return the drafter in each slot: lookups by their names, models as "model", "model-2", ... in their order.

    What is learned is stored by slot, because a model may be in another folder, or be a copy of another size.
    """
    parts = drafter.drafters if isinstance(drafter, MergedDrafter) else (drafter,)
    slots: dict[str, Drafter] = {}
    num_models = 0
    for part in parts:
        if part.name in AUTOMATIC:
            continue
        if part.name in LOOKUPS:
            slots[part.name] = part
        else:
            num_models += 1
            slots["model" if num_models == 1 else f"model-{num_models}"] = part
    return slots


def feature_names(slots: Sequence[str]) -> tuple[str, ...]:
    """Return the feature names in the order of `FeatureTracker.features`; the part before the dot is the group."""
    names = [f"target.{name}" for name in _OF_TARGET] + [f"request.{name}" for name in _OF_REQUEST]
    for slot in slots:
        own = _OF_LOOKUP if slot in LOOKUPS else _OF_MODEL
        names += [f"{slot}.{name}" for name in (*_OF_DRAFTER, *own)]
    return tuple(names)


@dataclass(slots=True)
class _HitRates:
    """Success rates of a drafter: shares of its first proposals that were right."""

    fast: float = 0.5
    slow: float = 0.5
    streak: int = 0
    confidence: float = 0.5

    def note(self, hit: bool, confidence: float | None = None) -> None:
        self.fast += (1 - _FAST) * (hit - self.fast)
        self.slow += (1 - _SLOW) * (hit - self.slow)
        self.streak = min(self.streak + 1, _MAX_STREAK) if hit else 0
        if confidence is not None:
            self.confidence += (1 - _FAST) * (confidence - self.confidence)


@dataclass(slots=True)
class _RequestState:
    """State of one request: the drafters' success rates and the target's last distribution."""

    hit_rates: dict[str, _HitRates]  # by slot
    target: tuple[float, ...] = (math.nan,) * len(_OF_TARGET)
    prospects: dict[str, Prospect] = field(default_factory=dict)  # what lookups would have proposed in this step


class FeatureTracker:
    """A tracker that follows requests from step to step.

    Args:
        drafter: The drafter whose proposals are followed.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._slots = find_slots(drafter)
        self._slot_of = {part.name: slot for slot, part in self._slots.items()}
        self._lookups = {slot: part for slot, part in self._slots.items() if isinstance(part, Lookup)}
        self.slots = tuple(self._slots)
        self.names = feature_names(self.slots)
        self._states = RequestStates(self._new_state)
        self._overall = {slot: _HitRates() for slot in self._slots}  # initial values of new requests

    def features(self, spans: Sequence[Span]) -> Floats:
        """Return the features of requests that are about to emit a token: [spans, features], NaN if not known yet."""
        states = self._states.of_spans(spans)
        for slot, lookup in self._lookups.items():
            try:
                prospects = lookup.prospects(spans)
            except Exception:  # the failure costs its features, not the step
                logger.exception("drafter %s cannot predict what it would propose", lookup.name)
                prospects = [Prospect()] * len(spans)
            for state, prospect in zip(states, prospects, strict=True):
                state.prospects[slot] = prospect
        return np.asarray([self._row(span.request, state) for span, state in zip(spans, states, strict=True)])

    def _new_state(self) -> _RequestState:
        overall = self._overall.items()
        return _RequestState({slot: _HitRates(rates.slow, rates.slow, 0, rates.confidence) for slot, rates in overall})

    def _row(self, request: Request, state: _RequestState) -> list[float]:
        params = request.params
        row = [*state.target, params.temperature, float(params.is_greedy)]
        for slot, rates in state.hit_rates.items():
            row += (rates.fast, rates.slow, math.log2(1 + rates.streak))
            prospect = state.prospects.get(slot)
            if prospect is None:
                row.append(rates.confidence)
            else:
                prob = prospect.path_probs[0] if prospect.path_probs else 0.0
                row += (math.log2(1 + prospect.match), prob, math.log2(1 + prospect.reach))
        return row

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        """Update the features of a request, as `Observer.on_tokens`."""
        state = self._states.find(request)
        if state is None:
            return
        tokens = request.token_ids[-num_generated:]
        nodes = (0, *acceptance.path)[:num_generated]
        state.target = _distribution_features(logits[nodes[-1]], tokens[-1])
        for slot, prospect in state.prospects.items():
            for proposed, token in zip(prospect.tokens, tokens, strict=False):
                self._note(state, slot, proposed == token)
                if proposed != token:
                    break
        state.prospects.clear()
        for node, token in zip(nodes, tokens, strict=True):
            met: set[str] = set()  # only the first proposal of each drafter counts
            for child, drafter, _, confidence in tree.candidates[node]:
                slot = self._slot_of.get(drafter, "")
                if slot and slot not in met and slot not in self._lookups:
                    met.add(slot)
                    self._note(state, slot, tree.tokens[child] == token, confidence)

    def _note(self, state: _RequestState, slot: str, hit: bool, confidence: float | None = None) -> None:
        state.hit_rates[slot].note(hit, confidence)
        overall = self._overall[slot]
        overall.slow += (1 - _OVERALL) * (hit - overall.slow)
        if confidence is not None:
            overall.confidence += (1 - _OVERALL) * (confidence - overall.confidence)


def _distribution_features(logits: Tensor, token: int) -> tuple[float, ...]:
    """Return features of the target's distribution before processing, `logits` [vocab], and of the emitted token."""
    distribution = torch.softmax(logits.float(), -1)
    values = torch.cat(
        [distribution.topk(2).values, torch.special.entr(distribution).sum()[None], distribution[token][None]]
    )
    first, second, entropy, emitted = values.tolist()
    return first, first - second, entropy, emitted
