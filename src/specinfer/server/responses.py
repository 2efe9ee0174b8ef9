"""/v1/responses: OpenAI's newer endpoint, for text and function calls. Nothing is stored between requests."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from specinfer.core.sampling import SamplingParams
from specinfer.server.call import Call
from specinfer.server.conversations import Conversation, ReadConversation, queue_conversation, read_conversation
from specinfer.server.errors import ApiError
from specinfer.server.json_body import ParsedRoute
from specinfer.server.pending_response import RESPONSES, PendingResponse, respond
from specinfer.server.responses_fields import ResponsesFields, added_tools, flat_tools, read_input
from specinfer.server.responses_items import ResponseItems
from specinfer.server.stream import until_disconnect

router = APIRouter(route_class=ParsedRoute)


@router.post("/v1/responses", responses=RESPONSES)
async def create_response(fields: ResponsesFields, request: Request) -> Response:
    """Answer an input. Nothing is stored: to continue, the client sends the whole conversation again."""
    headers = fields.check()
    call, read = _call(request, fields)
    return await respond(request, _begin(call, fields, read), headers)


@router.post("/v1/responses/input_tokens")
async def count_tokens(fields: ResponsesFields, request: Request) -> dict[str, Any]:
    """Count the tokens of an input."""
    fields.check()
    call, read = _call(request, fields)
    conversation = await until_disconnect(request, call.read(read))
    return {"object": "response.input_tokens", "input_tokens": len(conversation.ids)}


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact() -> Response:
    """Answer as under a path that is not known; otherwise the path of a response would name its methods."""
    raise HTTPException(404)


@router.get("/v1/responses/{response_id}")
@router.delete("/v1/responses/{response_id}")
@router.get("/v1/responses/{response_id}/input_items")
@router.post("/v1/responses/{response_id}/cancel")
async def find_response(response_id: str) -> Response:
    """Answer that the response was not found: none is stored."""
    message = f"Response with id {response_id!r:.80} not found: nothing is stored here."
    raise ApiError("not_found", message, param="response_id")


async def _begin(call: Call, fields: ResponsesFields, read: Callable[[], ReadConversation]) -> PendingResponse:
    """Read a request and queue it."""
    conversation, generation = await queue_conversation(call, read)
    items = ResponseItems(
        call.name,
        _head(call, fields, conversation.params),
        generation,
        conversation.blocks(),
        conversation.calls,
        has_summaries=(fields.reasoning or {}).get("summary") not in (None, "none"),
        seals="reasoning.encrypted_content" in (fields.include or ()),
    )
    return PendingResponse(fields, [generation], items, conversation.ignored, items.fail)


def _call(request: Request, fields: ResponsesFields) -> tuple[Call, Callable[[], ReadConversation]]:
    """Return a request as a call, and a function that reads its conversation."""
    conversation = Conversation("input")

    def read() -> ReadConversation:
        read_input(fields, conversation)
        tools, calls = flat_tools([*(fields.tools or ()), *added_tools(fields.input)])
        asked = read_conversation(call.state.engine.llm, fields.as_chat(conversation.messages, tools))
        names = [re.sub("^messages", conversation.name, name) for name in asked.ignored]
        ignored = [*fields.unread_keys(), *dict.fromkeys(conversation.ignored), *names]
        return replace(asked, ignored=ignored, calls=calls)

    call = Call.from_request(request, fields, conversation.named)
    return call, read


def _head(call: Call, fields: ResponsesFields, params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a response that are known from its start."""
    nothing = {"description": None, "strict": None, "parameters": None}
    tools = [nothing | tool if tool.get("type") == "function" else tool for tool in fields.tools or ()]
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
        "reasoning": {name: (fields.reasoning or {}).get(name) for name in ("effort", "summary")},
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
