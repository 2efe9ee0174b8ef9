"""Policies, which give each request its tree budget step by step."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from specinfer.core.config import TreeShape, parse_tree
from specinfer.core.request import Request, Span
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.engine.metrics import StepRecord
from specinfer.policy.costs import Floats, StepCosts
from specinfer.policy.outcomes import Outcomes, RankAcceptance
from specinfer.verify import Acceptance


class Policy(Protocol):
    """Interface that sets budgets before a step and learns from its results.

    Attributes:
        reads_logits: True if it reads logits, as `Observer.reads_logits`.
    """

    @property
    def reads_logits(self) -> bool: ...

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        """Return one budget for each span; the empty one means plain decoding, and costs nothing."""
        ...

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        """Learn from the costs of a step and the yield of each tree."""
        ...

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        """Receive the emitted tokens of a request, as `Observer.on_tokens`; called before `observe`."""
        ...


class FixedPolicy:
    """A policy with the same budget for every request in every step."""

    reads_logits = False

    def __init__(self, budget: TreeBudget = OFF) -> None:
        self._budget = budget

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        return [self._budget] * len(spans)

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        pass

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        pass


class RequestPolicy:
    """A policy that lets the setting of a request override the default.

    Args:
        default: Policy for requests without a setting.
        make_auto: Function that makes the policy for requests that ask for "auto"; called for the first one.
        num_drafters: Number of drafters; each grows a fixed expansion.
        is_auto: True if the default is the policy that "auto" stands for.
    """

    def __init__(
        self, default: Policy, make_auto: Callable[[], Policy], num_drafters: int = 1, *, is_auto: bool = False
    ) -> None:
        self._default = default
        self._make_auto = make_auto
        self._auto: Policy | None = None
        self._num_drafters = num_drafters
        self._usual = (None, "auto") if is_auto else (None,)

    @property
    def reads_logits(self) -> bool:
        return self._default.reads_logits or (self._auto is not None and self._auto.reads_logits)

    def prepare(self) -> None:
        """Measure the costs that a request with "auto" needs, so that requests need not wait for it later."""
        if self._auto is None and "auto" not in self._usual:
            self._auto = self._make_auto()

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        return [
            # The prediction is one more drafter.
            TreeBudget.expansion(budget.widths, self._num_drafters + 1)
            if budget.widths and span.request.prediction_ids
            else budget
            for span, budget in zip(spans, self._choose(spans), strict=True)
        ]

    def _choose(self, spans: Sequence[Span]) -> list[TreeBudget]:
        usual = [span for span in spans if span.request.params.tree in self._usual]
        if len(usual) == len(spans):
            return self._default.budgets(spans)
        is_other = "auto" not in self._usual
        auto = [span for span in spans if span.request.params.tree == "auto"] if is_other else []
        if auto:
            self.prepare()
        of_usual = iter(self._default.budgets(usual) if usual else ())
        of_auto = iter(self._auto.budgets(auto) if auto and self._auto else ())
        budgets = []
        for span in spans:
            tree = span.request.params.tree
            if tree is None or tree in self._usual:
                budgets.append(next(of_usual))
            elif tree == "auto":
                budgets.append(next(of_auto))
            else:
                budgets.append(budget_of(parse_tree(tree), self._num_drafters))
        return budgets

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        self._default.observe(step, outcomes)
        if self._auto is not None:
            self._auto.observe(step, outcomes)

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        self._default.on_tokens(request, tree, acceptance, logits, num_generated)
        if self._auto is not None:
            self._auto.on_tokens(request, tree, acceptance, logits, num_generated)


def budget_of(shape: TreeShape, num_drafters: int = 1) -> TreeBudget:
    """Return the budget for a shape other than "auto"."""
    assert not shape.is_auto
    if shape.widths:
        return TreeBudget.expansion(shape.widths, num_drafters)
    return TreeBudget(shape.max_nodes, shape.max_depth)


class CostPolicy:
    """A policy that chooses the trees with the most expected tokens per second for the whole batch, or plain decoding.

    Size and depth are chosen from learned costs and acceptance: a busy batch or a poor drafter leads to small
    trees or none, an idle machine and a good drafter to large ones. Within these limits one floor for all requests
    decides how many nodes each gets: a node must be worth the time it adds to the pass, and a level the time
    of drafting it, at the current token rate (Dinkelbach's rule for the best ratio).
    """

    reads_logits = False
    _MARGIN = 1.03  # gain needed for a change, because the estimates are noisy
    _REVIEW = 8  # steps between choices for the same number of requests, because choosing costs time too
    _RETRY = 50  # steps without speculation before one step tests whether it would be worthwhile again
    _ROOM = 2  # multiple of the average nodes that a request may have, because some are easier to predict than others
    _BEND = 1.25  # multiple of the average price of a node up to which further nodes are cheap

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.acceptance = RankAcceptance()
        self.outcomes = Outcomes.fitting(costs)
        self._chosen = 0  # off, until something is clearly better
        self._budget = OFF
        self._num_plain = 0
        self._num_requests = self._age = 0  # those of the last choice

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        if len(spans) != self._num_requests or self._age >= (1 if self.outcomes.is_wide else self._REVIEW):
            self._budget = self.choose(len(spans))
            self._num_requests, self._age = len(spans), 0
        self._age += 1
        if self._budget.max_nodes:
            self._num_plain = 0
            return [self._budget if self._pays(span.request, len(spans)) else OFF for span in spans]
        self._num_plain += 1
        if self._num_plain % self._RETRY == 0:
            probed = next((span for span in spans if span.request.drafter_knows), spans[0])
            return [TreeBudget.expansion((1, 1)) if span is probed else OFF for span in spans]
        return [OFF] * len(spans)

    def _pays(self, request: Request, num_requests: int) -> bool:
        """Return whether the possible gain is more than the cost of reading the prompt with the drafter."""
        if request.drafter_knows:
            return True
        rates = self.rates(num_requests) / num_requests
        gain_per_token = 1.0 / rates[0] - 1.0 / rates[self._chosen]  # the first is off
        reading = self.costs.read_token * (len(request.token_ids) - request.num_cached)
        return bool(gain_per_token * request.max_new_tokens > reading)

    def choose(self, num_requests: int) -> TreeBudget:
        """Return the budget of each request in a batch of this many."""
        rates = self.rates(num_requests)
        best = int(rates.argmax())
        if rates[best] > self._MARGIN * rates[self._chosen]:
            self._chosen = best
        num_nodes, num_levels = (int(x[self._chosen]) for x in (self.outcomes.num_nodes, self.outcomes.num_levels))
        if not num_nodes:
            return OFF
        rate = float(rates[self._chosen])
        room, node_time = self._room(num_requests, num_nodes)
        return TreeBudget(
            max_nodes=min(num_nodes + room, self.outcomes.max_nodes),
            max_depth=min(self._ROOM * num_levels, self.outcomes.max_depth),
            min_path_prob=min(rate * node_time, 0.5),
            min_gain=rate * float(self.costs.draft_level(num_requests)),
        )

    def _room(self, num_requests: int, num_nodes: int) -> tuple[int, float]:
        """Return the nodes that a request may have beyond the average, and the seconds that a node adds to the pass.

        The cost bends where computing begins to take longer than reading the weights, or where a kernel needs a
        further block of rows: the last nodes were cheap, and the next are not. There no other request makes up for
        additional nodes of one request, so none may have them.
        """
        room = (self._ROOM - 1) * num_nodes
        more = np.arange(room + 1)
        seconds = self.costs.target(num_requests * (1 + np.concatenate([[0], num_nodes + more])))
        price = float(seconds[1] - seconds[0]) / num_nodes
        cheap = seconds[1:] - seconds[1] <= self._BEND * price * more
        if cheap.all():
            price = float(seconds[-1] - seconds[1]) / room
        return int(more[cheap][-1]), price / num_requests

    def rates(self, num_requests: int) -> Floats:
        """Return the expected tokens per second with each of the trees for every request: [trees]."""
        expected = num_requests * self.outcomes.expected_tokens(self.acceptance.by_rank())
        return expected / self.costs.step(num_requests, self.outcomes.num_nodes, self.outcomes.num_levels)

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        if step.num_rows == len(outcomes) + step.num_guessed:  # no prompt was read in this step
            self.costs.observe(step)
        else:
            self.costs.observe_prompts(step)
        for tree, acceptance in outcomes:
            if tree.num_guessed:
                self.acceptance.observe(tree, acceptance)

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        pass


def make_policy(
    shape: TreeShape,
    make_costs: Callable[[], StepCosts],
    num_drafters: int = 1,
    auto: Callable[[StepCosts], Policy] = CostPolicy,
) -> Policy:
    """Make the policy for a shape; costs are measured only if something asks for "auto".

    Args:
        shape: Tree shape of requests without a setting.
        make_costs: Function that measures or loads the costs.
        num_drafters: Number of drafters; each grows a fixed expansion.
        auto: Function that makes the policy for "auto" from costs.
    """

    def make_auto() -> Policy:
        return auto(make_costs())

    default = make_auto() if shape.is_auto else FixedPolicy(budget_of(shape, num_drafters))
    return RequestPolicy(default, make_auto, num_drafters, is_auto=shape.is_auto)
