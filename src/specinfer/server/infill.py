"""Filling in the middle: prompts with a prefix and a suffix, for models trained on such prompts."""

from collections.abc import Container
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.inputs.prompts import PromptReader

_PREFIX, _SUFFIX = object(), object()  # placeholders for the two texts among a model's special tokens
_FORMS: tuple[tuple[object, ...], ...] = (
    ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),
    ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),
    ("<fim-prefix>", _PREFIX, "<fim-suffix>", _SUFFIX, "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", _PREFIX, "<\uff5cfim\u2581hole\uff5c>", _SUFFIX, "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", _PREFIX, "\u2581<SUF>", _SUFFIX, "\u2581<MID>"),
    ("<PRE>", _PREFIX, "<SUF>", _SUFFIX, "<MID>"),
    ("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX),
)


def can_infill(tokens: Container[str]) -> bool:
    """Return whether a model with these special tokens can fill in the middle."""
    return any(all(part in tokens for part in form if isinstance(part, str)) for form in _FORMS)


def infill_ids(tokenizer: Any, reader: PromptReader, prefix: str, suffix: str, *, has_frame: bool) -> list[int]:
    """Return a prompt after which the model generates the text between a prefix and a suffix.

    Args:
        has_frame: Whether the tokens come first that the tokenizer puts before any text.
    """

    def encode(text: str) -> list[int]:
        return reader.encode(text, add_special_tokens=False)

    for form in _FORMS:
        marks = {part: _id_of(tokenizer, part) for part in form if isinstance(part, str)}
        known: dict[object, list[int]] = {part: [mark] for part, mark in marks.items() if mark is not None}
        if len(known) == len(marks):
            known |= {_PREFIX: encode(prefix), _SUFFIX: encode(suffix)}
            frame = reader.encode("a") if has_frame else []
            first = encode("a")[:1]
            before = frame[: frame.index(first[0])] if first and first[0] in frame else []
            return before + [token for part in form for token in known[part]]
    raise RequestError("suffix: this model has no tokens for filling in the middle; leave it out")


def _id_of(tokenizer: Any, token: str) -> int | None:
    """Return a token's id, or None: tokenizers return the id of the unknown token for a missing one."""
    found = tokenizer.convert_tokens_to_ids(token)
    return found if isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == token else None
