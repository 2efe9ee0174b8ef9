"""Tokens added to a vocabulary, as templates and formats of calls use them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token added to the vocabulary.

    Attributes:
        is_shown: Whether decoded texts contain it, as `<think>` of some models.
    """

    id: int
    is_shown: bool
