"""Drafts from the grammar of a request: the tokens that it forces, and branches where it allows few texts.

They take no model and no earlier text. Where the budget of a thought is spent, the tokens that end it are forced, too.
"""

from collections.abc import Sequence

from specinfer.core.grammar.forced import Continuation, Style, continuations
from specinfer.core.lookups import GRAMMAR
from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.verify import Acceptance

_PROMPT_TOKENS, _OUTPUT_TOKENS = 2048, 64  # last tokens that are read for their whitespace


class GrammarDrafter:
    """A drafter that proposes what the grammar of a request makes predictable."""

    name = GRAMMAR

    def __init__(self) -> None:
        self._styles: dict[str, tuple[Request, Style]] = {}

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        return [self._draft_one(span.request, budget) for span, budget in zip(spans, budgets, strict=True)]

    def _draft_one(self, request: Request, budget: TreeBudget) -> TokenTree:
        root = request.token_ids[-1]
        if not (budget.max_nodes and budget.max_depth):
            return TokenTree.root(root)
        ends = _ends_of_thought(request, budget.max_depth)
        return _tree(root, [ends] if ends.tokens else self._continuations(request), budget, self.name)

    def _continuations(self, request: Request) -> list[Continuation]:
        grammar = request.grammar
        if grammar is None or grammar.text is None:
            return []
        known = self._styles.get(request.request_id)
        if known is None or known[0] is not request:
            style = Style(grammar.text.bytes_of(request.prompt_ids[-_PROMPT_TOKENS:]))
            self._styles[request.request_id] = (request, style)
        else:
            style = known[1]
        start = max(len(request.prompt_ids), len(request.token_ids) - _OUTPUT_TOKENS)
        before = grammar.text.bytes_of(request.token_ids[start:])
        style.read(before)
        return continuations(grammar, style, before)

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass  # the output is read when drafting

    def forget(self, request_id: str) -> None:
        self._styles.pop(request_id, None)


def has_forced(request: Request) -> bool:
    """Return whether a grammar, or the end of its thought, may force tokens of a request."""
    return request.grammar is not None or (request.thought is not None and request.thought.may_force(0))


def _ends_of_thought(request: Request, max_depth: int) -> Continuation:
    """Return the tokens that must end the thought now."""
    tokens: list[int] = []
    while request.thought is not None and len(tokens) < max_depth:
        token = request.thought.forced(tokens)
        if token is None:
            break
        tokens.append(token)
    return Continuation(tuple(tokens), (1.0,) * len(tokens))


def _tree(root: int, texts: Sequence[Continuation], budget: TreeBudget, name: str) -> TokenTree:
    """Return the tree of the likeliest tokens of these texts."""
    children: dict[tuple[int, int], int] = {}
    tokens, parents, depths, path_probs = [root], [-1], [0], [1.0]
    for text in texts:
        node, path_prob = 0, 1.0
        for token, prob in zip(text.tokens[: budget.max_depth], text.probs, strict=False):
            path_prob *= prob
            child = children.setdefault((node, token), len(tokens))
            if child == len(tokens):
                tokens.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
                path_probs.append(0.0)
            path_probs[child] = min(path_probs[node], max(path_probs[child], path_prob))
            node = child
    order = sorted(range(1, len(tokens)), key=lambda node: (-path_probs[node], depths[node], node))
    kept = [0, *sorted(order[: budget.max_nodes])]
    if len(kept) == 1:
        return TokenTree.root(root)
    place = {node: i for i, node in enumerate(kept)}
    confidence = [path_probs[node] / path_probs[parents[node]] for node in kept[1:]]
    return TokenTree.chosen(
        [tokens[node] for node in kept], [-1, *(place[parents[node]] for node in kept[1:])], name, confidence
    )
