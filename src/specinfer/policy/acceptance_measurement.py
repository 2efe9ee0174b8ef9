"""A policy that measures acceptance: the same tree for all requests, and counts of what was accepted of it."""

from collections.abc import Sequence
from statistics import fmean

from torch import Tensor

from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.policy.acceptance import AcceptanceModel, AcceptanceProfile
from specinfer.policy.base import SpeculationPolicy
from specinfer.verify import Acceptance

_LEAST_TREES = 4  # of a text whose own share counts


class AcceptanceCounter(SpeculationPolicy):
    """A policy that gives every request one tree, and counts the ranks of accepted tokens."""

    def __init__(self, budget: TreeBudget) -> None:
        self._budget = budget
        self._seen: dict[str, list[tuple[TokenTree, Acceptance]]] = {}  # by request

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        return [self._budget] * len(spans)

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        self._seen.setdefault(request.request_id, []).append((tree, acceptance))

    def profile(self, text: str) -> AcceptanceProfile | None:
        """Return what was accepted, or None if there was no tree.

        Args:
            text: What the prompts were.
        """
        passes = [each for seen in self._seen.values() for each in seen]
        trees = {name: [each for each in seen if each[0].num_guessed] for name, seen in self._seen.items()}
        drafted = [each for seen in trees.values() for each in seen]
        if not drafted:
            return None
        model = AcceptanceModel()
        for tree, acceptance in drafted:
            model.observe(tree, acceptance)
        shares = [_share(model, seen) for seen in trees.values() if len(seen) >= _LEAST_TREES]
        share, coverage = _share(model, drafted), len(drafted) / len(passes)
        ranks = tuple(model.by_rank().tolist())
        return AcceptanceProfile(ranks, share, tuple(shares) or (share,), coverage, len(drafted), text)


def _share(model: AcceptanceModel, trees: Sequence[tuple[TokenTree, Acceptance]]) -> float:
    """Return the accepted tokens over those that the ranks promise."""
    expected = fmean(model.expected_of(tree) for tree, _ in trees)
    return fmean(len(acceptance.path) for _, acceptance in trees) / max(expected, 1e-9)
