"""The fields of requests to /v1/responses, and their conversion to a chat.

Each input item becomes a chat message: thoughts and calls join the message of the assistant, and the outputs of calls
become tool messages. Items that say nothing to the model are skipped. Nothing is stored, so references to stored things
are refused; `store` itself is accepted without effect. Functions within a namespace get names of their own, which are
flat: the namespace, then the function.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from specinfer.core.errors import RequestError
from specinfer.inputs.chat.messages import text_of
from specinfer.server.blocks import unsealed
from specinfer.server.conversations import Conversation
from specinfer.server.field_checks import few
from specinfer.server.protocol import (
    USE_CHAT,
    ChatFields,
    Int,
    Label,
    Objects,
    SharedFields,
    ThinkingBudget,
    check_single,
    row,
)
from specinfer.server.response_format import ignored_keys

_SEARCH = "tool_search"


def flat_name(namespace: Any, name: Any) -> Any:
    """Return the name of a function of a namespace, or of none."""
    if not isinstance(namespace, str) or not isinstance(name, str):
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def flat_tools(tools: Sequence[Any] | None) -> tuple[list[Any], dict[str, dict[str, Any]]]:
    """Return tools without namespaces, and for names among them the fields of the items that report their calls."""
    flat: list[Any] = []
    items: dict[str, dict[str, Any]] = {}
    for namespace, given in _of_namespaces(tools or ()):
        tool, kind = given, given.get("type")
        name = flat_name(namespace, given.get("name"))
        if kind == _SEARCH and given.get("execution") == "client":
            tool, name = given | {"type": "function", "name": _SEARCH}, _SEARCH
            items[name] = {"type": "tool_search_call", "execution": "client"}
        elif isinstance(name, str) and (kind == "custom" or namespace is not None):
            tool = given | {"name": name}
            item = {"type": "custom_tool_call" if kind == "custom" else "function_call", "name": given["name"]}
            items[name] = item | ({} if namespace is None else {"namespace": namespace})
        flat.append(tool)
    return flat, items


def flat_choice(choice: Any) -> Any:
    """Return a choice among tools without namespaces."""
    if not isinstance(choice, dict):
        return choice
    flat = choice | {"name": flat_name(choice.get("namespace"), choice.get("name"))}
    return flat | {"tools": list(map(flat_choice, flat["tools"]))} if isinstance(flat.get("tools"), list) else flat


def added_tools(items: Any) -> list[Any]:
    """Return the tools that items of an input add to those of the request."""
    kinds = ("tool_search_output", "additional_tools")
    of_items = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    lists = [item.get("tools") for item in of_items if item.get("type") in kinds]
    return [tool for tools in lists if isinstance(tools, list) for tool in tools if isinstance(tool, dict)]


def _of_namespaces(tools: Sequence[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each tool with its namespace, if it has one."""
    for tool in tools:
        if tool.get("type") != "namespace":
            yield None, tool
            continue
        inner = tool.get("tools")
        for one in inner if isinstance(inner, list) else ():
            if isinstance(one, dict):
                yield tool.get("name"), one


MAX_ITEMS = 4096
_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_CHOICE = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}], "default": None}
_SEND_ALL = "nothing is stored; send the whole conversation in input"
_REFUSED = {
    "background": "answers are not kept for later; leave it out and wait, or stream",
    "conversation": _SEND_ALL,
    "max_tokens": "use max_output_tokens",
    "previous_response_id": _SEND_ALL,
    "prompt": "no prompts are stored; use instructions and input",
    "response_format": "use text.format",
    "add_special_tokens": "the chat template writes them; leave it out",
}

_REFUSED_ITEMS = {
    "item_reference": "nothing is stored; send the item itself",
    "compaction_trigger": "ask for a summary in a message",
}
# Items of calls that clients carry out, and the field that has what the function was called with.
_CALLS = {
    "function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action", "shell_call": "action",
    "apply_patch_call": "operation", "tool_search_call": "arguments",
}  # fmt: skip
_OUTPUTS = {"tool_search_output", *(f"{kind}_output" for kind in _CALLS)}


class ResponsesFields(SharedFields):
    """The body of a request to /v1/responses."""

    prompt_field = "input"
    input: Annotated[
        Any,
        WithJsonSchema(_INPUT),
        Field(
            description="text, or items: messages, thoughts, calls and their outputs; see "
            "[tools](../tools.md#responses)"
        ),
    ]
    instructions: str | None = None
    max_output_tokens: Int | None = row("as `max_tokens`")
    tools: Objects | None = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = row("`format` as `response_format`; `verbosity` has no effect")
    reasoning: dict[str, Any] | None = None
    thinking_token_budget: ThinkingBudget = None
    include: Annotated[list[Label], Field(max_length=64, fail_fast=True)] | None = row(
        "`reasoning.encrypted_content`, with which a thought can be sent back"
    )
    truncation: Label | None = row("`auto` or `disabled`")
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], few(16)] | None = row(
        "returned; `store` is without effect"
    )
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> dict[str, str]:
        """Check the fields and return the headers that the response gets because of them."""
        check_single(self, _REFUSED | {"top_logprobs": USE_CHAT})
        if self.truncation not in (None, "auto", "disabled"):
            raise RequestError(f"truncation: use auto or disabled, not {self.truncation!r:.60}")
        if "message.output_text.logprobs" in (self.include or ()):
            raise RequestError("include: no log-probabilities here; use /v1/chat/completions")
        return super().check()

    @property
    def prompt_limit(self) -> int | None:
        is_auto = self.truncation == "auto" and self.truncate_prompt_tokens is None
        return -1 if is_auto else self.truncate_prompt_tokens

    @property
    def format(self) -> dict[str, Any]:
        """The "text.format" field, which is the requested format of the response's text."""
        asked = (self.text or {}).get("format")
        if asked is None:
            return {"type": "text"}
        if not isinstance(asked, dict):
            raise RequestError(f'text: format must be an object such as {{"type": "text"}}, not {asked!r:.60}')
        return asked

    def unread_keys(self) -> list[str]:
        """Return the names of keys within fields that have no meaning here."""
        unread = [f"text.{key}" for key in (self.text or {}).keys() - {"format", "verbosity"}]
        unread += [f"reasoning.{key}" for key in (self.reasoning or {}).keys() - {"effort", "summary"}]
        return sorted(unread) + ignored_keys("text.format", self.format)

    def as_chat(self, messages: list[dict[str, Any]], tools: list[Any]) -> ChatFields:
        """Return the request as one for a chat completion. Its values were checked as the fields of this one."""
        changed = {
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "response_format": self.format,
            "structured_outputs": self.constraints,
            "tools": tools or None,
            "tool_choice": flat_choice(self.tool_choice),
            "truncate_prompt_tokens": self.prompt_limit,
        }
        return ChatFields.model_construct(**dict(self) | changed)


# ---------------------------------------------------------------------------------------- input


def read_input(fields: ResponsesFields, conversation: Conversation) -> None:
    """Add instructions and input to a conversation.

    Raises:
        RequestError: An item is of a kind that is not served; the message names it.
    """
    if fields.instructions is not None:
        conversation.add({"role": "system", "content": fields.instructions}, "instructions")
    if isinstance(fields.input, str):
        conversation.add({"role": "user", "content": fields.input}, "input")
        return
    if not isinstance(fields.input, list):
        raise RequestError(f"input: must be text or a list of items, not {fields.input!r:.60}")
    if not fields.input:
        raise RequestError("input: empty; give text, or at least one item")
    if len(fields.input) > MAX_ITEMS:
        raise RequestError(f"input: {len(fields.input)} items are too many; send at most {MAX_ITEMS}")
    for i, item in enumerate(fields.input):
        _add_item(conversation, i, item)


def _add_item(conversation: Conversation, i: int, item: Any) -> None:
    place = f"input[{i}]"
    kind = item.get("type", "message" if "role" in item else None) if isinstance(item, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"{place}: must be an object with a type, not {item!r:.60}")
    if _is_ignored(kind, item):
        conversation.ignored.append(f"input.{kind}")
        return
    if kind in _REFUSED_ITEMS:
        raise RequestError(f"{place}.type: {kind} is not served; {_REFUSED_ITEMS[kind]}")
    if kind == "message":
        if wrong := [key for key in ("tool_calls", "function_call", "tool_call_id") if item.get(key) is not None]:
            raise RequestError(f"{place}.{wrong[0]}: is not known here; calls and outputs are items of their own")
        _add_message(conversation, {key: value for key, value in item.items() if key != "type"}, place)
    elif kind == "agent_message":
        conversation.add({"role": "user", "content": text_of(item.get("content"))}, place)
    elif kind == "reasoning":
        conversation.add({"role": "assistant", "content": None, "reasoning_content": _thought_of(item)}, place)
    elif kind in _CALLS:
        given = item.get(_CALLS[kind])
        name = flat_name(item.get("namespace"), item.get("name") or kind.removesuffix("_call"))
        arguments = {"input": given} if kind == "custom_tool_call" else given
        call = {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}}
        conversation.add_call(call, place)
    elif kind in _OUTPUTS:
        output = item.get("output")
        if kind == "tool_search_output":
            output = "found: " + ", ".join(str(tool.get("name")) for tool in flat_tools(added_tools([item]))[0])
        conversation.add({"role": "tool", "tool_call_id": item.get("call_id"), "content": output}, place)


def _add_message(conversation: Conversation, message: dict[str, Any], place: str) -> None:
    """Add a message; one of the assistant joins the thought before it."""
    last = conversation.messages[-1] if conversation.messages else {}
    if message.get("role") == "assistant" and last.keys() == {"role", "content", "reasoning_content"}:
        message["reasoning_content"] = last["reasoning_content"]
        del conversation.messages[-1], conversation.places[-1]
    conversation.add(message, place)


def _is_ignored(kind: str, item: dict[str, Any]) -> bool:
    """Return whether an item has nothing that the model can read."""
    if kind == "item_reference":  # a thought is not missed
        return str(item.get("id")).startswith("rs_")
    if kind in ("tool_search_call", "tool_search_output") and item.get("execution") == "server":
        return True
    if kind in ("reasoning", "agent_message"):
        return not (_thought_of(item) if kind == "reasoning" else text_of(item.get("content")))
    return kind not in ("message", *_REFUSED_ITEMS, *_CALLS, *_OUTPUTS, "additional_tools")


def _thought_of(item: dict[str, Any]) -> str:
    """Return the thought in an item, or its summary; nothing if another server has encrypted it."""
    return text_of(item.get("content")) or unsealed(item.get("encrypted_content")) or text_of(item.get("summary"))
