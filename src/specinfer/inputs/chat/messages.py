"""Messages of a conversation, checked and converted to the form that chat templates read.

Contents become text, and arguments of calls become objects. For a template without tools, the tools are written into
the system message, and calls and results into message texts, in the format of Hermes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.inputs.formats.calls import CallFormat
from specinfer.inputs.formats.writing import written_calls

Message = dict[str, Any]

MAX_MESSAGES = 4096
_MAX_PARTS = 1024
MAX_CALLS = 128
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_TEXTS = ("name", "refusal", "tool_call_id", "reasoning_content", "reasoning")
_IGNORED = ("annotations", "id", "status", "type", "phase")  # fields of an answer that a client sends back
_MAX_DEPTH = 100
_SHORT_ID = 9
_TOLD = """You may call functions to help with the user's request. The functions, as JSON:

<tools>
{tools}
</tools>

To call one, write this and nothing after it, with the function's name and its arguments as a JSON object:

<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


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
    read = [_read_message(f"messages[{i}]", message, call_format) for i, message in enumerate(messages)]
    for message in read:
        if message["role"] == "developer" and not has_developer:
            message["role"] = "system"
        elif message["role"] == "function":
            message["role"] = "tool"
    return read


def add_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, as_system: bool = True
) -> list[Message]:
    """Return a conversation for a template that does not know tools.

    Args:
        as_system: Whether the template accepts a system message; if not, the tools are put into the first message.
    """
    result = [_as_user(message) for message in messages]
    if not tools:
        return result
    text = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = result[0]
    if first["role"] == "system":
        result[0] = first | {"content": f"{first['content']}\n\n{text}".lstrip()}
    elif as_system:
        result.insert(0, {"role": "system", "content": text})
    else:
        result[0] = first | {"content": f"{text}\n\n{first['content']}"}
    return result


def as_written(message: Message, call_format: CallFormat) -> Message:
    """Return a message with its calls as the template takes them: as text of the content if it leaves calls out."""
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    if call_format.writes_calls and call_format.is_native:
        if not call_format.has_text_arguments:
            return message
        texts = [one | {"arguments": json.dumps(one["arguments"], ensure_ascii=False)} for one in functions]
        calls = zip(message["tool_calls"], texts, strict=True)
        return message | {"tool_calls": [call | {"function": function} for call, function in calls]}
    text = written_calls(call_format, [(one["name"], one["arguments"]) for one in functions])
    content = f"{message['content']}\n{text}" if message["content"] else text
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _as_user(message: Message) -> Message:
    """Return a tool's result as a message of the user, for a template that does not know tools."""
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _read_message(field: str, given: Any, call_format: CallFormat) -> Message:
    if not isinstance(given, Mapping):
        raise RequestError(f"{field}: must be an object with role and content, not {given!r:.60}")
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{field}.role: use {', '.join(_ROLES)}, not {role!r:.60}")
    known = {"role", "content", "tool_calls", "function_call", *_TEXTS, *_IGNORED}
    if unknown := sorted(str(key) for key, value in given.items() if value is not None and key not in known):
        raise RequestError(f"{field}.{unknown[0]:.60}: is not known; leave it out")
    message: Message = {"role": role, "content": _read_content(f"{field}.content", given.get("content"))}
    for key in _TEXTS:
        if given.get(key) is not None:
            if not isinstance(given[key], str):
                raise RequestError(f"{field}.{key}: must be text, not {given[key]!r:.60}")
            message[key] = given[key]
    if not message["content"] and "refusal" in message:
        message["content"] = message["refusal"]
    message.pop("refusal", None)
    calls = _read_calls(field, given, call_format)
    if calls and role != "assistant":
        raise RequestError(f"{field}.tool_calls: only messages of the assistant have calls, not {role!r}")
    if calls:
        message["tool_calls"] = calls
    if given.get("content") is None and not calls and role not in ("assistant", "function"):
        raise RequestError(f"{field}.content: is missing; give text")
    if "tool_call_id" in message:
        message["tool_call_id"] = _call_id(message["tool_call_id"], call_format)
    return message


def _read_content(field: str, content: Any) -> str:
    """Return text, or joined parts of text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{field}: must be text or a list of text parts, not {content!r:.60}")
    if len(content) > _MAX_PARTS:
        raise RequestError(f"{field}: {len(content)} parts are too many; send at most {_MAX_PARTS}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise RequestError(f"{field}[{i}].type: only text is served, not {kind!r:.60}; nothing is fetched")
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise RequestError(f"{field}[{i}].{_TEXT_PARTS[kind]}: must be text, not {text!r:.60}")
        texts.append(text)
    return "\n".join(texts)


def _read_calls(field: str, given: Mapping[str, Any], call_format: CallFormat) -> list[Message]:
    calls = given.get("tool_calls")
    if given.get("function_call") is not None:
        if calls:
            raise RequestError(f"{field}.function_call: cannot be combined with tool_calls; leave it out")
        calls = [{"id": "call_0", "type": "function", "function": given["function_call"]}]
    if calls is None:
        return []
    if not isinstance(calls, (list, tuple)) or len(calls) > MAX_CALLS:
        raise RequestError(f"{field}.tool_calls: must be a list of at most {MAX_CALLS} calls")
    return [_read_call(f"{field}.tool_calls[{i}]", call, call_format) for i, call in enumerate(calls)]


def _read_call(field: str, call: Any, call_format: CallFormat) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise RequestError(f'{field}: must have type "function", and function with name and arguments')
    name, call_id = function.get("name"), call.get("id", "call_0")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{field}.function.name: must be text, not {name!r:.60}")
    if not isinstance(call_id, str):
        raise RequestError(f"{field}.id: must be text, not {call_id!r:.60}")
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{field}.function.arguments: is not valid JSON: {error}") from error
    if _depth_of(arguments) > _MAX_DEPTH:
        raise RequestError(f"{field}.function.arguments: nested too deeply; have at most {_MAX_DEPTH} levels")
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{field}.function.arguments: must be the JSON text of an object, not {arguments!r:.60}")
    return {
        "id": _call_id(call_id, call_format),
        "type": "function",
        "function": {"name": name, "arguments": dict(arguments)},
    }


def _call_id(call_id: str, call_format: CallFormat) -> str:
    """Return the id; for templates that only take short ids, nine characters of its hash."""
    is_short = len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum()
    if not call_format.has_short_ids or is_short:
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:_SHORT_ID]


def _depth_of(value: Any) -> int:
    """Return how deeply JSON objects and lists are nested."""
    depth, level = 0, [value]
    while level := [inner for inner in level if isinstance(inner, (Mapping, list, tuple))]:
        depth += 1
        level = [one for inner in level for one in (inner.values() if isinstance(inner, Mapping) else inner)]
    return depth
