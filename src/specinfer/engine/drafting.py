"""Limits of drafting in a step, and the check of drafted trees against them."""

from collections.abc import Sequence

from specinfer.core.lookups import is_model
from specinfer.core.request import Span
from specinfer.core.tree import OFF, TokenTree, TreeBudget


def fit(spans: Sequence[Span], budgets: Sequence[TreeBudget], free_slots: int) -> list[TreeBudget]:
    """Return the budgets, cut to the tokens that each request may still emit and to the free slots."""
    fitting = []
    for span, budget in zip(spans, budgets, strict=True):
        # The token after the path needs no draft token, so the path may be one shorter.
        budget = budget.cut(span.request.max_new_tokens - 1, free_slots) if span.request.may_guess else OFF
        free_slots -= budget.max_nodes
        fitting.append(budget)
    return fitting


def is_sound(tree: TokenTree, span: Span, budget: TreeBudget, vocab_size: int) -> bool:
    """Return whether a tree keeps within its budget, starts at the last token, and has only tokens of the target."""
    known = min(tree.tokens) >= 0 and max(tree.tokens) < vocab_size
    rooted = tree.tokens[0] == span.request.token_ids[-1]
    return known and rooted and tree.num_guessed <= budget.max_nodes and tree.max_depth <= budget.max_depth


def asks_model(budget: TreeBudget) -> bool:
    """Return whether the budget uses a drafter that has to read the previous tokens first; lookups read as they go."""
    return budget.drafters is None or any(map(is_model, budget.drafters))
