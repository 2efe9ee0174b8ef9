"""Exact distributions of whole speculative steps: every way the chances can fall, with fractions for probabilities.

The real code runs: drawing, growing, merging, verifying. Only where it asks for randomness is it answered with
each outcome in turn. A drafter's noise enters as the order of a race: argmax(log q + noise) is a draw from q, and
what else the noise decides is the order in which the other tokens follow, each a draw from what is left of q.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch

from levels import Node, draw, nodes_of
from reference.slow_growth import F32, Wish, slow_tree
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import Draw, TokenTree, TreeBudget
from specinfer.drafters.growth import draft_sampling
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.growth.frontier import Level
from specinfer.drafters.growth.tree_batch import GrowingTree, TreeBatch
from specinfer.drafters.vocabulary.token_map import TokenMap
from specinfer.verify import Acceptance, Probs, RandomSource
from tiny import make_request

T = TypeVar("T")
Path = tuple[int, ...]
Distribution = tuple[Fraction, ...]
Outputs = Mapping[Path, Fraction]
Trees = Sequence[tuple[Fraction, TokenTree]]
Rule = Callable[[TokenTree, Callable[[int], Probs | None], RandomSource], Acceptance]
ROOT = 0
END = -1


class Forks:
    """One way things can go: the first choices are given, the others take the first outcome there is."""

    def __init__(self, given: Path) -> None:
        self._given = given
        self._made: Path = ()
        self.probability = Fraction(1)
        self.others: list[Path] = []  # the ways not gone

    def choose(self, distribution: Sequence[Fraction]) -> int:
        """An outcome of this distribution."""
        place = len(self._made)
        if place < len(self._given):
            outcome = self._given[place]
        else:
            outcome, *others = (i for i, weight in enumerate(distribution) if weight > 0)
            self.others += [(*self._made, other) for other in others]
        self._made = (*self._made, outcome)
        self.probability *= distribution[outcome]
        return outcome


def every(experiment: Callable[[Forks], T]) -> Iterator[tuple[Fraction, T]]:
    """Each way the experiment can go: its probability and what comes of it."""
    pending: list[Path] = [()]
    while pending:
        forks = Forks(pending.pop())
        result = experiment(forks)
        pending += forks.others
        yield forks.probability, result


class Model:
    """A random distribution of the next token for each context. `weights` are drawn from; those of 0 make zeros.

    After the contexts in `dead` no token may follow.
    """

    def __init__(
        self,
        seed: int,
        vocab: int = 3,
        weights: Sequence[int] = (0, 1, 1, 2, 3, 5),
        dead: frozenset[Path] = frozenset(),
    ) -> None:
        self.seed, self.vocab, self._weights, self.dead = seed, vocab, weights, dead
        self._distributions: dict[Path, Distribution] = {}
        self._arrays: dict[Path, Probs] = {}

    def distribution(self, context: Path) -> Distribution:
        if context not in self._distributions:
            generator = random.Random(f"{self.seed} {context}")
            weights = [0]
            while not any(weights):
                weights = [generator.choice(self._weights) for _ in range(self.vocab)]
            self._distributions[context] = tuple(Fraction(w, sum(weights)) for w in weights)
        return self._distributions[context]

    def array(self, context: Path) -> Probs:
        if context not in self._arrays:
            self._arrays[context] = np.array(self.distribution(context), dtype=object)
        return self._arrays[context]

    def joint(self, length: int) -> dict[Path, Fraction]:
        return extended({(): Fraction(1)}, self, length)


def extended(outputs: Outputs, target: Model, length: int) -> dict[Path, Fraction]:
    """The distribution of the first `length` tokens when each output goes on by plain decoding; `END` where it
    cannot."""
    joint: dict[Path, Fraction] = defaultdict(Fraction)
    for tokens, probability in outputs.items():
        joint[tokens[:length]] += probability
    for short in range(length):
        for tokens in [tokens for tokens in joint if len(tokens) == short]:
            mass = joint.pop(tokens)
            if tokens in target.dead or tokens[-1:] == (END,):
                joint[*tokens, END] += mass
                continue
            for token, p in enumerate(target.distribution(tokens)):
                if p:
                    joint[*tokens, token] += mass * p
    return joint


def total_variation(a: Outputs, b: Outputs) -> Fraction:
    return sum((abs(a.get(x, Fraction(0)) - b.get(x, Fraction(0))) for x in {*a, *b}), Fraction(0)) / 2


# ------------------------------------------------------------------------------------------ drafting


def _race(distribution: Sequence[Fraction], num_places: int, forks: Forks) -> Path:
    """The first tokens of a race: each is a draw from the distribution without those before."""
    order: Path = ()
    left = list(distribution)
    while len(order) < num_places and any(left):
        total = sum(left)
        order = (*order, forks.choose([weight / total for weight in left]))
        left[order[-1]] = Fraction(0)
    return order


class EnumeratedDrafter:
    """`SmallModelDrafter` without the model: real drawing, real growing, enumerated noise.

    With a token map it guesses among those tokens only; the model must have some of them after every context.
    """

    def __init__(
        self,
        model: Model,
        drawing: str,
        name: str = "a",
        calibration: Calibration | None = None,
        token_map: TokenMap | None = None,
    ) -> None:
        self.model, self.drawing, self.name, self.token_map = model, drawing, name, token_map
        self.calibration = calibration or Calibration()
        self.forks = Forks(())
        self._rows: dict[tuple[Path, int, int, tuple[Path, ...]], Candidates] = {}

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        trees = [TokenTree.root(span.request.token_ids[-1]) for span in spans]
        growing = {
            i: GrowingTree(span.request, budget, self.name)
            for i, (span, budget) in enumerate(zip(spans, budgets, strict=True))
            if budget.max_nodes
        }
        tree_batch = TreeBatch(list(growing.values()), self.calibration)
        while nodes := nodes_of(tree_batch.level()):
            width = max(node.width for node in nodes)  # as many are drawn for each
            tree_batch.extend(_joined([self._candidates(node._replace(width=width)) for node in nodes]))
        for i, growing_tree in growing.items():
            trees[i] = growing_tree.tree()
        return trees

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def distribution(self, context: Path) -> Distribution:
        """Of the tokens that it guesses among."""
        distribution = self.model.distribution(context)
        if self.token_map is None:
            return distribution
        mapped = self.token_map.ids.tolist()
        total = sum(distribution[token] for token in mapped)
        return tuple(p / total if token in mapped else Fraction(0) for token, p in enumerate(distribution))

    def _candidates(self, node: Node) -> Candidates:
        distribution = self.distribution(node.path)
        orders: tuple[Path, ...] = ()
        if self.drawing == "iid":
            orders = tuple((self.forks.choose(distribution),) for _ in range(node.width))
        elif self.drawing == "without-replacement":
            orders = (_race(distribution, node.width, self.forks),)
        elif self.drawing == "hybrid":
            orders = (_race(distribution, node.group, self.forks),)  # of so many one is not among the best group-1
        key = (node.path, node.width, node.group, orders)
        if key not in self._rows:
            self._rows[key] = self._drawn(node, orders)
        return self._rows[key]

    def _drawn(self, node: Node, orders: Sequence[Path]) -> Candidates:
        """The real drawing with noise that makes the races end this way; its distributions as the fractions they
        are."""

        def noise(nodes: Level, ids: torch.Tensor, *, draws: int = 1) -> torch.Tensor:
            assert len(nodes) == 1
            assert draws <= len(orders)
            rows = [[1000.0 * (token in order and len(ids[0]) - order.index(token)) for token in ids[0].tolist()]
                    for order in orders[:draws]]  # fmt: skip
            return torch.tensor([rows])

        logits = torch.tensor([[float(weight) for weight in self.model.distribution(node.path)]]).log()
        if self.token_map is not None:
            logits = logits[:, self.token_map.ids]
        with mock.patch.object(draft_sampling, "_own_noise", noise):
            row = draw(self.drawing, logits, [node], self.token_map)
        drawn = row.drawn_from
        if drawn is None:
            return row
        exact = [[Fraction(p).limit_denominator(1000) for p in probs] for probs in drawn.probs.tolist()]
        assert all(not distribution or sum(distribution) == 1 for distribution in exact)
        return replace(row, drawn_from=replace(drawn, probs=np.array(exact, dtype=object).reshape(drawn.probs.shape)))


class DeviceDrafter(EnumeratedDrafter):
    """Grows trees as steps on a device do: all candidates are drawn before nodes are chosen among them.

    Args:
        frontiers, children: Nodes of each level that may have children, and candidates of each.
    """

    def __init__(self, model: Model, calibration: Calibration, frontiers: Path, children: Path) -> None:
        super().__init__(model, "without-replacement", calibration=calibration)
        self._frontiers, self._children = frontiers, children

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        return [self._tree(span, budget) for span, budget in zip(spans, budgets, strict=True)]

    def confidence(self, row: Candidates, rank: int) -> np.float32:
        """In a candidate of a node."""
        return F32(row.confidence[0, rank])

    def _tree(self, span: Span, budget: TreeBudget) -> TokenTree:
        rows: dict[Path, Candidates] = {}

        def drawn_after(path: Path, _place: int) -> list[tuple[int, np.float32]]:
            row = rows[path] = self._candidates(Node(span.request, path, self._children[len(path)]))
            tokens = [token for token in row.tokens[0].tolist() if token >= 0]
            return [(token, self.confidence(row, rank)) for rank, token in enumerate(tokens)]

        def chance(rank: int, confidence: np.float32) -> np.float32:
            return F32(self.calibration.acceptance_prob(f"{self.name} sampled", rank, confidence))

        wish = Wish(budget.max_nodes, budget.max_depth, budget.min_path_prob, budget.widths)
        taken, _ = slow_tree(drawn_after, chance, self._frontiers, self._children, budget.max_nodes, wish)
        paths = [(), *(guess.path for guess in taken)]
        draws = [
            Draw(node, self.name, rows[guess.path[:-1]].distribution(0, guess.rank), guess.confidence)
            for node, guess in enumerate(taken, start=1)
        ]
        tokens = (span.request.token_ids[-1], *(path[-1] for path in paths[1:]))
        return TokenTree(tokens, (-1, *(paths.index(path[:-1]) for path in paths[1:])), tuple(draws))


def _joined(rows: Sequence[Candidates]) -> Candidates:
    if len(rows) == 1:
        return rows[0]
    drawn = [row.drawn_from for row in rows]

    def column(name: str, owners: Sequence[Any]) -> np.ndarray:
        return np.concatenate([getattr(one, name) for one in owners])

    return Candidates(
        column("tokens", rows),
        column("confidence", rows),
        drawn[0] and replace(drawn[0], **{name: column(name, drawn) for name in ("token_ids", "probs", "places")}),
    )


def calibrated(seed: int, *names: str) -> Calibration:
    """A calibration as if something had been seen; seed 0: as if nothing had."""
    calibration, generator = Calibration(), random.Random(seed)
    for name, rank, confidence in product(names if seed else (), range(3), (0.05, 0.1, 0.2, 0.3, 0.5, 0.6, 0.75, 1.0)):
        share = generator.random()
        for _ in range(60):
            calibration.count(f"{name} sampled", rank, confidence, kept=generator.random() < share)
    return calibration


def a_span() -> Span:
    """A request that has said nothing yet; its prompt is the root."""
    return Span(make_request("0", [ROOT], SamplingParams(max_tokens=8)), 0, 1)


def every_tree_of(drafter: EnumeratedDrafter, *budgets: TreeBudget) -> Trees:
    """Of requests that are drafted together, one for each budget, the first one's trees."""

    def draft(forks: Forks) -> TokenTree:
        drafter.forks = forks
        return drafter.draft([a_span() for _ in budgets], budgets)[0]

    return every_tree(draft)


def every_tree(draft: Callable[[Forks], TokenTree]) -> Trees:
    """The trees that can be drafted, each with its probability."""
    trees: dict[Any, TokenTree] = {}
    mass: dict[Any, Fraction] = defaultdict(Fraction)
    for probability, tree in every(draft):
        draws = tuple(
            (d.node, d.drafter, None if d.distribution is None else d.distribution.removed) for d in tree.draws
        )
        key = tree.tokens, tree.parents, draws
        trees[key] = tree
        mass[key] += probability
    assert sum(mass.values()) == 1
    return [(mass[key], tree) for key, tree in trees.items()]


# ----------------------------------------------------------------------------------------- verifying


class ForkedSource:
    """Coins that fall both ways. The token sampled last is left open: its distribution is noted instead."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self.sampled: Probs | None = None

    def accepts(self, p: Fraction, q: Fraction) -> bool:
        chance = min(Fraction(1), Fraction(p) / q)
        return self._forks.choose([chance, 1 - chance]) == 0

    def sample(self, distribution: Probs) -> int:
        assert self.sampled is None, "a rule samples once, at its end"
        assert sum(distribution) == 1
        assert all(weight >= 0 for weight in distribution)
        self.sampled = distribution
        return -7


def outputs(rule: Rule, trees: Trees, target: Model) -> Outputs:
    """The distribution of what one step says: the tokens accepted, and the one that follows."""
    said: dict[Path, Fraction] = defaultdict(Fraction)
    for mass, tree in trees:

        def probs_at(node: int, tree: TokenTree = tree) -> Probs | None:
            path = tree.path_tokens(node)
            return None if path in target.dead else target.array(path)

        def verify(forks: Forks, tree: TokenTree = tree) -> tuple[Path, Probs | None]:
            chance = ForkedSource(forks)
            acceptance = rule(tree, probs_at, chance)
            assert acceptance.path == (tree.path(acceptance.path[-1]) if acceptance.path else ())
            tokens = tuple(tree.tokens[node] for node in acceptance.path)
            if chance.sampled is None:  # it ends with a guess after which nothing may follow
                tokens = (*tokens, acceptance.next_token)
                assert tokens in target.dead
                return tokens, None
            assert acceptance.next_token == -7
            return tokens, chance.sampled

        for probability, (path, distribution) in every(verify):
            if distribution is None:
                said[path] += mass * probability
                continue
            for token, weight in enumerate(distribution):
                said[*path, token] += mass * probability * weight
    assert sum(said.values()) == 1
    return said


def distance(rule: Rule, trees: Trees, target: Model, length: int = 4) -> Fraction:
    """Total variation between the first tokens with and without speculation."""
    return total_variation(extended(outputs(rule, trees, target), target, length), target.joint(length))


def tokens_per_step(rule: Rule, trees: Trees, target: Model) -> Fraction:
    return sum((len(tokens) * mass for tokens, mass in outputs(rule, trees, target).items()), Fraction(0))
