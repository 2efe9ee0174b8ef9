"""A network of the learned policy that knows nothing, and a drafter that it was not trained with."""

from collections.abc import Sequence

import numpy as np

from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.policy.features import feature_names
from specinfer.policy.network import PolicyNetwork, make_configurations
from specinfer.verify import Acceptance

SLOTS = ("model", "suffix")


def make_network(
    slots: Sequence[str] = SLOTS, seed: int = 0, gains: Sequence[float] | None = None, spread: float = 0.1
) -> PolicyNetwork:
    """One that knows nothing: random, or the same expected guesses for every request."""
    names, menu = feature_names(slots), make_configurations(slots)
    source = np.random.default_rng(seed)
    size = 3 * len(menu)
    weight = source.normal(size=(len(names), size)) * (0.0 if gains else spread)
    bias = source.normal(size=size) - 1.0
    if gains:
        nodes = [max(one.max_nodes, 1e-3) for one in menu]
        levels = [one.max_depth if one.uses_model else 1e-3 for one in menu]
        bias = np.log([*np.maximum(gains, 1e-6), *nodes, *levels])
    shape = len(names)
    return PolicyNetwork(
        tuple(slots), names, menu, np.full(shape, -100.0), np.full(shape, 100.0), np.zeros(shape), np.ones(shape),
        ((weight, np.asarray(bias)),), {"seed": seed},
    )  # fmt: skip


class Scripted:
    """A drafter that is no lookup; its trees are the test's own."""

    name = "scripted"

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        raise AssertionError

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None: ...

    def forget(self, request_id: str) -> None: ...
