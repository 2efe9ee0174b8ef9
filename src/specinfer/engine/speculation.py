"""How far to guess: the policy that gives each request its tree budget, step by step."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specinfer.drafters.base import Drafter
from specinfer.engine.costs import Floats, StepCosts, measure_costs
from specinfer.engine.metrics import StepRecord
from specinfer.model.runner import ModelRunner
from specinfer.request import Request, Span
from specinfer.tree import TokenTree, TreeBudget
from specinfer.verify import Acceptance

OFF = TreeBudget()


class Policy(Protocol):
    """Decides budgets before a step and learns from what came of it."""

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        """One budget for each span; the empty one means plain decoding, and costs nothing."""
        ...

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        """What the step cost, and what each tree yielded."""
        ...


class FixedPolicy:
    """The same expansion for every request in every step."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._budget = TreeBudget(tuple(widths))

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        return [self._budget] * len(spans)

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        pass


class RankAcceptance:
    """How often the drafter's first, second, ... guess at a node is what the target says there."""

    # Before anything was seen: a drafter of middling skill, worth a few observations.
    _PRIOR = (0.6, 0.12, 0.06, 0.04)
    _PRIOR_WEIGHT = 8.0
    _DECAY = 0.995  # per tree: some hundred trees are remembered

    def __init__(self) -> None:
        self._tried = [self._PRIOR_WEIGHT] * len(self._PRIOR)
        self._hit = [self._PRIOR_WEIGHT * p for p in self._PRIOR]

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Counts the ranks at each node the walk came to and that had guesses."""
        children = tree.children()
        for node, kept in zip((0, *acceptance.path), (*acceptance.path, None), strict=True):
            ranked = list(children[node].values())[: len(self._tried)]
            for rank, child in enumerate(ranked):
                self._tried[rank] = self._tried[rank] * self._DECAY + 1
                self._hit[rank] = self._hit[rank] * self._DECAY + (child == kept)

    def within(self) -> Floats:
        """[ranks + 1]: probability that one of a node's first 0, 1, 2, ... guesses is right."""
        hit_rates = np.asarray(self._hit) / np.asarray(self._tried)
        return np.concatenate([[0.0], np.minimum(np.cumsum(hit_rates), 1.0)])


class Menu:
    """Expansions to choose from: off, chains, and trees that branch early, of at most 32 nodes."""

    _HEADS = ((1,), (2,), (3,), (4,), (2, 2), (3, 2), (1, 2), (1, 1, 3))
    _MAX_DEPTH, _MAX_NODES = 12, 32

    def __init__(self) -> None:
        found: set[tuple[int, ...]] = {()}
        for head in self._HEADS:
            for depth in range(len(head), self._MAX_DEPTH + 1):
                found.add(TreeBudget(head + (1,) * (depth - len(head))).cut(depth, self._MAX_NODES).widths)
        self.expansions = sorted(found, key=lambda widths: (TreeBudget(widths).num_nodes, widths))
        self.num_nodes = np.asarray([TreeBudget(widths).num_nodes for widths in self.expansions])
        self.num_levels = np.asarray([len(widths) for widths in self.expansions])
        self._widths = np.zeros((len(self.expansions), self._MAX_DEPTH), dtype=np.int64)
        for row, widths in enumerate(self.expansions):
            self._widths[row, : len(widths)] = widths

    def expected_tokens(self, within: Floats) -> Floats:
        """[expansions] tokens a pass yields on average, the target's own included."""
        return np.asarray(1.0 + within[self._widths].cumprod(axis=1).sum(axis=1))


class CostPolicy:
    """The expansion with the most expected tokens per second; plain decoding is always one of them.

    Every expansion is weighed anew as costs and acceptance are learned: a busy batch or a poor drafter
    lead to small trees or none, a quiet machine and a good drafter to large ones.
    """

    _MARGIN = 1.03  # change only for a clear gain: what is compared is noisy
    _REVIEW = 8  # steps between choices for the same number of requests: weighing costs time too
    _RETRY = 50  # steps without speculation before one is spent on seeing whether it would pay again

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.acceptance = RankAcceptance()
        self.menu = Menu()
        self._chosen = 0  # off, until something is clearly better
        self._num_plain = 0
        self._num_requests = self._age = 0  # of the last choice

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        if len(spans) != self._num_requests or self._age >= self._REVIEW:
            self.choose(len(spans))
            self._num_requests, self._age = len(spans), 0
        self._age += 1
        budget = TreeBudget(self.menu.expansions[self._chosen])
        if budget.widths:
            self._num_plain = 0
            return [budget if self._pays(span.request, len(spans)) else OFF for span in spans]
        self._num_plain += 1
        if self._num_plain % self._RETRY == 0:
            probed = next((span for span in spans if span.request.drafter_knows), spans[0])
            return [TreeBudget((1, 1)) if span is probed else OFF for span in spans]
        return [OFF] * len(spans)

    def _pays(self, request: Request, num_requests: int) -> bool:
        """Whether what may still be gained is worth the drafter's reading of the prompt."""
        if request.drafter_knows:
            return True
        rates = self.rates(num_requests) / num_requests
        gain_per_token = 1.0 / rates[0] - 1.0 / rates[self._chosen]  # the menu begins with off
        reading = self.costs.read_token * len(request.token_ids)
        return bool(gain_per_token * request.max_new_tokens > reading)

    def choose(self, num_requests: int) -> tuple[int, ...]:
        """The widths for a batch of this many requests."""
        rates = self.rates(num_requests)
        best = int(rates.argmax())
        if rates[best] > self._MARGIN * rates[self._chosen]:
            self._chosen = best
        return self.menu.expansions[self._chosen]

    def rates(self, num_requests: int) -> Floats:
        """[expansions] expected tokens per second with each of the menu for every request."""
        expected = num_requests * self.menu.expected_tokens(self.acceptance.within())
        return expected / self.costs.step(num_requests * (1 + self.menu.num_nodes), self.menu.num_levels)

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        if step.num_rows == len(outcomes) + step.num_guessed:  # no prompt was read beside
            self.costs.observe(step)
        for tree, acceptance in outcomes:
            if tree.num_guessed:
                self.acceptance.observe(tree, acceptance)


def make_policy(widths: Sequence[int] | None, target: ModelRunner, drafter: Drafter | None) -> Policy:
    """A fixed expansion; or for None the one that measured costs favour."""
    if drafter is None:
        return FixedPolicy(())
    if widths is None:
        return CostPolicy(measure_costs(target, drafter))
    return FixedPolicy(widths)
