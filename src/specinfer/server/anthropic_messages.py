"""Messages of Anthropic's API, converted to messages of chat completions.

Blocks stay as they are, since the reader of messages knows them. Calls and results become those of chat completions,
also those of tools that Anthropic runs.
"""

from typing import Any

from specinfer.core.errors import RequestError
from specinfer.inputs.chat.messages import MAX_MESSAGES
from specinfer.server.blocks import unsealed
from specinfer.server.conversations import Conversation

_THOUGHTS = ("thinking", "redacted_thinking")
_MAX_BLOCKS = 4 * MAX_MESSAGES
_PRIVATE = "x-anthropic-billing-header"  # begins a system block that differs in each session, for Anthropic alone


def add_messages(conversation: Conversation, system: Any, messages: list[dict[str, Any]]) -> None:
    """Add a system text and messages to a conversation; runs in the event loop."""
    num_blocks = sum(len(content) for one in messages if isinstance(content := one.get("content"), list))
    if num_blocks > _MAX_BLOCKS:
        raise RequestError(f"messages: {num_blocks} blocks of content are too many; send at most {_MAX_BLOCKS}")
    if isinstance(system, list):
        system = [block for block in system if not str(_field(block, "text")).startswith(_PRIVATE)]
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
            others = [block for j, block in enumerate(blocks) if not _add_result(conversation, block, place, j)]
            if others:
                conversation.add({"role": role, "content": others}, place)


def _add_answer(conversation: Conversation, blocks: list[Any], place: str, *, is_last: bool) -> None:
    answer: dict[str, Any] | None = None  # the message that blocks are added to
    for j, block in enumerate(blocks):
        kind = str(_field(block, "type"))
        if _add_result(conversation, block, place, j):
            answer = None
            continue
        if answer is None:
            answer = {"role": "assistant", "content": []}
            conversation.add(answer, place)
        if kind.endswith("tool_use"):
            function = {"name": block.get("name"), "arguments": block.get("input")}
            conversation.add_call({"id": block.get("id"), "function": function}, f"{place}.content[{j}]")
        elif kind == "thinking" and not block.get("thinking"):
            answer["content"].append({"type": kind, "thinking": unsealed(block.get("signature"))})
        else:
            answer["content"].append(block)
    if is_last and answer is not None and "tool_calls" not in answer:
        has_text = any(_field(one, "type") not in _THOUGHTS and _field(one, "text") != "" for one in answer["content"])
        if not has_text:  # an answer of thoughts alone cannot be continued
            conversation.messages.pop(), conversation.places.pop()


def _add_result(conversation: Conversation, block: Any, place: str, j: int) -> bool:
    """Add the result of a tool, and return whether the block was one."""
    is_result = str(_field(block, "type")).endswith("tool_result")
    if is_result:
        answer = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
        conversation.add(answer, f"{place}.content[{j}]")
    return is_result


def _field(block: Any, name: str) -> Any:
    return block.get(name) if isinstance(block, dict) else None
