"""Forms of a conversation for templates that are stricter than the APIs, whose messages may stand in any order."""

from collections.abc import Iterator, Mapping, Sequence

from specinfer.inputs.chat.messages import THOUGHTS, Message

_SYSTEM = ("system", "developer")
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
    found: list[Message] = []
    turn = "assistant"  # whose turn was the last one; calls are no turns
    for message in messages:
        added = message | {"role": "user"} if message["role"] in _SYSTEM else message
        role, is_turn = added["role"], added["role"] != "tool" and "tool_calls" not in added
        if found and found[-1]["role"] == role != "tool" and "tool_calls" not in found[-1]:
            texts = (found[-1]["content"], added["content"])
            found[-1] = added | {"content": "\n\n".join(filter(None, texts))}
            turn = turn if is_turn else "user"
            continue
        if is_turn and role == turn:
            found.append({"role": "assistant" if role == "user" else "user", "content": _EMPTY})
        found.append(added)
        turn = role if is_turn else turn
    return found
