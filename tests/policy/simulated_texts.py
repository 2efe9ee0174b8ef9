"""Simulated answers of a target with a draft model and a lookup, step by step at fixed costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specinfer.core.request import FinishReason, Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters import MergedDrafter
from specinfer.drafters.kind import DraftKind
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.verify import Acceptance
from tiny import make_request

_WRONG = 7  # a token that no text has


def pair_costs(passes: float = 1.0, drafting: float = 1.0) -> CostModel:
    """Return the costs of a target of 1.5 B and a drafter of 0.5 B on two cores without VNNI, times these factors."""
    milliseconds = np.asarray([50.0, 55.0, 60.0, 68.0, 78.0, 105.0, 195.0, 380.0])
    target = Curve((1, 2, 3, 4, 5, 8, 16, 32), passes * milliseconds / 1e3)
    level = Curve((1, 16), drafting * np.asarray([0.021, 0.025]))
    return CostModel(target, level, drafting * 0.0026, drafting * 0.003)


@dataclass
class Kind:
    """A kind of text.

    Attributes:
        copied: Share of the tokens that repeat the prompt, in passages of eight, which the lookup finds.
        predicted: Probability that the model is right about a token.
        length: Tokens of the prompt.
    """

    copied: float
    predicted: float
    length: int = 48


@dataclass
class _Text:
    """The text that is written at present, and what is known about each of its tokens."""

    kind: Kind
    random: np.random.Generator
    is_copied: list[bool] = field(default_factory=list)
    is_predicted: list[bool] = field(default_factory=list)

    def extend(self, num_tokens: int) -> None:
        while len(self.is_copied) < num_tokens:
            self.is_copied += [bool(self.random.random() < self.kind.copied)] * 8
            self.is_predicted += (self.random.random(8) < self.kind.predicted).tolist()


class _Guesser:
    """A drafter that proposes one chain: right tokens as long as it knows them, then a wrong one if it is a model."""

    def __init__(self, name: str) -> None:
        self.name, self.text, self.num_levels, self.num_read = name, _Text(Kind(0, 0), np.random.default_rng(0)), 0, 0

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        return [self._chain(span.request, budget) for span, budget in zip(spans, budgets, strict=True)]

    def _chain(self, request: Request, budget: TreeBudget) -> TokenTree:
        num_output, tokens = request.num_output, list[int]()
        for depth in range(min(budget.max_nodes, budget.max_depth)):
            if not self._knows(num_output + depth):
                break
            tokens.append(1)
        return self._made(request, budget, tokens)

    def _knows(self, place: int) -> bool:
        self.text.extend(place + 1)
        return self.text.is_copied[place]

    def _made(self, request: Request, budget: TreeBudget, tokens: list[int]) -> TokenTree:
        return TokenTree.chain(request.token_ids[-1], tokens, self.name, 0.95)

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


class _Model(_Guesser):
    kind = DraftKind()

    def _knows(self, place: int) -> bool:
        self.text.extend(place + 1)
        return self.text.is_predicted[place]

    def _made(self, request: Request, budget: TreeBudget, tokens: list[int]) -> TokenTree:
        most = min(budget.max_nodes, budget.max_depth)
        if most:
            # A further level is drafted where it is worth its time, as trees grow.
            paying = 1 + sum(0.7**depth >= budget.min_gain for depth in range(2, most + 1))
            tokens = [*tokens, _WRONG][: min(most, paying)]
            self.num_levels = len(tokens)
            self.num_read = 0 if request.drafting.is_read else len(request.token_ids)
        return TokenTree.chain(request.token_ids[-1], tokens, self.name, 0.7)


class SimulatedTexts:
    """Answers of so many tokens, one after the other, with drafters that learn.

    Args:
        costs: What steps take.
        names: Drafters: "draft" is the model, "suffix" the lookup.

    Attributes:
        num_read: Prompts that the model read.
    """

    def __init__(self, costs: CostModel, names: Sequence[str] = ("suffix", "draft"), seed: int = 0) -> None:
        self._costs, self._random, self.num_read = costs, np.random.default_rng(seed), 0
        self._guessers = {name: _Model(name) if name == "draft" else _Guesser(name) for name in names}
        self._drafter = MergedDrafter([*self._guessers.values()])

    def speedup(self, policy: SpeculationPolicy, kind: Kind, num_tokens: int = 80) -> float:
        """Return the speed of one answer over that of plain decoding, without the pass that reads the prompt."""
        request = make_request("a", range(kind.length), SamplingParams(temperature=0.0, max_tokens=num_tokens + 1))
        request.token_ids.append(1)
        text, seconds = _Text(kind, self._random), 0.0
        for guesser in self._guessers.values():
            guesser.text = text
        while not request.is_finished:
            seconds += self._step(policy, request, num_tokens + 1)
        self._drafter.forget("a")
        return num_tokens * float(self._costs.target(1)) / seconds

    def _step(self, policy: SpeculationPolicy, request: Request, num_tokens: int) -> float:
        span = Span(request, len(request.token_ids) - 1, len(request.token_ids))
        budget = policy.budgets([span])[0].cut(max(num_tokens - request.num_output - 1, 0), 1000)
        for guesser in self._guessers.values():
            guesser.num_levels = guesser.num_read = 0
        tree, num_levels = TokenTree.root(1), 0
        if budget.max_nodes:
            (tree,) = self._drafter.draft([span], [budget])
            (num_levels,) = self._drafter.num_model_levels
        num_read = sum(guesser.num_read for guesser in self._guessers.values())
        request.drafting.is_read |= num_levels > 0
        self.num_read += num_read > 0
        path = list[int]()
        while child := tree.children[path[-1] if path else 0].get(1):
            path.append(child)
        drafting = float(self._costs.draft(tree.num_guessed, num_levels)) + num_read * self._costs.read_token
        passing = float(self._costs.target(1 + tree.num_guessed))
        acceptance, num_new = Acceptance(tuple(path), 1), len(path) + 1
        request.token_ids += [1] * num_new
        request.speculation.record(tree.num_guessed, tree.max_depth, len(acceptance.path), num_new)
        if request.num_output >= num_tokens:
            request.finish_reason = FinishReason.LENGTH
        record = StepRecord(
            1, 1 + tree.num_guessed, tree.num_guessed, tree.max_depth, num_new, num_read, drafting, passing, 0.0,
            budget.max_nodes, num_levels, num_context=span.start,
        )  # fmt: skip
        self._drafter.observe(request, tree, acceptance)
        policy.on_tokens(request, tree, acceptance, torch.empty(0), num_new)
        policy.observe(record, [(tree, acceptance)])
        return drafting + passing
