"""/v1/messages and /v1/messages/count_tokens: Anthropic's API. A request is served as a chat completion.

Fields that Anthropic's API does not have are those of chat completions. Thoughts are not separated from the text, so
`thinking` only has an effect if it is disabled and the chat template can leave thoughts out.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from specinfer.core.errors import RequestError
from specinfer.core.outputs import TextChunk
from specinfer.generation import Generation
from specinfer.server.chat import read_conversation
from specinfer.server.dialect import ANTHROPIC
from specinfer.server.disconnect import until_disconnect
from specinfer.server.errors import ApiError
from specinfer.server.generations import Call
from specinfer.server.pending_response import RESPONSES, ItemsResponse, respond
from specinfer.server.protocol import USE_CHAT, ChatFields, Objects, Text, as_fields, check_single, check_spelling
from specinfer.server.responses_fields import Conversation
from specinfer.server.state import state_of
from specinfer.server.tools import ToolDelta
from specinfer.server.usage import metrics_of, usage_of

router = APIRouter()
_REFUSED = {
    "container": "nothing is run here; leave it out",
    "logprobs": USE_CHAT,
    "mcp_servers": "no other server is called; run the tools in your program and send tool_result blocks",
    "top_logprobs": USE_CHAT,
}
_SAME = {"model", "max_tokens", "stream", "temperature", "top_p", "top_k"}
_DROPPED = ("thinking", "redacted_thinking")  # blocks of earlier answers that the model does not read again
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
    engine = call.state.engine
    try:
        work = engine.read(lambda: read_conversation(engine.llm, chat), call.tenant)
        read = await until_disconnect(request, work)
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
    engine = call.state.engine
    try:
        read = await engine.read(lambda: read_conversation(engine.llm, fields), call.tenant)
        generation = await call.submit_one(read.ids, read.params)
    except RequestError as error:
        raise _named(error, conversation) from error
    head = {"id": f"msg_{call.name}", "type": "message", "role": "assistant", "model": call.model}
    return ItemsResponse(fields, generation, _Blocks(head, generation, fields.max_tokens), read.plan.parser())


def _named(error: RequestError, conversation: Conversation) -> RequestError:
    """Return an error with the names of this API's fields."""
    message = str(conversation.named(error))
    for pattern, name in _NAMES:
        message = re.sub(pattern, name, message)
    return type(error)(message)


# -------------------------------------------------------------------------------------- reading


def _read_messages(fields: CountFields, conversation: Conversation) -> None:
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


# -------------------------------------------------------------------------------------- writing


class _Blocks:
    """The content blocks of one message.

    Args:
        head: The fields that are known from the start.
        max_tokens: The limit that the request asked for.
    """

    def __init__(self, head: dict[str, Any], generation: Generation, max_tokens: int | None) -> None:
        self._head, self._generation, self._max_tokens = head, generation, max_tokens
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []  # the parts of each block's text, or of its input's JSON
        self._open: int | None = None  # the index of the call that the open block is, -1 for text, None for no block

    def begin(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self.whole()}]

    def push(self, deltas: Sequence[ToolDelta], chunk: TextChunk) -> list[dict[str, Any]]:
        events = []
        for delta in deltas:
            text = delta.content if delta.index is None else delta.arguments
            index = -1 if delta.index is None else delta.index
            if index != self._open and (text or delta.index is not None):
                events += [*self._close(), self._begin_block(delta, index)]
            if text:
                self._texts[-1].append(text)
                part = {"type": "text_delta", "text": text}
                if delta.index is not None:
                    part = {"type": "input_json_delta", "partial_json": text}
                events.append({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": part})
        return events

    def finish(self, chunk: TextChunk) -> list[dict[str, Any]]:
        events = self._close()
        self._end["stop_reason"] = self._reason(chunk)
        if self._end["stop_reason"] == "stop_sequence":
            self._end["stop_sequence"] = chunk.stop_reason
        metrics = metrics_of([self._generation])
        self._head["metrics"] = metrics
        last = {"type": "message_delta", "delta": dict(self._end), "usage": self._usage(), "metrics": metrics}
        return [*events, last, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        return [ANTHROPIC.error(error)]

    def whole(self) -> dict[str, Any]:
        content = []
        for block, parts in zip(self._blocks, self._texts, strict=True):
            text = "".join(parts)
            content.append(block | ({"text": text} if block["type"] == "text" else {"input": read_object(text)}))
        return self._head | {"content": content} | self._end | {"usage": self._usage()}

    def _begin_block(self, delta: ToolDelta, index: int) -> dict[str, Any]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if delta.index is not None:
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
        self._open = index
        self._blocks.append(block)
        self._texts.append([])
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _reason(self, chunk: TextChunk) -> str:
        if chunk.finish_reason == "length":
            num_tokens = self._generation.requests[0].num_output
            is_asked = self._max_tokens is not None and num_tokens >= self._max_tokens
            return "max_tokens" if is_asked else "model_context_window_exceeded"
        if any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use"
        return "stop_sequence" if isinstance(chunk.stop_reason, str) else "end_turn"

    def _usage(self) -> dict[str, Any]:
        usage = usage_of([self._generation])
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
        }


def read_object(text: str) -> dict[str, Any]:
    """Return the arguments of a call; {} if the call was cut off."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
