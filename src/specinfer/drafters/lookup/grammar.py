"""Drafts from the grammar of a request: forced tokens, branches where it allows few texts, and values of the prompt.

They take no model and no earlier text but the prompt, and whitespace is as the model usually writes it. Where the
budget of a thought is spent, the tokens that end it are forced, too.
"""

from collections.abc import Sequence
from typing import NamedTuple

from specinfer.core.grammar.forced import Continuation, Outlook
from specinfer.core.grammar.style import Habits, Style
from specinfer.core.grammar.wording import Wording
from specinfer.core.lookups import GRAMMAR, SOURCE
from specinfer.core.request import FinishReason, Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.verify import Acceptance

_PROMPT_TOKENS, _OUTPUT_TOKENS = 2048, 64  # last tokens that are read for their whitespace and words
COPIED = f"{GRAMMAR}{SOURCE}prompt"  # the name of tokens of values that the prompt words


class _Reading(NamedTuple):
    """A request, and what is known of its prompt and its output."""

    request: Request
    style: Style
    wording: Wording


class GrammarDrafter:
    """A drafter that proposes what the grammar of a request makes predictable."""

    name = GRAMMAR

    def __init__(self) -> None:
        self._habits = Habits()
        self._readings: dict[str, _Reading] = {}

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
        reading = self._readings.get(request.request_id)
        if reading is None or reading.request is not request:
            prompt = grammar.text.bytes_of(request.prompt_ids[-_PROMPT_TOKENS:])
            reading = _Reading(request, Style(prompt, self._habits), Wording(prompt))
            self._readings[request.request_id] = reading
        start = max(len(request.prompt_ids), len(request.token_ids) - _OUTPUT_TOKENS)
        before = grammar.text.bytes_of(request.token_ids[start:])
        reading.style.read(before)
        return Outlook(grammar, reading.style, reading.wording, before).continuations()

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass  # the output is read when drafting

    def forget(self, request_id: str) -> None:
        reading = self._readings.pop(request_id, None)
        if reading is None:
            return
        request = reading.request
        # Another request with the seed of a sampled output has the random numbers that made it (docs/verification.md).
        if request.grammar is None or request.grammar.text is None or request.params.is_seeded:
            return
        last = request.token_ids[-1]  # of a text that ended by a stop string or its grammar, any token
        end = last if request.finish_reason == FinishReason.STOP and last in request.eos_token_ids else None
        self._habits.learn(request.grammar.text, request.output_ids[-_PROMPT_TOKENS:], end)


def has_forced(request: Request) -> bool:
    """Return whether a grammar, or the end of its thought, may force tokens of a request."""
    return request.grammar is not None or (request.thought is not None and request.thought.may_force(0))


def legal_part(request: Request, tree: TokenTree) -> TokenTree:
    """Return the nodes of a tree of chosen tokens that the grammar of its request allows, if it has one."""
    if request.grammar is None or not tree.num_guessed:
        return tree
    paths: dict[int, tuple[int, ...]] = {0: ()}
    kept = [0]
    known: dict[int, int] = {}  # how many nodes of a path are legal, by the last node of a path that was looked at
    tokens, parents, children = tree.tokens, tree.parents, tree.children
    for node in range(1, len(tree)):
        if parents[node] not in paths:
            continue
        path = paths[node] = (*paths[parents[node]], tokens[node])
        if node not in known:  # look at the longest path of first children at once
            below, longer = [node], list(path)
            while children[below[-1]]:
                token, child = next(iter(children[below[-1]].items()))
                below.append(child)
                longer.append(token)
            num_legal = request.grammar.num_legal(longer)
            known.update(zip(below, [num_legal] * len(below), strict=True))
        if known[node] >= len(path):
            kept.append(node)
        else:
            del paths[node]
    return tree.keep(kept)


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
    tokens, parents, depths, path_probs, names = [root], [-1], [0], [1.0], [""]
    for text in texts:
        node, path_prob = 0, 1.0
        copied = text.copied or (False,) * len(text.tokens)
        for token, prob, is_copied in zip(text.tokens[: budget.max_depth], text.probs, copied, strict=False):
            path_prob *= prob
            child = children.setdefault((node, token), len(tokens))
            if child == len(tokens):
                tokens.append(token)
                parents.append(node)
                depths.append(depths[node] + 1)
                path_probs.append(0.0)
                names.append(COPIED if is_copied else name)
            path_probs[child] = min(path_probs[node], max(path_probs[child], path_prob))
            node = child
    order = sorted(range(1, len(tokens)), key=lambda node: (-path_probs[node], depths[node], node))
    kept = [0, *sorted(order[: budget.max_nodes])]
    if len(kept) == 1:
        return TokenTree.root(root)
    place = {node: i for i, node in enumerate(kept)}
    confidence = [path_probs[node] / path_probs[parents[node]] for node in kept[1:]]
    return TokenTree.chosen(
        [tokens[node] for node in kept],
        [-1, *(place[parents[node]] for node in kept[1:])],
        [names[node] for node in kept[1:]],
        confidence,
    )
