"""Verification of all trees of a step on an accelerator, which the host waits for once.

All nodes of all trees are processed together, before any walk. The tokens of plain decoding after each node, the walks
of rules with random numbers, and the scores that the host has to look at itself come back in one transfer.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import numpy.typing as npt
from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.rules import RULES
from specinfer.core.tree import TokenTree
from specinfer.ops.cpu.transfers import fetch, send_together
from specinfer.verify.algorithms import Acceptance, verify_coupled, verify_seeded
from specinfer.verify.device_trees import DrawnTrees, NodeScores, ScoredTree, draws_of, parameters_of

_Arrays = Sequence[npt.NDArray[Any]]


def verify_on_device(
    rules: Sequence[str | None], logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]
) -> list[Acceptance]:
    """Return what the target accepts of each tree.

    Args:
        rules: The rule with random numbers of each tree, or None if it is walked as in plain decoding.
        logits: For each tree, [num_nodes, vocab] float32.
        requests: The request of each tree.
        trees: The trees.
    """
    scored = [ScoredTree(*columns) for columns in zip(requests, trees, logits, strict=True)]
    ruled = {i: rule for i, rule in enumerate(rules) if rule is not None}
    chosen = [i for i in range(len(scored)) if i not in ruled]
    draws = {i: own for i, rule in ruled.items() if RULES[rule].gpu_walk and (own := draws_of(trees[i])) is not None}
    read = [i for i in ruled if i not in draws]
    groups: list[_Group] = []
    first = 0
    if chosen:
        groups.append(_ChosenTrees([scored[i] for i in chosen]))
        first += sum(len(trees[i]) for i in chosen)
    if draws:
        drawn = [scored[i] for i in draws]
        groups.append(DrawnTrees(drawn, [ruled[i] for i in draws], list(draws.values()), first))
        first += sum(len(trees[i]) for i in draws)
    if read:
        groups.append(_ReadTrees([scored[i] for i in read], [ruled[i] for i in read], first))
    order = [*chosen, *draws, *read]
    accepted = dict(zip(order, _verify_together(groups, [scored[i] for i in order]), strict=True))
    return [accepted[i] for i in range(len(scored))]


class _Group(Protocol):
    """Trees that are verified in the same way: first on the device, and then on the host from what comes back.

    Attributes:
        arrays: What the device needs.
    """

    arrays: _Arrays

    def walk(self, scores: NodeScores, on_device: Sequence[Tensor], /) -> Sequence[Tensor]:
        """Start the work of the device, and return its results; `scores` are those of all nodes of the step."""
        ...

    def accept(self, results: _Arrays, /) -> list[Acceptance]: ...


def _verify_together(groups: Sequence[_Group], scored: Sequence[ScoredTree]) -> list[Acceptance]:
    """Verify groups whose trees are in the order of these scored."""
    numbers = [parameters_of(scored), *chain.from_iterable(group.arrays for group in groups)]
    parameters, *there = send_together(numbers, scored[0].logits.device)
    scores, left = NodeScores.from_trees(scored, parameters), iter(there)
    results = [group.walk(scores, list(islice(left, len(group.arrays)))) for group in groups]
    arrays = iter(fetch(list(chain.from_iterable(results))))
    return [
        one for group, own in zip(groups, results, strict=True) for one in group.accept(list(islice(arrays, len(own))))
    ]


class _ChosenTrees:
    """Trees that are walked along the tokens of plain decoding; their nodes are the first of the step."""

    def __init__(self, scored: Sequence[ScoredTree]) -> None:
        self._scored = scored
        self.arrays: _Arrays = ()

    def walk(self, scores: NodeScores, _: Sequence[Tensor]) -> list[Tensor]:
        return [scores.between(0, sum(len(one.tree) for one in self._scored)).choose()]

    def accept(self, results: _Arrays) -> list[Acceptance]:
        tokens = list(_by_tree(self._scored, results[0].tolist()))
        return verify_coupled([one.tree for one in self._scored], lambda places: [tokens[i][n] for i, n in places])


class _ReadTrees:
    """Trees under rules with random numbers that the host walks; their nodes are the last of the step."""

    def __init__(self, scored: Sequence[ScoredTree], rules: Sequence[str], first: int) -> None:
        self._scored, self._rules, self._first = scored, rules, first
        self.arrays: _Arrays = ()

    def walk(self, scores: NodeScores, _: Sequence[Tensor]) -> list[Tensor]:
        return [scores.between(self._first, len(scores.rows)).kept()]

    def accept(self, results: _Arrays) -> list[Acceptance]:
        rows = _by_tree(self._scored, results[0])
        return [
            verify_seeded(rule, one.tree, rows_of.__getitem__, one.request.uniforms)
            for rule, one, rows_of in zip(self._rules, self._scored, rows, strict=True)
        ]


def _by_tree(scored: Sequence[ScoredTree], of_nodes: Any) -> Iterator[Any]:
    """Yield what belongs to each tree of a sequence with something for each node."""
    start = 0
    for one in scored:
        yield of_nodes[start : start + len(one.tree)]
        start += len(one.tree)
