"""The log-probability of a token, as requests keep it and outputs return it."""

from collections.abc import Callable, Mapping
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


def with_texts(known: Mapping[int, Logprob], decode: Callable[[int], str] | None) -> dict[int, Logprob]:
    """Return log-probabilities by token id with the texts of the tokens, if there is a function that returns these."""
    return {token: one._replace(decoded_token=decode(token)) if decode else one for token, one in known.items()}
