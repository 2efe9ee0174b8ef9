"""Messages of Anthropic's API, converted to messages of chat completions.

The model reads text only. A block of another kind becomes the text of its fields, and an image, which has none, a note
that it is not shown. Only the newest message of the user is refused for one: its answer would be about what the model
has not seen. Calls and results of tools that Anthropic runs become calls and results like any others.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.inputs.chat.messages import MAX_MESSAGES
from specinfer.server.responses_fields import Conversation
from specinfer.server.responses_items import unsealed

NOT_SHOWN = "[{}: not shown, this model reads text only]"
_THOUGHTS = ("thinking", "redacted_thinking")
_MAX_BLOCKS = 4 * MAX_MESSAGES
_PRIVATE = "x-anthropic-billing-header"  # begins a system block that differs in each session, for Anthropic alone
# Fields that are not for the model, and fields whose name need not stand before their text.
_HIDDEN = {"cache_control", "caller", "citations", "id", "is_error", "media_type", "signature", "tool_use_id", "type"}
_PLAIN = {"content", "context", "data", "source", "text", "title", "tool_name"}
_UNREADABLE = re.compile(r"(input_)?(image|audio|video|file)(_|$)")


def add_messages(conversation: Conversation, system: Any, messages: list[dict[str, Any]]) -> None:
    """Add a system text and messages to a conversation; runs in the event loop.

    Raises:
        RequestError: There are too many blocks, a message is empty, or the model cannot read the newest one.
    """
    num_blocks = sum(len(content) for one in messages if isinstance(content := one.get("content"), list))
    if num_blocks > _MAX_BLOCKS:
        raise RequestError(f"messages: {num_blocks} blocks of content are too many; send at most {_MAX_BLOCKS}")
    if isinstance(system, list):
        system = [part for block in system if not (part := _part(block)).get("text", "").startswith(_PRIVATE)]
    if system:
        conversation.add({"role": "system", "content": system}, "system")
    for i, message in enumerate(messages):
        place, role, content = f"messages[{i}]", message.get("role"), message.get("content")
        blocks = [content] if isinstance(content, dict) else content
        if not isinstance(blocks, list):
            conversation.add({"role": role, "content": blocks}, place)
        elif role == "assistant":
            _add_answer(conversation, blocks, place, is_last=i == len(messages) - 1)
        elif not blocks:
            raise RequestError(f"{place}.content: empty; give text, or at least one block")
        else:
            _add_question(conversation, role, blocks, place, is_last=i == len(messages) - 1)


def _add_answer(conversation: Conversation, blocks: list[Any], place: str, *, is_last: bool) -> None:
    answer: dict[str, Any] | None = None  # the message that blocks are added to
    for j, block in enumerate(blocks):
        kind, at = _kind(block), f"{place}.content[{j}]"
        if kind.endswith("tool_result"):
            _add_result(conversation, block, at)
            answer = None
            continue
        if answer is None:
            answer = {"role": "assistant", "content": []}
            conversation.add(answer, place)
        if kind in _THOUGHTS:
            if thought := _text(block.get("thinking")) or unsealed(block.get("signature")):
                answer["reasoning_content"] = "\n".join(filter(None, (answer.get("reasoning_content"), thought)))
        elif kind.endswith("tool_use"):
            arguments = {} if block.get("input") is None else block["input"]
            function = {"name": block.get("name"), "arguments": arguments}
            conversation.add_call({"id": block.get("id"), "type": "function", "function": function}, at)
        else:
            answer["content"].append(_part(block))
    has_text = answer is not None and any(part["text"] for part in answer["content"])
    if is_last and answer is not None and not has_text and "tool_calls" not in answer:
        conversation.messages.pop(), conversation.places.pop()  # an answer of thoughts alone cannot be continued


def _add_question(conversation: Conversation, role: Any, blocks: list[Any], place: str, *, is_last: bool) -> None:
    parts = []
    for j, block in enumerate(blocks):
        kind, at = _kind(block), f"{place}.content[{j}]"
        if kind.endswith("tool_result"):
            _add_result(conversation, block, at)
        elif is_last and _is_unreadable(block):
            raise RequestError(f"{at}.type: only text is served, not {kind!r:.60}; nothing is fetched")
        elif kind not in _THOUGHTS:
            parts.append(_part(block))
    if parts:
        conversation.add({"role": role, "content": parts}, place)


def _add_result(conversation: Conversation, block: dict[str, Any], place: str) -> None:
    content = block.get("content")
    parts = [_part(part) for part in content] if isinstance(content, list) else _text(content)
    conversation.add({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": parts}, place)


# ------------------------------------------------------------------------------------------ blocks


def _kind(block: Any) -> str:
    return str(block.get("type")) if isinstance(block, dict) else ""


def _part(block: Any) -> dict[str, Any]:
    """Return a block as a part of text."""
    is_text = _kind(block) == "text" and isinstance(block.get("text"), str)
    return {"type": "text", "text": block["text"] if is_text else _text(block)}


def _text(value: Any) -> str:
    """Return what a model can read of a value: text, or that of each field of an object in a line of its own."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(_text, value)))
    if not isinstance(value, Mapping):
        return "" if value is None else json.dumps(value)
    if _is_unreadable(value):
        return NOT_SHOWN.format(_kind(value)[:60])
    texts = {key: _text(one) for key, one in value.items() if key not in _HIDDEN and not key.startswith("encrypted")}
    return "\n".join(text if key in _PLAIN else f"{key}: {text}" for key, text in texts.items() if text)


def _is_unreadable(block: Any) -> bool:
    """Return whether a block has data or an address instead of text."""
    if not isinstance(block, Mapping):
        return False
    source = block.get("source")
    is_textual = not isinstance(source, Mapping) or source.get("type") in ("text", "content")
    return not is_textual or "file_id" in block or _UNREADABLE.match(_kind(block)) is not None
