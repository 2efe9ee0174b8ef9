"""Parts of a message that are not plain text: documents, results of searches and programs, references, images."""

import json
import re
from collections.abc import Mapping
from typing import Any

NOT_SHOWN = "[{}: not shown, this model reads text only]"
# Fields that are not shown to the model, and fields whose text is shown without their name.
_HIDDEN = {"cache_control", "caller", "citations", "id", "is_error", "media_type", "signature", "tool_use_id", "type"}
_PLAIN = {"content", "context", "data", "source", "text", "title", "tool_name"}
_MEDIA = re.compile(r"(input_)?(image|audio|video|file|prompt_embeds)(_|$)")


def text_of(value: Any) -> str:
    """Return what a model can read of a value: text, that of each field of an object, or a note for an image.

    Raises:
        TypeError, ValueError, RecursionError: It is no JSON, or nested too deeply.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return "\n".join(filter(None, map(text_of, value)))
    if not isinstance(value, Mapping):
        return "" if value is None else json.dumps(value)
    if is_unreadable(value):
        return NOT_SHOWN.format(str(value.get("type"))[:60])
    texts = [
        text_of(one) if key in _PLAIN else f"{key}: {one if isinstance(one, str) else json.dumps(one)}"
        for key, one in value.items()
        if one not in (None, "", []) and key not in _HIDDEN and not str(key).startswith("encrypted")
    ]
    return "\n".join(filter(None, texts))


def is_unreadable(block: Mapping[str, Any]) -> bool:
    """Return whether a part has data or an address in place of text."""
    source = block.get("source")
    is_textual = not isinstance(source, Mapping) or source.get("type") in ("text", "content")
    return not is_textual or "file_id" in block or _MEDIA.match(str(block.get("type"))) is not None
