"""Forms of a conversation for templates that are stricter than the APIs, whose messages may stand in any order.

For a template without tools, the tools are written into the system message, and calls and results into message texts,
in the format of Hermes. For one that leaves calls out, these are written as a model of its format writes them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specinfer.inputs.chat.messages import THOUGHTS, Message
from specinfer.inputs.formats.calls import (
    BracedArguments,
    CallFormat,
    CallNumber,
    JsonArguments,
    KeywordArguments,
    Label,
    Name,
    Part,
    TaggedArguments,
)

_SYSTEM = ("system", "developer")
_INSTRUCTIONS = """You may call functions to help with the user's request. The functions, as JSON:

<tools>
{tools}
</tools>

To call one, write this and nothing after it, with the function's name and its arguments as a JSON object:

<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""
_EMPTY = " "  # some templates refuse an answer without any character


def forms_of(messages: list[Message], *, needs_objects: bool) -> Iterator[list[Message]]:
    """Yield the messages as they are, and then forms that more templates take. Each makes the changes of those before.

    The system's messages become one at the start. Thoughts, and arguments that are no object, are dropped. Each call
    has a message of its own. Messages of the user, among them the system's, and answers take turns.

    Args:
        needs_objects: Whether arguments of calls must be objects.
    """
    yield messages
    one_system = _with_one_system(messages)
    yield one_system
    plain = [_plain(message, needs_objects) for message in one_system]
    yield plain
    single = [part for message in plain for part in _with_single_calls(message)]
    yield single
    yield _alternating(single)


def system_texts(messages: Sequence[Message]) -> list[str]:
    """Return the texts of the system's messages."""
    return [message["content"] for message in messages if message["role"] in _SYSTEM and message["content"]]


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    role = next((message["role"] for message in messages if message["role"] in _SYSTEM), None)
    others = [message for message in messages if message["role"] not in _SYSTEM]
    return others if role is None else [{"role": role, "content": "\n\n".join(system_texts(messages))}, *others]


def _plain(message: Message, needs_objects: bool) -> Message:
    plain = {key: value for key, value in message.items() if key not in THOUGHTS}
    if "tool_calls" in message and needs_objects:
        functions = [call["function"] for call in message["tool_calls"]]
        objects = [
            function if isinstance(function["arguments"], Mapping) else function | {"arguments": {}}
            for function in functions
        ]
        pairs = zip(message["tool_calls"], objects, strict=True)
        plain["tool_calls"] = [call | {"function": function} for call, function in pairs]
    return plain


def _with_single_calls(message: Message) -> list[Message]:
    calls = message.get("tool_calls", [])
    rest = [message | {"content": "", "tool_calls": [call]} for call in calls[1:]]
    return [message | {"tool_calls": calls[:1]} if rest else message, *rest]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Return messages of which neighbours of one role are joined, with empty ones where a turn is missing."""
    turns: list[Message] = []
    turn = "assistant"  # whose turn was the last one; calls are no turns
    for message in messages:
        added = message | {"role": "user"} if message["role"] in _SYSTEM else message
        role, is_turn = added["role"], added["role"] != "tool" and "tool_calls" not in added
        if turns and turns[-1]["role"] == role != "tool" and "tool_calls" not in turns[-1]:
            texts = (turns[-1]["content"], added["content"])
            turns[-1] = added | {"content": "\n\n".join(filter(None, texts))}
            turn = turn if is_turn else "user"
            continue
        if is_turn and role == turn:
            turns.append({"role": "assistant" if role == "user" else "user", "content": _EMPTY})
        turns.append(added)
        turn = role if is_turn else turn
    return turns


def add_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """Return a conversation for a template that does not know tools."""
    result = [
        {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if message["role"] == "tool"
        else message
        for message in messages
    ]
    if not tools:
        return result
    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = result[0]
    if first["role"] == "system":
        result[0] = first | {"content": f"{first['content']}\n\n{text}".lstrip()}
    else:
        result.insert(0, {"role": "system", "content": text})
    return result


def as_written(message: Message, call_format: CallFormat) -> Message:
    """Return a message with its calls as the template takes them: as text of the content if it leaves calls out."""
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    if call_format.writes_calls and call_format.is_native:
        if not call_format.has_text_arguments:
            return message
        texts = [function | {"arguments": _as_text(function["arguments"])} for function in functions]
        calls = zip(message["tool_calls"], texts, strict=True)
        return message | {"tool_calls": [call | {"function": function} for call, function in calls]}
    text = written_calls(call_format, [(function["name"], function["arguments"]) for function in functions])
    content = f"{message['content']}\n{text}" if message["content"] else text
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _as_text(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def written_calls(style: CallFormat, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
    """Return calls, each a name and its arguments, as a model of this format writes them; text stays as it is."""
    texts = [
        "".join(_written_part(part, name, arguments, i) for part in style.call)
        for i, (name, arguments) in enumerate(calls)
    ]
    between = "".join(style.between) or ("" if style.begin else "\n")
    return "".join(style.begin) + between.join(texts) + "".join(style.end)


def _written_part(part: Part, name: str, arguments: Mapping[str, Any] | str, number: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Name):
        return json.dumps(name, ensure_ascii=False) if part.is_quoted else name
    if isinstance(part, (CallNumber, Label)):
        return f'"{number}"' if isinstance(part, Label) and part.is_quoted else str(number)
    if isinstance(arguments, str):
        return arguments
    if isinstance(part, JsonArguments):
        return json.dumps(arguments, ensure_ascii=False)
    if isinstance(part, TaggedArguments):
        return "".join(_written_value(part, key, value) for key, value in arguments.items())
    if isinstance(part, KeywordArguments):
        return f"({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
    return _braced(arguments, part)


def _written_value(tags: TaggedArguments, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    after = tags.after_key if is_text or not tags.after_key_of_json else tags.after_key_of_json
    text = value if is_text else json.dumps(value, ensure_ascii=False)
    line = "\n" if tags.has_lines else ""
    separator = " " if tags.after_key_of_json else ""
    return f"{tags.before_key}{key}{separator.join(after)}{line}{text}{line}{tags.after_value}\n"


def _python(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_python(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    words = {True: "True", False: "False", None: "None"}
    return words[value] if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _braced(value: Any, part: BracedArguments) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_braced(inner, part)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(_braced(inner, part) for inner in value)}]"
    return f"{part.quote}{value}{part.quote}" if isinstance(value, str) else json.dumps(value)
