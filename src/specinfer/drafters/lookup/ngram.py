"""Prompt lookup. Text often repeats itself, so the tokens that followed an n-gram before may follow it again.

Source: prompt lookup decoding (Saxena, 2023), as in vLLM's and transformers' n-gram speculation.
"""

from collections.abc import Sequence

from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.base import MAX_PROSPECT, Prospect
from specinfer.verify import Acceptance


class _Index:
    """The last occurrence of each n-gram in one request's tokens, updated token by token."""

    def __init__(self) -> None:
        self.num_indexed = 0
        # n-gram -> index of the token that followed its last occurrence
        self.next_token: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int], sizes: range) -> None:
        """Index the n-grams that have a token after them; the newest n-gram has none yet."""
        for after in range(max(self.num_indexed, 1), len(tokens)):
            for size in sizes:
                if size <= after:
                    self.next_token[tuple(tokens[after - size : after])] = after
        self.num_indexed = len(tokens)


class NGramDrafter:
    """A drafter of the continuation of the last occurrence of the request's newest n-gram."""

    name = "ngram"

    def __init__(self, min_size: int = 2, max_size: int = 4) -> None:
        if not 1 <= min_size <= max_size:
            raise ValueError(f"n-gram sizes must satisfy 1 <= min <= max, not {min_size} and {max_size}")
        self._sizes = range(max_size, min_size - 1, -1)  # longer matches are more often right
        self._indexes: dict[str, _Index] = {}

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        return [self._draft_one(span.request, budget) for span, budget in zip(spans, budgets, strict=True)]

    def _draft_one(self, request: Request, budget: TreeBudget) -> TokenTree:
        tokens = request.token_ids
        length = min(budget.max_nodes, budget.max_depth)
        if not length:
            return TokenTree.root(tokens[-1])
        size, guesses = self._find(request, length)
        return _chain(tokens[-1], guesses, size, self.name) if size else TokenTree.root(tokens[-1])

    def prospects(self, spans: Sequence[Span]) -> list[Prospect]:
        prospects = []
        for span in spans:
            size, guesses = self._find(span.request, MAX_PROSPECT)
            # The product of the confidences along the chain.
            path_probs = tuple(size / (size + node) for node in range(1, len(guesses) + 1))
            prospects.append(Prospect(size, tuple(guesses), path_probs))
        return prospects

    def _find(self, request: Request, length: int) -> tuple[int, list[int]]:
        """Return the longest of the newest n-grams that occurred before and `length` tokens after it.

        If none did, return (0, []).
        """
        tokens = request.token_ids
        index = self._indexes.setdefault(request.request_id, _Index())
        index.extend(tokens, self._sizes)
        for size in self._sizes:
            at = index.next_token.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if at is not None:
                return size, _continuation(tokens, at, length)
        return 0, []

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass  # the index is brought up to date when drafting

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)


def _continuation(tokens: Sequence[int], at: int, length: int) -> list[int]:
    """Return the tokens from `at` on; past the end of the text the repetition is assumed to continue."""
    period = len(tokens) - at
    return [tokens[at + i % period] for i in range(length)]


def _chain(root: int, guesses: Sequence[int], size: int, name: str) -> TokenTree:
    """Return a tree with one path, whose confidence grows with the length of the match.

    Each drafted token is conditioned on the ones before it, so it counts as a match that is one token longer.
    """
    confidence = [(size + node - 1) / (size + node) for node in range(1, len(guesses) + 1)]
    return TokenTree.chosen((root, *guesses), range(-1, len(guesses)), name, confidence)
