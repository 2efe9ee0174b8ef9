"""Costs of simulated machines, spans and step records, for tests of speculation policies."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specinfer.core.limits import SLO
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.growth.tree_batch import BEST_FIRST_WIDTH, GrowingTree, TreeBatch
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.verify import Acceptance
from tiny import make_request

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FEW = (1, 2, 4, 8, 16, 32, 64)
GROWING = (1.0, 1.0, 1.1, 1.2, 1.4, 2.0, 4.0, 8.0, 16.0, 32.0)
# A tree of which nothing is accepted, and one that is accepted whole.
WRONG = TokenTree((0, 5, 6, 7, 8), (-1, 0, 0, 0, 0)), Acceptance((), 9)
RIGHT = TokenTree((0, 5, 6, 7), (-1, 0, 1, 2)), Acceptance((1, 2, 3), 9)


def make_costs(
    seconds: Sequence[float] = (1.0,) * len(SIZES), draft_level: float = 0.01, read_token: float = 0.0
) -> CostModel:
    """Return the costs of a machine whose passes over 1, 2, 4, ... rows take this long."""
    return CostModel(Curve(SIZES, seconds), Curve((1, 64), [draft_level] * 2), read_token)


def flat(seconds: float) -> Curve:
    """Return the seconds of passes or levels that cost the same at each size."""
    return Curve(FEW, [seconds] * len(FEW))


def slow_target_costs(read_token: float = 0.0) -> CostModel:
    """Return the costs of a target whose pass takes about fifty times as long as a draft level."""
    return CostModel(Curve((1, 8, 16, 32, 64), (1.0, 1.07, 1.42, 1.93, 3.5)), Curve([1], [0.02]), read_token)


def bent_costs(bend: int, seconds: float = 4.0, draft_level: float = 0.02) -> CostModel:
    """Return the costs of a machine that reads weights for some seconds, and computes longer from `bend` rows on."""
    curve = Curve([1, bend, 1024], [seconds, seconds, seconds * 1024 / bend])
    return CostModel(curve, Curve((1, 64), [draft_level] * 2))


def make_span(
    num_output: int = 1, max_tokens: int = 100, length: int = 10, tree: str | None = None, slo: SLO | None = None
) -> Span:
    """Return a span of a request that is about to emit a token; it had one before, unless `num_output` is another."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, tree=tree, slo=slo)
    request = make_request("a", range(length), params)
    request.token_ids += [1] * num_output
    return span_of(request)


def span_of(request: Request) -> Span:
    """Return the span of the last known token of a request."""
    return Span(request, len(request.token_ids) - 1, len(request.token_ids))


def make_record(**changes: Any) -> StepRecord:
    """Return the record of a plain step of one request that took a second, with these changes."""
    return replace(StepRecord(1, 1, 0, 0, 1, 0, 0.0, 1.0, 0.0), **changes)


class StreamedTarget:
    """A clock, and passes over a target whose weights are read while rows are computed."""

    bytes_per_pass = 10**9

    def __init__(self, row_seconds: float, read_seconds: float = 4.0) -> None:
        self.now = self.seconds_waiting = 0.0
        self.sizes: list[int] = []
        self._row, self._read = row_seconds, read_seconds

    def run(self, size: int) -> None:
        computing = self._row * size
        self.sizes.append(size)
        self.now += max(self._read, computing)
        self.seconds_waiting += max(self._read - computing, 0.0)

    def true(self, size: float) -> float:
        return max(self._read, self._row * size)


def roofline_costs(bandwidth: float, flops: float, weights: float = 1e9) -> CostModel:
    """Return the costs of a target of so many bfloat16 weights: a pass reads them all, and computes with each row.

    A drafter of a hundredth of the weights takes as much longer a level as its host work does.

    Args:
        bandwidth: Bytes read per second.
        flops: Operations per second.
    """
    sizes = sorted({*SIZES, *range(1, 65)})
    target = Curve(sizes, [max(2 * weights / bandwidth, 2 * weights * size / flops) + 0.001 for size in sizes])
    level = 2 * weights / 100 / bandwidth
    draft = Curve((1, 8, 64), [level + 0.0003, level + 0.0005, level + 0.002])
    return CostModel(target, draft, read_token=level / 8, draft_start=0.002)


class BusyClock:
    """A clock on which work takes up to three times as long in bursts of other load, of some tens of milliseconds."""

    def __init__(self, seed: int) -> None:
        self.now = self._until = 0.0
        self.random = np.random.default_rng(seed)
        self._is_busy, self._factor = False, 1.0

    def work(self, seconds: float) -> float:
        """Do work of so many seconds without other load; return those that it took."""
        started = self.now
        while seconds > 0.0:
            while self.now >= self._until:
                self._is_busy = not self._is_busy
                self._factor = self.random.uniform(1.3, 3.0) if self._is_busy else 1.0
                self._until += self.random.exponential(0.04 if self._is_busy else 0.06)
            part = min(seconds * self._factor, self._until - self.now)
            self.now += part
            seconds -= part / self._factor
        return self.now - started


# Bytes and operations per second: an older and a newer CPU with two cores, and one with matrix units.
MACHINES = {"31 GB/s": (31e9, 0.39e12), "48 GB/s": (48e9, 0.8e12), "80 GB/s with matrix units": (80e9, 6e12)}


class SimulatedDrafting:
    """Steps of requests on a simulated machine: trees grow from random guesses whose confidence is their chance.

    Args:
        sureness: Expected probability of a node's first guess; it differs from node to node.
        seed: Seed of the guesses and of what is accepted.
        length: Tokens of each request's prompt; if they are many, their time is part of `costs`.

    Attributes:
        now: Seconds since the start.
        tokens: Expected number of tokens emitted so far, which has less noise than the number drawn.
    """

    def __init__(
        self, costs: CostModel, sureness: float, num_requests: int = 1, seed: int = 0, length: int = 10
    ) -> None:
        self.costs, self.now, self.tokens = costs, 0.0, 0.0
        self._sureness, self._random, self.calibration = sureness, np.random.default_rng(seed), Calibration()
        self._spans = [make_span(num_output=5, max_tokens=10**6, length=length) for _ in range(num_requests)]
        for span in self._spans:
            span.request.drafting.is_read = True

    def step(self, policy: SpeculationPolicy) -> StepRecord:
        """Run one step, from which the policy learns."""
        budgets = policy.budgets(self._spans)
        trees, num_levels = self.grow(self._spans, budgets)
        outcomes = [(tree, self.accepted(tree)) for tree in trees]
        num_guessed = sum(tree.num_guessed for tree in trees)
        drafting = float(self.costs.draft(num_guessed, num_levels)) if num_levels else 0.0
        passing = float(self.costs.target(len(trees) + num_guessed))
        num_generated = sum(len(acceptance.path) + 1 for _, acceptance in outcomes)
        record = StepRecord(
            len(trees), len(trees) + num_guessed, num_guessed, max(tree.max_depth for tree in trees), num_generated, 0,
            drafting, passing, 0.0, sum(budget.max_nodes for budget in budgets),
            num_context=sum(span.start for span in self._spans),
        )  # fmt: skip
        self.now += drafting + passing
        policy.observe(record, outcomes)
        for span, (tree, acceptance) in zip(self._spans, outcomes, strict=True):
            self.calibration.observe(span.request, tree, acceptance)
        return record

    def rate(self, policy: SpeculationPolicy, num_steps: int) -> float:
        """Return the expected tokens per second of so many steps."""
        now, tokens = self.now, self.tokens
        for _ in range(num_steps):
            self.step(policy)
        return (self.tokens - tokens) / (self.now - now)

    def grow(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> tuple[list[TokenTree], int]:
        """Return a tree for each span, and the number of levels drafted."""
        pairs = zip(spans, budgets, strict=True)
        growing = [GrowingTree(span.request, budget, "draft") for span, budget in pairs if budget.max_nodes]
        tree_batch, num_levels = TreeBatch(growing, self.calibration), 0
        while level := tree_batch.level():
            tree_batch.extend(self._candidates(len(level)))
            num_levels += 1
        grown = iter(growing)
        roots = [TokenTree.root(span.request.token_ids[-1]) for span in spans]
        trees = [next(grown).tree() if one.max_nodes else root for root, one in zip(roots, budgets, strict=True)]
        return trees, num_levels

    def _candidates(self, num_nodes: int) -> Candidates:
        first = self._random.beta(2 * self._sureness, 2 * (1 - self._sureness), size=(num_nodes, 1))
        others = (1 - first) * 0.45 * 0.5 ** np.arange(BEST_FIRST_WIDTH - 1)
        sure = -np.sort(-np.concatenate([first, others], axis=1), axis=1).astype(np.float32)
        tokens = np.tile(np.arange(BEST_FIRST_WIDTH), (num_nodes, 1))
        return Candidates(tokens, sure)

    def accepted(self, tree: TokenTree) -> Acceptance:
        """Draw what is accepted of a tree, and count the tokens expected of it."""
        path_prob = [1.0] * len(tree)
        for draw in tree.draws:  # parents come first, level by level
            path_prob[draw.node] = draw.confidence * path_prob[tree.parents[draw.node]]
        self.tokens += sum(path_prob)
        node, path = 0, list[int]()
        while draws := tree.candidates[node]:
            place = np.searchsorted(np.cumsum([draw.confidence for draw in draws]), self._random.random())
            if place == len(draws):
                break
            node = draws[place].node
            path.append(node)
        return Acceptance(tuple(path), 0)
