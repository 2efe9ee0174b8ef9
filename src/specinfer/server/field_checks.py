"""Fields of requests that have no effect here, are refused, or are misspelt."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BeforeValidator

from specinfer.server.errors import ApiError

_MAX_UNKNOWN = 64  # each takes a tenth of a millisecond to compare
_SIMILARITY = 0.81  # the least at which an unknown name is a misspelt one: refuses max_new_tokens, but not top_a

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
    "ebnf": "use structured_outputs.grammar, in Lark's notation",
    "format": "use response_format",
    "function_call": "use /v1/chat/completions",
    "functions": "use /v1/chat/completions",
    "grammar": "use structured_outputs.grammar, in Lark's notation",
    "guided_choice": "use structured_outputs.choice",
    "guided_decoding_backend": "use structured_outputs",
    "guided_grammar": "use structured_outputs.grammar, in Lark's notation",
    "guided_json": "use structured_outputs.json, or response_format",
    "guided_json_object": "use response_format",
    "guided_regex": "use structured_outputs.regex",
    "guided_whitespace_pattern": "use structured_outputs.regex",
    "json_schema": "use response_format",
    "kv_transfer_params": "leave it out",
    "logits_processors": "use logit_bias, bad_words or structured_outputs",
    "prompt_embeds": "send text or token ids",
    "regex": "use structured_outputs.regex",
    "structural_tag": "use tools or structured_outputs.grammar",
    "tool_choice": "use /v1/chat/completions",
    "tools": "use /v1/chat/completions",
    "use_beam_search": "leave it out",
    "web_search_options": "nothing is searched",
}


def few(limit: int) -> BeforeValidator:
    """Return a validator that counts the keys of an object before it looks at any of them."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > limit:
            raise ValueError(f"{len(given)} names are too many; send {limit} at most")
        return given

    return BeforeValidator(check)


def check_spelling(unknown: Iterable[str], known: Iterable[str], prefix: str = "") -> None:
    """Refuse the first unknown name that resembles a known one.

    Raises:
        ApiError: A name is misspelt, and the message has the likely one; or there are too many names to compare.
    """
    names = set(known)
    for i, name in enumerate(unknown):
        if i == _MAX_UNKNOWN:
            place = prefix.rstrip(".") or "body"
            message = f"{place}: more than {i} names are not known, {name!r:.64} among them; leave them out"
            raise ApiError(400, message, param=prefix + name[:64], code="unknown_field")
        plain = name[:64].lower().replace("-", "_")
        if likely := difflib.get_close_matches(plain, names, 1, _SIMILARITY):
            field = prefix + name[:64]
            raise ApiError(
                400, f"{field}: is not known; did you mean {prefix}{likely[0]}?", param=field, code="unknown_field"
            )
