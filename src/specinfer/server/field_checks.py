"""Fields of requests that have no effect here or are refused, and the header that names those that are ignored."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from pydantic import BeforeValidator

logger = logging.getLogger(__name__)
IGNORED_HEADER = "X-SpecInfer-Ignored-Fields"
_MAX_SHOWN, _MAX_LOGGED = 16, 1024  # names: of a response, and of a process, because clients make them up
_MAX_DIGITS = 20  # of a number as text
_logged: set[str] = set()

# Fields that are accepted and have no effect here.
HARMLESS = {
    "metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
}  # fmt: skip

# A client that sends one of these relies on it: a response that ignored it would be wrong and look right.
REFUSED = {
    "allowed_tools": "use tool_choice",
    "audio": "only text is served",
    "chat_template": "templates come with the model or from the operator",
    "documents": "put their text into a message",
    "format": "use response_format",
    "function_call": "use /v1/chat/completions",
    "functions": "use /v1/chat/completions",
    "kv_transfer_params": "leave it out",
    "logits_processors": "use logit_bias, bad_words or structured_outputs",
    "prompt_embeds": "send text or token ids",
    "structural_tag": "use tools or structured_outputs.grammar",
    "tool_choice": "use /v1/chat/completions",
    "tools": "use /v1/chat/completions",
    "use_beam_search": "leave it out",
    "web_search_options": "nothing is searched",
}

# Older and other engines' names of `structured_outputs`' keys.
CONSTRAINTS = {
    "ebnf": "grammar", "grammar": "grammar", "guided_choice": "choice", "guided_grammar": "grammar",
    "guided_json": "json", "guided_json_object": "json_object", "guided_regex": "regex", "json_schema": "json",
    "regex": "regex",
}  # fmt: skip


def few(limit: int) -> BeforeValidator:
    """Return a validator that counts the keys of an object before it looks at any of them."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > limit:
            raise ValueError(f"{len(given)} names are too many; send {limit} at most")
        return given

    return BeforeValidator(check)


def as_number(given: Any) -> Any:
    """Return the number that a text is, and a whole one as an integer; anything else stays as it is."""
    if isinstance(given, str) and len(given) <= _MAX_DIGITS:
        try:
            given = int(given)
        except ValueError:
            with suppress(ValueError):
                given = float(given)
    return int(given) if isinstance(given, float) and given.is_integer() else given


def with_ignored(headers: Mapping[str, str], ignored: Iterable[str]) -> dict[str, str]:
    """Return headers that also name what was ignored. The log has each name once."""
    short = (name[:64].encode("ascii", "replace").decode().strip() for name in ignored if name.isprintable())
    names = list(filter(None, short))
    fresh = [name for name in dict.fromkeys(names) if name not in _logged][: _MAX_LOGGED - len(_logged)]
    if fresh:
        _logged.update(fresh)
        logger.warning("fields that are not known are ignored: %s", ", ".join(fresh))
    shown = [*filter(None, headers.get(IGNORED_HEADER, "").split(", ")), *names][:_MAX_SHOWN]
    return dict(headers) | ({IGNORED_HEADER: ", ".join(shown)} if shown else {})
