"""Drafts for single requests, within their budgets."""

from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters import Drafter


def span_of(request: Request) -> Span:
    """Return the span of a request whose next token is to be generated."""
    return Span(request, len(request.token_ids) - 1, len(request.token_ids))


def draft_within(drafter: Drafter, request: Request, budget: TreeBudget) -> TokenTree:
    """Return the tree of a drafter, which must be within the budget."""
    (tree,) = drafter.draft([span_of(request)], [budget])
    assert tree.tokens[0] == request.token_ids[-1]
    assert tree.num_guessed <= budget.max_nodes
    assert tree.max_depth <= budget.max_depth
    return tree


def draft_expansion(drafter: Drafter, request: Request, *widths: int) -> TokenTree:
    """Return the tree of a drafter for a fixed expansion, of each of its drafters if there are several."""
    return draft_within(drafter, request, TreeBudget.expansion(widths, getattr(drafter, "num_drafters", 1)))
