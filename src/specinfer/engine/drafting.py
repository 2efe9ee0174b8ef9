"""What a step lets drafters guess, and whether they kept to it."""

from collections.abc import Sequence

from specinfer.config import LOOKUP_NAMES
from specinfer.request import Span
from specinfer.tree import OFF, TokenTree, TreeBudget


def fit(spans: Sequence[Span], budgets: Sequence[TreeBudget], free_slots: int) -> list[TreeBudget]:
    """Budgets cut to what a request may still say and to the slots at hand."""
    fitting = []
    for span, budget in zip(spans, budgets, strict=True):
        # The token after the path is said without a guess, so the path may be one shorter.
        budget = budget.cut(span.request.max_new_tokens - 1, free_slots) if span.request.may_guess else OFF
        free_slots -= budget.max_nodes
        fitting.append(budget)
    return fitting


def is_sound(tree: TokenTree, span: Span, budget: TreeBudget, vocab_size: int) -> bool:
    """Whether a drafter kept to its budget and to tokens the target knows."""
    known = min(tree.tokens) >= 0 and max(tree.tokens) < vocab_size
    rooted = tree.tokens[0] == span.request.token_ids[-1]
    return known and rooted and tree.num_guessed <= budget.max_nodes and tree.max_depth <= budget.max_depth


def asks_model(budget: TreeBudget) -> bool:
    """Whether a drafter is asked that has to read what came before; lookups do so as they go."""
    return budget.drafters is None or not budget.drafters <= frozenset(LOOKUP_NAMES)
