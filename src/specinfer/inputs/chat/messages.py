"""Messages of a conversation, checked and converted to the form that chat templates read.

Contents become text, and arguments of calls become objects. What templates have no place for is dropped.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.inputs.formats.arguments import is_deep
from specinfer.inputs.formats.calls import CallFormat

Message = dict[str, Any]

MAX_MESSAGES = 4096
_MAX_PARTS = 1024
_MAX_CALLS = 128
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THOUGHT_PARTS = ("thinking", "reasoning", "redacted_thinking")
_PLACES_OF_THOUGHTS = ("thinking", "text", "reasoning", "content", "summary")  # fields of such a part
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of an answer's thoughts; the first one counts
_READ = {"role", "content", "tool_calls", "function_call", "name", "tool_name", "refusal", "tool_call_id", *THOUGHTS}
_OF_ANSWERS = {"annotations", "audio", "id", "phase", "status", "type"}  # fields of answers, which clients send back
_SHORT_ID = 9


def read_messages(messages: Any, *, has_developer: bool, call_format: CallFormat) -> list[Message]:
    """Return checked messages in the form that templates read.

    Args:
        has_developer: Whether the template knows the developer role; if not, such messages become system messages.

    Raises:
        RequestError: The messages are not a valid conversation; the message names the place.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages: must be a list of objects with role and content")
    if not messages:
        raise RequestError("messages: empty; give at least one message with role and content")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages: {len(messages)} are too many; send at most {MAX_MESSAGES}")
    newest = len(messages) - 1
    read = [
        _read_message(f"messages[{i}]", message, call_format, is_newest=i == newest)
        for i, message in enumerate(messages)
    ]
    waiting: list[tuple[str, str]] = []  # ids and names of calls that have no result yet
    for message in read:
        if message["role"] == "developer" and not has_developer:
            message["role"] = "system"
        elif message["role"] in ("tool", "function"):
            message["role"] = "tool"
            _complete(message, waiting, _call_id("call_0", call_format))
        elif "tool_calls" in message:
            waiting = [(call["id"], call["function"]["name"]) for call in message["tool_calls"]]
    return read


def _complete(result: Message, waiting: list[tuple[str, str]], default_id: str) -> None:
    """Give a result its call's id and name: by one of them it belongs to a call, or else to the first without one."""
    given, name = result.get("tool_call_id"), result.get("name")
    fitting = [call for call in waiting if (call[1] == name if given is None else call[0] == given)]
    call = next(iter(fitting or (waiting if given is None else ())), (given or default_id, name))
    if call in waiting:
        waiting.remove(call)
    result |= {"tool_call_id": call[0]} | ({"name": name or call[1]} if name or call[1] else {})


def unread_keys(messages: Any) -> list[str]:
    """Return the names in messages that have no meaning here."""
    given = {key for message in messages for key, value in message.items() if value is not None}
    return sorted(map(str, given - _READ - _OF_ANSWERS))


def _read_message(field: str, given: Any, call_format: CallFormat, *, is_newest: bool) -> Message:
    if not isinstance(given, Mapping):
        raise RequestError(f"{field}: must be an object with role and content, not {given!r:.60}")
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{field}.role: use {', '.join(_ROLES)}, not {role!r:.60}")
    # A note in the newest message would be an answer about what the model has not seen.
    refuses = is_newest and role not in ("tool", "function")
    if given.get("images") and refuses:
        raise RequestError(f"{field}.images: only text is served; leave it out")
    content, thoughts = _read_content(f"{field}.content", given.get("content"), role, refuses=refuses)
    if given.get("images"):
        content = f"{content}\n{NOT_SHOWN.format('image')}".lstrip()
    message: Message = {"role": role, "content": content}
    thoughts = next((text for key in THOUGHTS if (text := _text(given.get(key)))), thoughts)
    if thoughts and role == "assistant":
        message[THOUGHTS[0]] = thoughts
    if not content:
        message["content"] = _text(given.get("refusal"))
    if name := _text(given.get("name")) or _text(given.get("tool_name")):
        message["name"] = name
    if isinstance(given.get("tool_call_id"), (str, int)):
        message["tool_call_id"] = _call_id(str(given["tool_call_id"]), call_format)
    if role == "assistant" and (calls := _read_calls(field, given, call_format)):
        message["tool_calls"] = calls
    return message


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _read_content(field: str, content: Any, role: str, *, refuses: bool) -> tuple[str, str]:
    """Return a text and thoughts, both joined from parts if there are any. Results that are no parts become JSON.

    Args:
        refuses: Whether images and the like are refused, and not replaced by a note.
    """
    if content is None or isinstance(content, str):
        return content or "", ""
    is_result, parts = role in ("tool", "function"), [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, (list, tuple)):
        if is_result:
            return _json(field, content), ""
        raise RequestError(f"{field}: must be text or a list of text parts, not {content!r:.60}")
    if len(parts) > _MAX_PARTS:
        raise RequestError(f"{field}: {len(parts)} parts are too many; send at most {_MAX_PARTS}")
    texts, thoughts = list[str](), list[str]()
    for i, part in enumerate(parts):
        kind = part.get("type") or "text" if isinstance(part, Mapping) else None
        text = _text_of(part, kind, refuses=refuses)
        if text is None and is_result:
            return _json(field, content), ""
        if text is None:
            given = part.get("type") if isinstance(part, Mapping) else part
            raise RequestError(f"{field}[{i}].type: only text is served, not {given!r:.60}; nothing is fetched")
        (thoughts if kind in _THOUGHT_PARTS and role == "assistant" else texts).append(text)
    return "\n".join(texts), "\n".join(filter(None, thoughts))


def _text_of(part: Any, kind: Any, *, refuses: bool) -> str | None:
    """Return the text of a part, or None if it has none."""
    if isinstance(part, str):
        return part
    if not isinstance(kind, str):
        return None
    if kind in _TEXT_PARTS:
        text = part.get(_TEXT_PARTS[kind])
        return "" if text is None and part.get("type") else text if isinstance(text, str) else None
    try:
        if kind in _THOUGHT_PARTS:
            return text_of(next((part[key] for key in _PLACES_OF_THOUGHTS if part.get(key)), ""))
        return None if refuses and is_unreadable(part) else text_of(part) or None
    except (TypeError, ValueError, RecursionError):
        return None


def _read_calls(field: str, given: Mapping[str, Any], call_format: CallFormat) -> list[Message]:
    calls = given.get("tool_calls")
    if not calls and given.get("function_call") is not None:
        calls = [{"function": given["function_call"]}]
    if calls is None:
        return []
    if not isinstance(calls, (list, tuple)) or len(calls) > _MAX_CALLS:
        raise RequestError(f"{field}.tool_calls: must be a list of at most {_MAX_CALLS} calls")
    return [_read_call(f"{field}.tool_calls[{i}]", i, call, call_format) for i, call in enumerate(calls)]


def _read_call(field: str, i: int, call: Any, call_format: CallFormat) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if function is None and isinstance(call, Mapping) and isinstance(custom := call.get("custom"), Mapping):
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input") or ""}}
    if not isinstance(function, Mapping):
        raise RequestError(f"{field}: must have function with name and arguments, not {call!r:.60}")
    name, call_id = function.get("name"), call.get("id")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{field}.function.name: must be text, not {name!r:.60}")
    given_id = str(call_id) if isinstance(call_id, (str, int)) else f"call_{i}"
    arguments = _read_arguments(f"{field}.function.arguments", function.get("arguments"))
    return {
        "id": _call_id(given_id, call_format),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _read_arguments(field: str, given: Any) -> dict[str, Any] | str:
    """Return the object that arguments are, or their text: a call may have been cut off, or be no JSON at all."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given) if given.strip() else None
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate may be in an escape
        except (ValueError, RecursionError):
            return given
    if isinstance(value, Mapping) and not is_deep(value):
        return dict(value)
    if value is None:
        return {}
    return given if isinstance(given, str) else _json(field, given)


def _json(field: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{field}: must be text or JSON: {error}") from error


def _call_id(call_id: str, call_format: CallFormat) -> str:
    """Return the id; for templates that only take short ids, nine characters of its hash."""
    is_short = len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum()
    if not call_format.has_short_ids or is_short:
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:_SHORT_ID]


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
