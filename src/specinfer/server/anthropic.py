"""/v1/messages and /v1/messages/count_tokens: Anthropic's API. A request is served as a chat completion.

Fields that Anthropic's API does not have are those of chat completions. Thoughts are not separated from the text, so
`thinking` only has an effect if it is disabled and the chat template can leave thoughts out.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from specinfer.core.errors import RequestError, reworded
from specinfer.inputs.chat.messages import MAX_MESSAGES
from specinfer.server.anthropic_blocks import MessageBlocks
from specinfer.server.call import Call
from specinfer.server.chat import queue_conversation, read_conversation
from specinfer.server.disconnect import until_disconnect
from specinfer.server.field_checks import check_spelling
from specinfer.server.parsed_request import ParsedRoute
from specinfer.server.pending_response import RESPONSES, ItemsResponse, respond
from specinfer.server.protocol import USE_CHAT, ChatFields, Objects, Text, as_fields, check_single
from specinfer.server.responses_fields import Conversation
from specinfer.server.state import state_of

router = APIRouter(route_class=ParsedRoute)
_REFUSED = {
    "container": "nothing is run here; leave it out",
    "logprobs": USE_CHAT,
    "mcp_servers": "no other server is called; run the tools in your program and send tool_result blocks",
    "top_logprobs": USE_CHAT,
}
_SAME = {"model", "max_tokens", "stream", "temperature", "top_p", "top_k"}
_DROPPED = ("thinking", "redacted_thinking")  # blocks of earlier answers that the model does not read again
_MAX_BLOCKS = 4 * MAX_MESSAGES
_SYSTEM = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}
# Names of chat completions that errors begin with, and their names here.
_NAMES = (
    (r"^tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"^tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"^tool_choice\.function", "tool_choice"),
    (r"^response_format", "output_config.format"),
    (r"^stop\b", "stop_sequences"),
    (r"^system\.content", "system"),
    (r"^(messages\[\d+\]\.content\[\d+\])\.arguments", r"\1.input"),
    (r"^(messages\[\d+\]\.content\[\d+\])\.tool_call_id", r"\1.tool_use_id"),
)


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

    def as_chat(self, conversation: Conversation, chat_template: str | None) -> ChatFields:
        """Return the request as one for a chat completion, whose messages are also in `conversation`.

        Raises:
            RequestError: A part of the request is of a kind that is not served; the message names it.
            RequestValidationError: A field of chat completions has a wrong value.
        """
        extra = self.model_extra or {}
        check_spelling(set(extra) - set(ChatFields.model_fields), type(self).model_fields)
        _read_messages(self, conversation)
        same = self.model_dump(include=set(type(self).model_fields) & _SAME, exclude_none=True)
        fields = {"stop": self.stop_sequences} | extra | same | {"messages": conversation.messages}
        if self.tools:
            fields["tools"] = [_chat_tool(i, tool) for i, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            fields |= _chat_choice(self.tool_choice)
        if (self.thinking or {}).get("type") == "disabled":
            if "enable_thinking" in (chat_template or ""):
                fields["chat_template_kwargs"] = {"enable_thinking": False} | (extra.get("chat_template_kwargs") or {})
        else:
            fields["thinking"] = self.thinking  # named among the ignored fields
        config = self.output_config or {}
        if config.get("format") is not None:
            fields["response_format"] = _chat_format(config["format"])
        if isinstance(config.get("effort"), str):
            fields["reasoning_effort"] = config["effort"]
        if conversation.messages and conversation.messages[-1].get("role") == "assistant":  # the answer continues it
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return as_fields(ChatFields, fields)


class MessagesFields(CountFields):
    """The body of a request to /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@router.post("/v1/messages", responses=RESPONSES)
async def create_message(fields: MessagesFields, request: Request) -> Response:
    """Answer a conversation in Anthropic's format."""
    chat, conversation = _as_chat(fields, request)
    headers = chat.check()
    call = Call.of(request, chat)
    return await respond(request, _begin(call, chat, conversation), headers | {"request-id": call.name})


@router.post("/v1/messages/count_tokens")
async def count_tokens(fields: CountFields, request: Request) -> dict[str, int]:
    """Count the prompt tokens of a conversation."""
    chat, conversation = _as_chat(fields, request)
    chat.check()
    call = Call.of(request, chat)
    try:
        read = await until_disconnect(request, call.read(lambda: read_conversation(call.state.engine.llm, chat)))
    except RequestError as error:
        raise _named(error, conversation) from error
    return {"input_tokens": len(read.ids)}


def _as_chat(fields: CountFields, request: Request) -> tuple[ChatFields, Conversation]:
    conversation = Conversation("messages")
    chat = fields.as_chat(conversation, state_of(request).engine.llm.reader.chat_template)
    check_single(chat, _REFUSED)
    return chat, conversation


async def _begin(call: Call, fields: ChatFields, conversation: Conversation) -> ItemsResponse:
    """Read a conversation and queue it.

    Raises:
        RequestError: The conversation cannot be served.
        QueueFullError: The queue has no room for it.
    """
    read, generation = await queue_conversation(
        call, lambda: read_conversation(call.state.engine.llm, fields), lambda error: _named(error, conversation)
    )
    head = {"id": f"msg_{call.name}", "type": "message", "role": "assistant", "model": call.model}
    return ItemsResponse(fields, generation, MessageBlocks(head, generation, fields.max_tokens), read.plan.parser())


def _named(error: RequestError, conversation: Conversation) -> RequestError:
    """Return an error with the names of this API's fields."""
    message = str(conversation.named(error))
    for pattern, name in _NAMES:
        message = re.sub(pattern, name, message)
    return reworded(error, message)


# -------------------------------------------------------------------------------------- reading


def _read_messages(fields: CountFields, conversation: Conversation) -> None:
    # It runs in the event loop: what takes long to convert is refused first.
    num_blocks = sum(len(content) for one in fields.messages if isinstance(content := one.get("content"), list))
    if num_blocks > _MAX_BLOCKS:
        raise RequestError(f"messages: {num_blocks} blocks of content are too many; send at most {_MAX_BLOCKS}")
    if fields.system:
        conversation.add({"role": "system", "content": fields.system}, "system")
    for i, message in enumerate(fields.messages):
        place, role, content = f"messages[{i}]", message.get("role"), message.get("content")
        if not isinstance(content, list):
            conversation.add(message, place)
            continue
        if not content and role != "assistant":
            raise RequestError(f"{place}.content: empty; give text, or at least one block")
        texts: list[Any] = []
        num_before = len(conversation.messages)
        for j, block in enumerate(content):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "tool_result" and role == "user":
                answer = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content", "")}
                conversation.add(answer, f"{place}.content[{j}]")
            elif kind == "tool_use" and role == "assistant":
                if len(conversation.messages) == num_before:
                    conversation.add({"role": "assistant", "content": texts}, place)
                function = {"name": block.get("name"), "arguments": block.get("input")}
                call = {"id": block.get("id"), "type": "function", "function": function}
                conversation.add_call(call, f"{place}.content[{j}]")
            elif kind == "text":
                texts.append(block)
            elif kind not in _DROPPED:
                raise RequestError(f"{place}.content[{j}].type: only text and tools are served, not {kind!r:.60}")
        if texts and (role != "assistant" or len(conversation.messages) == num_before):
            conversation.add(message | {"content": texts}, place)


def _chat_tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(f"tools[{i}].type: no tools are run here, only custom ones; not {tool['type']!r:.60}")
    function = {key: tool.get(key) for key in ("name", "description", "strict")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


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
