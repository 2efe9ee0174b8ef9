"""The learned speculative scheduler: drafters and tree size for each request and step, from the request's features.

A network gives the expected tokens, the live cost model the seconds, and the choice is the most tokens per second for
the current batch. Requests share a pass, so nodes are priced by what they add to it, and levels by the deepest tree.
Observed acceptance corrects the expectation. The policy "auto" asks for these choices if a network was trained, and
chooses by the observed acceptance of ranks where the network cannot be trusted.
Source: the learning-based speculative scheduler of SpecInfer's first version (arXiv 2305.09781v1).
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from specinfer.core.decayed_ratio import DecayedRatio
from specinfer.core.request import Request, Span
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.drafters.base import Drafter
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Floats
from specinfer.policy.features import FeatureTracker, find_slots
from specinfer.policy.network import SMALL_NODES, PolicyNetwork, token_weight
from specinfer.policy.optimizer import ExpectedYield, choose_each, clearly_faster, pays_to_read
from specinfer.policy.request_states import RequestStates
from specinfer.verify import Acceptance

logger = logging.getLogger(__name__)
_PROBE = 50  # steps of a request without a model before one step tests whether it would help again
_MEMORY = 0.98  # decay per step of the correction for all requests, about fifty steps
_OWN_MEMORY = 0.9  # the same for one request
_PRIOR = 8.0  # expected accepted tokens at which the observation gets half the weight
_DOUBT = 40.0  # the same for the correction of everything
_USUAL = 3.0  # draft tokens accepted in a usual step
# The best of many estimates is often an overestimate: a configuration other than the usual one must promise this much
# more. The usual one follows from the last twenty steps of all requests.
_CLEARLY, _CALM = 1.15, 0.95
_MOST = 3.0  # largest factor of a correction
_BOUND = math.log(2.5)  # log of observed over expected acceptance beyond which the network is not trusted
_REST = 200  # steps that are then decided by cost


@dataclass(slots=True)
class _RequestState:
    """State of one request: the choice for this step, and the results of earlier choices."""

    own: dict[tuple[str, ...], DecayedRatio] = field(default_factory=dict)  # by the drafters used
    chosen: int = 0
    expected: float = 0.0  # draft tokens to be accepted, by the network
    for_all: float = 0.0  # the same, corrected by the acceptance of all requests
    corrected: float = 0.0  # the same, also corrected by the acceptance of this request
    num_without_model: int = 0


class LearnedChoice:
    """A choice from the network's configurations.

    Args:
        network: Network that predicts the tokens, nodes and levels of each configuration.
        costs: Costs of steps.
        drafter: The drafter that the budgets are for.

    Attributes:
        num_decided: Choices made by the network.
        num_fallen_back: Choices that it did not make, by reason: "drafters", "prediction", "range" or "error".
    """

    def __init__(self, network: PolicyNetwork, costs: CostModel, drafter: Drafter) -> None:
        self._costs = costs
        self.num_decided = 0
        self.num_fallen_back: Counter[str] = Counter()
        self._network = network
        slots = find_slots(drafter)
        self._fits = tuple(slots) == network.slots
        self._tracker = FeatureTracker(drafter)
        names = {slot: part.name for slot, part in slots.items()}
        self._budgets = [configuration.budget(names) if self._fits else OFF for configuration in network.configurations]
        self._uses_model = np.asarray([configuration.uses_model for configuration in network.configurations])
        self._probe = min(
            (i for i, configuration in enumerate(network.configurations) if configuration.uses_model),
            key=lambda i: network.configurations[i].max_nodes,
            default=0,
        )
        self._same_slots = {
            configuration.slots: np.asarray([each.slots == configuration.slots for each in network.configurations])
            for configuration in network.configurations
        }
        # By the drafters used, over all requests. Not by size: a size chosen because too much was expected of it
        # would always seem to do worse than the others.
        self._forget_acceptance()
        self._pace: Floats | None = None  # [configurations] recent average of the expected seconds per token
        self._states = RequestStates(_RequestState)
        self._num_resting = 0
        if not self._fits:
            logger.warning(
                "the speculation policy was trained with drafters %s, not %s: trees are chosen by observed acceptance",
                ", ".join(network.slots), ", ".join(slots) or "none",
            )  # fmt: skip

    def _forget_acceptance(self) -> None:
        """Expect again what the network does."""
        self._ratios = {slots: DecayedRatio(_MEMORY, prior=_PRIOR) for slots in self._same_slots}
        self._overall = DecayedRatio(_MEMORY, prior=_DOUBT)  # for what was expected after correction

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget | None]:
        """Return the budget of each request, or None where the network cannot be trusted."""
        if not self._fits:
            self.num_fallen_back["drafters"] += len(spans)
            return [None] * len(spans)
        features = self._tracker.features(spans)
        if self._num_resting:
            self._num_resting -= 1
            self.num_fallen_back["error"] += len(spans)
            return [None] * len(spans)
        is_known = self._network.knows(features)
        is_predicted = np.asarray([bool(span.request.prediction_ids) for span in spans])
        out_of_range = int((~is_known & ~is_predicted).sum())
        self.num_fallen_back += Counter(prediction=int(is_predicted.sum()), range=out_of_range)
        deciding = np.flatnonzero(is_known & ~is_predicted).tolist()
        budgets: list[TreeBudget | None] = [None] * len(spans)
        if deciding:
            chosen = self._decide([spans[i] for i in deciding], features[deciding])
            for i, budget in zip(deciding, chosen, strict=True):
                budgets[i] = budget
        return budgets

    def _decide(self, spans: Sequence[Span], features: Floats) -> list[TreeBudget]:
        states = self._states.of_spans(spans)
        expected = self._network.expect(features)
        for_all = (expected.tokens - 1.0) * [
            _correction(self._ratios[configuration.slots]) for configuration in self._network.configurations
        ]
        corrected = ExpectedYield(1.0 + for_all * self._own(states), expected.nodes, expected.levels)
        num_context = sum(span.start for span in spans)
        self._costs.follow(num_context // len(spans), 1)
        alone = corrected.rates(self._costs, 1)
        self._costs.follow(num_context, len(spans))
        pace = 1.0 / alone.mean(axis=0)
        self._pace = pace if self._pace is None else _CALM * self._pace + (1.0 - _CALM) * pace
        self._charge_reading(spans, corrected, alone)
        chosen = choose_each(corrected, self._costs)
        if len(spans) == 1:
            chosen[0] = self._usual_unless_clearly_better(corrected.rates(self._costs, 1)[0])
        budgets = []
        for i, (span, state, choice) in enumerate(zip(spans, states, chosen.tolist(), strict=True)):
            if self._uses_model[choice]:
                state.num_without_model = 0
            else:
                state.num_without_model += 1
                if state.num_without_model % _PROBE == 0 and span.request.drafting.is_read:
                    choice = self._probe
            state.chosen = choice
            state.expected = float(expected.tokens[i, choice]) - 1.0
            state.for_all = float(for_all[i, choice])
            state.corrected = float(corrected.tokens[i, choice]) - 1.0
            budgets.append(self._budgets[choice])
        self.num_decided += len(spans)
        return budgets

    def _usual_unless_clearly_better(self, rates: Floats) -> int:
        """Return the configuration with the least recent time per token, unless another one promises clearly more.

        The yield of plain decoding is known, so it needs no margin.
        """
        assert self._pace is not None
        best = int(rates.argmax())
        is_plain = not self._budgets[best].max_nodes
        return best if is_plain else clearly_faster(rates, int(self._pace.argmin()), _CLEARLY)

    def _own(self, states: Sequence[_RequestState]) -> Floats:
        """Return the acceptance of each request relative to all requests: [requests, configurations]."""
        own = np.ones((len(states), len(self._network.configurations)))
        for row, state in zip(own, states, strict=True):
            for slots, ratio in state.own.items():
                row[self._same_slots[slots]] = _correction(ratio)
        return own

    def _charge_reading(self, spans: Sequence[Span], expected: ExpectedYield, alone: Floats) -> None:
        """Exclude models if the possible gain is less than the cost of reading the prompt."""
        for i, (span, rates) in enumerate(zip(spans, alone, strict=True)):
            if span.request.drafting.is_read or not self._costs.read_token:
                continue
            saved = float(1.0 / rates[~self._uses_model].max() - 1.0 / rates.max())
            if not pays_to_read(span.request, saved, self._costs):
                expected.tokens[i, self._uses_model] = 0.0

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        self._tracker.on_tokens(request, tree, acceptance, logits, num_generated)
        state = self._states.find(request)
        if state is None or not state.chosen:
            return
        configuration = self._network.configurations[state.chosen]
        state.chosen = 0
        if not request.drafting.is_allowed or request.max_new_tokens + num_generated <= configuration.max_depth:
            return  # the request could not draft, or the end of the output cut the tree
        accepted = float(len(acceptance.path))
        # As in training, but scaled to a few draft tokens, so that sums compare with the priors.
        weight = _USUAL * float(token_weight(min(accepted, SMALL_NODES)))
        own = state.own.setdefault(configuration.slots, DecayedRatio(_OWN_MEMORY, prior=_PRIOR))
        for ratio, expected in (
            (self._ratios[configuration.slots], state.expected),
            (own, state.for_all),
            (self._overall, state.corrected),
        ):
            ratio.observe(weight * accepted, weight * expected)
        if abs(math.log(_correction(self._overall))) > _BOUND:
            logger.warning(
                "the speculation policy is wrong about acceptance: trees are chosen by cost for %d steps", _REST
            )
            self._num_resting = _REST
            self._forget_acceptance()

    @property
    def doubt(self) -> str | None:
        """Why the network decides nothing at present, or None if it does."""
        if not self._fits:
            return "the speculation policy was trained with other drafters"
        return "the speculation policy was wrong about acceptance" if self._num_resting else None


def _correction(ratio: DecayedRatio) -> float:
    """Return the factor by which expected acceptance is corrected, given the observed over the expected one."""
    return min(max(ratio.value, 1 / _MOST), _MOST)


def load_policy_network(path: str, drafter: Drafter | None) -> PolicyNetwork:
    """Return the network in a file, after checking that it fits these drafters.

    Raises:
        ModelError: The file is missing or damaged.
        ValueError: It was trained with other drafters.
    """
    network = PolicyNetwork.load(path)
    slots = None if drafter is None else tuple(find_slots(drafter))
    if slots not in (None, network.slots):
        raise ValueError(
            f"speculation_policy: {path} was trained with drafters {', '.join(network.slots)}, not "
            f"{', '.join(slots or ())}; name drafters of those kinds in that order, or train another with "
            "specinfer tune --policy"
        )
    return network
