"""The log-probability of a token, as requests keep it and outputs return it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Logprob(NamedTuple):
    """The log-probability of a token before temperature and penalties, with vLLM's names.

    Attributes:
        logprob: Natural logarithm of the probability.
        rank: Rank of the token in the vocabulary, from 1 for the most probable one.
        decoded_token: Text of the token alone, or None for a model without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


def by_token(
    tokens: Sequence[int],
    values: Sequence[float],
    ranks: Sequence[int],
    best: Sequence[int],
    best_values: Sequence[float],
) -> dict[int, Logprob]:
    """Return the log-probabilities at a place by token id: of the emitted token, of the best, then of the others.

    Args:
        tokens: The emitted token, then others.
        values: Their log-probabilities.
        ranks: Their ranks, the same for tokens that are equally probable.
        best: The most probable tokens, in the order of their ranks.
        best_values: Their log-probabilities.
    """
    known = {tokens[0]: Logprob(values[0], ranks[0])}
    for rank, (token, value) in enumerate(zip(best, best_values, strict=True), start=1):
        known[token] = Logprob(value, rank)
    for token, value, rank in zip(tokens, values, ranks, strict=True):
        known.setdefault(token, Logprob(value, rank))
    return known


def with_texts(known: Mapping[int, Logprob], decode: Callable[[int], str] | None) -> dict[int, Logprob]:
    """Return log-probabilities by token id with the texts of the tokens, if there is a function that returns these."""
    if decode is None:
        return dict(known)
    return {token: logprob._replace(decoded_token=decode(token)) for token, logprob in known.items()}
