"""/v1/messages and /v1/messages/count_tokens: Anthropic's API. A request is served as a chat completion.

Fields that Anthropic's API does not have are those of chat completions. Tools that Anthropic runs, and what only its
own service can do, are skipped and named in the header of ignored fields. Blocks of messages stay as they are, since
the reader of messages knows them; calls and results become those of chat completions.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from specinfer.core.errors import RequestError
from specinfer.inputs.chat.messages import MAX_MESSAGES
from specinfer.inputs.prompts import PromptReader
from specinfer.server.anthropic_blocks import MessageBlocks
from specinfer.server.blocks import unsealed
from specinfer.server.call import Call
from specinfer.server.conversations import Conversation, queue_conversation, read_conversation
from specinfer.server.json_body import ParsedRoute
from specinfer.server.pending_response import RESPONSES, PendingResponse, respond
from specinfer.server.protocol import USE_CHAT, ChatFields, Float, Int, Objects, Text, as_fields, check_single
from specinfer.server.state import state_of
from specinfer.server.stream import until_disconnect

router = APIRouter(route_class=ParsedRoute)
_REFUSED = {"logprobs": USE_CHAT, "top_logprobs": USE_CHAT}
_SAME = {"model", "max_tokens", "stream", "temperature", "top_p", "top_k"}
_OF_CLIENTS = (None, "custom", "function")  # types of tools that are not defined by Anthropic
_TOOL_FIELDS = {"description", "input_schema", "name", "strict", "type"}
_SYSTEM = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}


class CountFields(BaseModel):
    """The body of a request to /v1/messages/count_tokens."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str | None = None
    messages: Objects
    system: Annotated[Any, WithJsonSchema(_SYSTEM)] = None
    stop_sequences: Annotated[list[Text], Field(max_length=64, fail_fast=True)] | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format

    def as_chat(self, conversation: Conversation, reader: PromptReader) -> ChatFields:
        """Return the request as one for a chat completion, whose messages are also in `conversation`."""
        extra = self.model_extra or {}
        add_messages(conversation, self.system, self.messages)
        same = self.model_dump(include=set(type(self).model_fields) & _SAME, exclude_none=True)
        fields = {"stop": self.stop_sequences} | extra | same | {"messages": conversation.messages}
        if same.get("max_tokens") == 0:
            fields["max_tokens"] = 1  # the engine generates at least one token, which is not shown
        if self.tools:
            fields |= {"tools": list(map(_chat_tool, self.tools))} | dict.fromkeys(_ignored_of(self.tools), True)
        if self.tool_choice is not None:
            fields |= _chat_choice(self.tool_choice)
        config = self.output_config or {}
        if (wanted := config.get("format", self.output_format)) is not None:
            fields["response_format"] = _chat_format(wanted)
        fields |= self._thinking(reader, config.get("effort"))
        if conversation.messages and conversation.messages[-1].get("role") == "assistant":  # the answer continues it
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return as_fields(ChatFields, fields)

    def _thinking(self, reader: PromptReader, effort: Any) -> dict[str, Any]:
        asked = self.thinking or {}
        is_on = {"enabled": True, "adaptive": True, "disabled": False}.get(str(asked.get("type")))
        fields = {"enable_thinking": is_on, "reasoning_effort": effort if isinstance(effort, str) else None}
        if reader.reasoning_format is None:
            return fields | ({} if is_on is False else {"thinking": self.thinking})  # named among the ignored fields
        if is_on and isinstance(asked.get("budget_tokens"), int):
            fields["thinking_token_budget"] = asked["budget_tokens"]
        return fields


class MessagesFields(CountFields):
    """The body of a request to /v1/messages."""

    max_tokens: Annotated[Int, Field(ge=0)]
    stream: bool | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None


@router.post("/v1/messages", responses=RESPONSES)
async def create_message(fields: MessagesFields, request: Request) -> Response:
    """Answer a conversation in Anthropic's format."""
    call, chat, headers = _call(request, fields)
    return await respond(request, _begin(call, chat, fields), headers | {"request-id": call.name})


@router.post("/v1/messages/count_tokens")
async def count_tokens(fields: CountFields, request: Request) -> dict[str, int]:
    """Count the prompt tokens of a conversation."""
    call, chat, _ = _call(request, fields)
    read = await until_disconnect(request, call.read(lambda: read_conversation(call.state.engine.llm, chat)))
    return {"input_tokens": len(read.ids)}


def _call(request: Request, fields: CountFields) -> tuple[Call, ChatFields, dict[str, str]]:
    """Return a request as a call, its fields as those of a chat, and headers of its response."""
    conversation = Conversation("messages")
    chat = fields.as_chat(conversation, state_of(request).engine.llm.reader)
    check_single(chat, _REFUSED)
    headers = chat.check()
    return Call.from_request(request, chat, conversation.named), chat, headers


async def _begin(call: Call, chat: ChatFields, fields: MessagesFields) -> PendingResponse:
    """Read a conversation and queue it."""
    read, generation = await queue_conversation(call, lambda: read_conversation(call.state.engine.llm, chat))
    head = {"id": f"msg_{call.name}", "type": "message", "role": "assistant", "model": call.model}
    blocks = MessageBlocks(
        head,
        generation,
        read.blocks(),
        fields.max_tokens,
        thinks=read.plan.reasoning is not None,
        omits_thoughts=(fields.thinking or {}).get("display") == "omitted",
    )
    return PendingResponse(chat, [generation], blocks, read.ignored)


# -------------------------------------------------------------------------------------- reading


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the format of chat completions; one that Anthropic defines has only its type."""
    if tool.get("type") not in _OF_CLIENTS:
        return {"type": tool["type"]}
    function = {key: tool.get(key) for key in ("name", "description", "strict")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _ignored_of(tools: list[dict[str, Any]]) -> set[str]:
    keys = {key for tool in tools if tool.get("type") in _OF_CLIENTS for key in tool.keys() - _TOOL_FIELDS}
    return {f"tools.{key}" for key in keys}


def _chat_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    modes: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}
    modes["tool"] = {"type": "function", "function": {"name": choice.get("name")}}
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in modes:
        raise RequestError(f"tool_choice.type: use {', '.join(modes)}, not {kind!r:.60}")
    return {"tool_choice": modes[kind], "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True}


def _chat_format(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") != "json_schema" or given.get("schema") is None:
        raise RequestError(f'output_config.format: must be {{"type": "json_schema", "schema": ...}}, not {given!r:.60}')
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


_THOUGHTS = ("thinking", "redacted_thinking")
_MAX_BLOCKS = 4 * MAX_MESSAGES
_PRIVATE = "x-anthropic-billing-header"  # begins a system block that differs in each session, for Anthropic alone


def add_messages(conversation: Conversation, system: Any, messages: list[dict[str, Any]]) -> None:
    """Add a system text and messages to a conversation; runs in the event loop."""
    num_blocks = sum(len(content) for message in messages if isinstance(content := message.get("content"), list))
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
