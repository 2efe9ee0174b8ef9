"""/v1/responses: OpenAI's newer endpoint, for text and function calls. Nothing is stored between requests."""

import re
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from specinfer.core.errors import RequestError, reworded
from specinfer.core.sampling import SamplingParams
from specinfer.llm import LLM
from specinfer.server.call import Call
from specinfer.server.chat import ReadConversation
from specinfer.server.errors import ApiError
from specinfer.server.parameters import sampling_params, truncated
from specinfer.server.parsed_request import ParsedRoute
from specinfer.server.pending_response import RESPONSES, ItemsResponse, respond
from specinfer.server.responses_fields import Conversation, ResponsesFields, chat_tool_choice, chat_tools
from specinfer.server.responses_items import ResponseItems
from specinfer.server.tools import plan_tools

router = APIRouter(route_class=ParsedRoute)


@router.post("/v1/responses", responses=RESPONSES)
async def create_response(fields: ResponsesFields, request: Request) -> Response:
    """Answer an input. Nothing is stored: to continue, the client sends the whole conversation again."""
    headers = fields.check()
    return await respond(request, _begin(Call.of(request, fields), fields), headers)


@router.get("/v1/responses/{response_id}")
@router.delete("/v1/responses/{response_id}")
@router.get("/v1/responses/{response_id}/input_items")
@router.post("/v1/responses/{response_id}/cancel")
async def find_response(response_id: str) -> Response:
    """Answer that the response was not found: none is stored."""
    message = f"Response with id {response_id!r:.80} not found: nothing is stored here."
    raise ApiError(404, message, param="response_id", code="not_found")


async def _begin(call: Call, fields: ResponsesFields) -> ItemsResponse:
    """Read a request and queue it.

    Raises:
        RequestError: The request cannot be served.
        QueueFullError: The queue has no room for it.
    """
    try:
        read = await call.read(lambda: _read(call.state.engine.llm, fields))
        (generation,) = await call.submit([(read.ids, read.params)], read.plan.reasoning)
    except RequestError as error:
        raise reworded(error, re.sub(r"\bmax_tokens\b", "max_output_tokens", str(error))) from error
    items = ResponseItems(call.name, _head(call, fields, read.params), generation)
    return ItemsResponse(fields, generation, items, read.plan.parser())


def _read(llm: LLM, fields: ResponsesFields) -> ReadConversation:
    """Render and check a request; runs in the thread that may use the tokenizer."""
    reader, conversation = llm.reader, Conversation.of(fields)
    try:
        plan = plan_tools(
            chat_tools(fields.tools),
            chat_tool_choice(fields.tool_choice),
            fields.parallel_tool_calls,
            reader.call_format,
            reasoning_format=reader.reasoning_format,
            special_tokens=reader.special_tokens,
        )
    except RequestError as error:  # this endpoint's tools have no "function" level
        raise RequestError(str(error).replace("].function.", "].")) from error
    params = sampling_params(
        fields,
        llm.target.loaded.sampling_defaults,
        max_tokens=fields.max_output_tokens,
        structured_outputs=plan.combined(fields.structured_outputs_params()),
        shows_special_tokens=plan.shows_special_tokens,
    )
    kwargs = dict(fields.chat_template_kwargs or {})
    effort = (fields.reasoning or {}).get("effort")
    if isinstance(effort, str) and "reasoning_effort" in (reader.chat_template or ""):
        kwargs.setdefault("reasoning_effort", effort)
    try:
        ids = reader.read_chat(conversation.messages, tools=plan.tools_for_template, template_kwargs=kwargs or None)
    except RequestError as error:
        raise conversation.named(error) from error
    plan = plan.thinking(reader.reasoning_of(ids))
    return ReadConversation(truncated(ids, fields, llm.max_model_len, fields.max_output_tokens), params, plan)


def _head(call: Call, fields: ResponsesFields, params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a response that are known from its start."""
    tools = [{"description": None, "strict": None, "parameters": None} | tool for tool in fields.tools or ()]
    return {
        "id": f"resp_{call.name}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "model": call.model,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (fields.reasoning or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": fields.format},
        "tool_choice": fields.tool_choice or "auto",
        "tools": tools,
        "top_p": params.top_p,
        "truncation": fields.truncation or "disabled",
        "metadata": fields.metadata or {},
        "usage": None,
    }
