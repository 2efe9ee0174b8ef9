"""Requests whose tokens are drawn on a device: which trees they may have there, and their random numbers.

They are those under the multi-step or the traversal rule. A fixed expansion is drawn whole, as ordinary steps draw it,
or not at all. Best-first trees are cut to what a step holds, before anything is drawn.
"""

from collections.abc import Iterable, Sequence

from specinfer.core.request import Request
from specinfer.core.rules import is_random
from specinfer.core.tree import TreeBudget
from specinfer.engine.device.growth import DraftShape
from specinfer.engine.device.launch import Answer, DeviceRequest
from specinfer.engine.device.sizes import LEVELS, holds_expansion
from specinfer.model.graphs.sizes import REQUESTS


class DrawnRequests:
    """The requests of an executor that are under a rule with random numbers.

    Args:
        rule: The rule, or None if no such requests are served.
        usual: Verification rule of requests that have none of their own.
    """

    def __init__(self, rule: str | None, usual: str) -> None:
        self.rule, self._usual = rule, usual
        self._too_wide: dict[Request, int] = {}  # numbers of rows with which their expansions do not fit into a step

    def has(self, request: Request) -> bool:
        """Return whether a request is under the rule, where that differs from plain decoding."""
        rule = request.verification or self._usual
        return is_random(rule) and not (request.params.is_greedy or request.params.tree == "off")

    def why_ordinary(self, request: Request, num_served: int) -> str | None:
        """Return why the tree of a request is not drawn on the device next to others, or None, as far as is known."""
        if not self.has(request):
            return None
        if self.rule is None:
            return "tokens are drawn by a rule with random numbers, under which these drafters take ordinary steps"
        if num_served + 1 > self._too_wide.get(request, 2 * REQUESTS[-1]) // 2:
            return "fixed expansions of so many requests do not fit into a step"
        if self.are_masked(request, LEVELS[-1]):
            return "a grammar, bad words or the end of a thought, under a rule with random numbers"
        return None

    def are_masked(self, request: Request, depth: int) -> bool:
        """Return whether draws of this request, at up to this depth, are masked by ordinary steps.

        They are masked at every level there, so other tokens would be drawn here.
        """
        return self.has(request) and request.restricts_tokens(depth)

    def undrawable(
        self,
        device_requests: Sequence[DeviceRequest],
        budgets: Iterable[TreeBudget],
        shape: DraftShape | None,
        num_rows: int,
        most_nodes: int,
    ) -> list[DeviceRequest]:
        """Return the requests whose fixed expansions this shape does not hold whole.

        Args:
            most_nodes: Draft tokens of a request that a step with this number of rows may have.
        """
        found = [
            (one, budget)
            for one, budget in zip(device_requests, budgets, strict=True)
            if self.has(one.request) and not holds_expansion(shape, budget)
        ]
        self._too_wide = {request: rows for request, rows in self._too_wide.items() if not request.is_finished}
        self._too_wide |= {one.request: num_rows for one, budget in found if budget.max_nodes > most_nodes}
        return [one for one, _ in found]

    def note(self, request: Request, answer: Answer, drafters: Sequence[str | None]) -> None:
        """Let a request continue with random numbers that were not used.

        Args:
            drafters: Names of those that drew its tree, with None for others.
        """
        if self.has(request):
            assert answer.uniforms is not None
            request.uniforms.state = answer.uniforms
            for name in drafters:
                if name is not None:
                    request.drafting.begin_draws(name)
