"""Guesses of lookups for requests on a device: the host asks for them, and the device merges them into its trees."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specinfer.core.draws import Floats
from specinfer.core.lookups import AUTOMATIC
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters import MergedDrafter
from specinfer.drafters.growth.calibration import Calibration, source
from specinfer.engine.device.draft_shape import LEVELS, DraftShape, shape_of_guesses
from specinfer.engine.device.launch import DeviceRequest, Guess


class DeviceGuesses:
    """The lookups among the drafters of a device executor.

    Args:
        drafter: All drafters, or None without speculation.
    """

    def __init__(self, drafter: MergedDrafter | None) -> None:
        self._drafter = drafter

    @property
    def has_lookups(self) -> bool:
        """True if lookups are asked in every step; those that requests bring are asked only next to others."""
        return bool(self.names)

    @property
    def names(self) -> list[str]:
        """Names of the lookups that are asked in every step."""
        return [] if self._drafter is None else [name for name in self._drafter.lookups if name not in AUTOMATIC]

    def alone(
        self, device_requests: Sequence[DeviceRequest], budgets: Sequence[TreeBudget], most_nodes: int
    ) -> tuple[DraftShape, list[Guess]]:
        """Return the trees of a step in which no model drafts, those of host steps, and their shape.

        Args:
            device_requests: The requests of the step, of which all tokens must be known to the host.
            budgets: The policy's budgets.
            most_nodes: Draft tokens of a request that there are slots and rows for.
        """
        assert self._drafter is not None
        lookups = frozenset(self._drafter.lookups)
        asked = [replace(b, drafters=lookups if b.drafters is None else lookups & b.drafters) for b in budgets]
        cut = [
            budget.cut(min(served.request.max_new_tokens - 1, LEVELS[-1]), most_nodes)
            for served, budget in zip(device_requests, asked, strict=True)
        ]
        trees = self._drafter.draft([served.span() for served in device_requests], cut)
        num_guesses = max(tree.num_guessed for tree in trees)
        shape = shape_of_guesses(num_guesses, max(tree.max_depth for tree in trees), most_nodes)
        if not shape.num_nodes:
            return shape, []
        return shape, [Guess(tree, np.ones(tree.num_guessed, dtype=np.float32)) for tree in trees]

    def of(
        self, device_requests: Sequence[DeviceRequest], budgets: Sequence[TreeBudget], shape: DraftShape
    ) -> list[Guess]:
        """Return the guesses for each request, of which all tokens must be known to the host.

        Args:
            budgets: The policy's budgets.
            shape: The shape of the step's trees.
        """
        assert self._drafter is not None
        cut = [
            budget.cut(min(served.request.max_new_tokens - 1, shape.guess_depth), budget.max_nodes)
            for served, budget in zip(device_requests, budgets, strict=True)
        ]
        trees = self._drafter.look_up([served.span() for served in device_requests], cut)
        return [
            _best(served.request, tree, budget, self._drafter.calibration, shape.num_guesses)
            for served, tree, budget in zip(device_requests, trees, cut, strict=True)
        ]


def _best(request: Request, tree: TokenTree, budget: TreeBudget, calibration: Calibration, most: int) -> Guess:
    """Return the most promising part of a tree."""
    path_prob = np.ones(len(tree)) if budget.widths else _path_prob(request, tree, calibration)
    if tree.num_guessed > most:
        kept = np.sort(np.argsort(-path_prob, kind="stable")[: most + 1])
        tree, path_prob = tree.keep(kept.tolist()), path_prob[kept]
    return Guess(tree, path_prob[1:].astype(np.float32))


def _path_prob(request: Request, tree: TokenTree, calibration: Calibration) -> Floats:
    """Return the probability that the path to each node is accepted, from what is known of each lookup, [nodes]."""
    missed = np.ones(len(tree))  # probability that all lookups are wrong about a node
    ranks = Counter[tuple[str, int]]()
    for draw in tree.draws:
        place = draw.drafter, tree.parents[draw.node]
        missed[draw.node] *= (
            1 - calibration.acceptance_prob(source(draw.drafter, request), [ranks[place]], [draw.confidence])[0]
        )
        ranks[place] += 1
    path_prob = np.minimum(1 - missed, 1.0)
    path_prob[0] = 1.0
    for node in range(1, len(tree)):
        path_prob[node] *= path_prob[tree.parents[node]]
    return path_prob
