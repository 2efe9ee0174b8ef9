"""/api/generate, /api/chat and the other paths of Ollama's API. Requests are served as completions of OpenAI's API.

Streams are lines of JSON. There is one model, which stays loaded as long as the server runs: what would load, change or
remove models is refused. Fields that Ollama does not have are those of the completion endpoints.
"""

import time
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from specinfer.core.errors import RequestError
from specinfer.server.call import Call
from specinfer.server.completions import completion_params, read_prompt
from specinfer.server.conversations import ReadConversation, queue_conversation, read_conversation, read_newest
from specinfer.server.dialects import OPTIONS
from specinfer.server.errors import unsupported
from specinfer.server.json_body import ParsedRoute
from specinfer.server.logprobs import TokenTexts
from specinfer.server.ollama_pieces import Pieces, formatted
from specinfer.server.pending_response import RESPONSES, PendingResponse, respond
from specinfer.server.protocol import (
    ChatFields,
    CompletionFields,
    Count,
    Float,
    Int,
    Objects,
    Text,
    as_fields,
    check_single,
)
from specinfer.server.state import state_of
from specinfer.server.tools import ToolPlan

router = APIRouter(route_class=ParsedRoute)
_FORMAT = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}, {"type": "null"}]}
_ANY = {"anyOf": [{"type": "boolean"}, {"type": "number"}, {"type": "string"}, {"type": "null"}]}
_REFUSED = {
    "context": "send the conversation to /api/chat",
    "images": "only text is served",
    "template": "templates come with the model or from the operator; use raw for a prompt that is formatted already",
}


class Options(BaseModel):
    """The `options` of a request. Those about the loading of models have no effect."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    temperature: Float | None = None
    top_k: Int | None = None
    top_p: Float | None = None
    min_p: Float | None = None
    seed: Int | None = None
    num_predict: Int | None = None
    stop: Annotated[list[Text], Field(max_length=64, fail_fast=True)] | None = None
    repeat_penalty: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None

    def as_fields(self) -> dict[str, Any]:
        """Return the options as fields of the completion endpoints."""
        fields = self.model_dump(include=set(OPTIONS), exclude_none=True) | {"repetition_penalty": self.repeat_penalty}
        is_limited = self.num_predict is not None and self.num_predict > 0  # others: until the context is full
        others = (self.model_extra or {}).items()
        ignored = {f"options.{name}": value for name, value in others if name not in _WITHOUT_EFFECT}
        return fields | ignored | {"max_tokens": self.num_predict if is_limited else None}


_WITHOUT_EFFECT = {
    "draft_num_predict", "f16_kv", "embedding_only", "logits_all", "low_vram", "main_gpu", "mirostat_eta",
    "mirostat_tau", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa", "penalize_newline",
    "repeat_last_n", "use_mlock", "use_mmap", "vocab_only",
}  # fmt: skip


class OllamaFields(BaseModel):
    """The fields that /api/generate and /api/chat share."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str | None = None
    stream: bool | None = None
    format: Annotated[Any, WithJsonSchema(_FORMAT)] = None
    options: Options | None = None
    keep_alive: Annotated[Any, WithJsonSchema(_ANY)] = None
    think: Annotated[Any, WithJsonSchema(_ANY)] = None
    truncate: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None

    def shared(self, request: Request) -> dict[str, Any]:
        """Return what all requests have, as fields of the completion endpoints."""
        extra = self.model_extra or {}
        for name, remedy in _REFUSED.items():
            if extra.get(name):
                raise unsupported(name, remedy)
        fields = {name: value for name, value in extra.items() if name not in _REFUSED}
        fields |= (self.options or Options()).as_fields()
        if self.format not in (None, ""):
            fields["response_format"] = _as_format(self.format)
        return fields | {"stream": self.stream is not False, "model": served_name(request, self.model)}

    def as_chat(self, request: Request, messages: list[dict[str, Any]], tools: Any = None) -> ChatFields:
        reader, effort = state_of(request).engine.llm.reader, self.think if isinstance(self.think, str) else None
        is_on = None if self.think is None else bool(self.think)
        fields = self.shared(request) | {"messages": messages, "tools": tools}
        fields |= {"enable_thinking": is_on, "reasoning_effort": effort}
        if is_on and reader.reasoning_format is None:
            fields["think"] = self.think  # named among the ignored fields
        return as_fields(ChatFields, fields | {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs})


class GenerateFields(OllamaFields):
    """The body of a request to /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None

    def as_completion(self, request: Request) -> CompletionFields:
        if self.system:
            raise unsupported("system", "the prompt is raw, or the model has no chat template; put it into the prompt")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        fields = self.shared(request) | {"prompt": self.prompt or "", "suffix": self.suffix, "logprobs": logprobs}
        return as_fields(CompletionFields, fields)


class OllamaChatFields(OllamaFields):
    """The body of a request to /api/chat."""

    messages: Objects | None = None
    tools: Objects | None = None


@router.post("/api/generate", responses=RESPONSES)
async def generate(fields: GenerateFields, request: Request) -> Response:
    """Answer or complete a prompt, in Ollama's format."""
    if not (fields.prompt or fields.suffix):
        return _loaded(request, fields, {"response": ""})
    template = state_of(request).engine.llm.reader.chat_template
    asked: ChatFields | CompletionFields
    if fields.raw or fields.suffix or template is None:
        asked = fields.as_completion(request)
    else:
        system = [{"role": "system", "content": fields.system}] if fields.system else []
        asked = fields.as_chat(request, [*system, {"role": "user", "content": fields.prompt}])
    return await _answer(request, fields, asked, "response")


@router.post("/api/chat", responses=RESPONSES)
async def chat(fields: OllamaChatFields, request: Request) -> Response:
    """Answer a conversation, in Ollama's format."""
    if not fields.messages:
        return _loaded(request, fields, {"message": {"role": "assistant", "content": ""}})
    asked = fields.as_chat(request, fields.messages, fields.tools)
    return await _answer(request, fields, asked, "message")


async def _answer(request: Request, fields: OllamaFields, asked: ChatFields | CompletionFields, kind: str) -> Response:
    check_single(asked, {})
    headers = asked.check()
    call = Call.from_request(request, asked)
    return await respond(request, _begin(call, fields, asked, kind), headers)


async def _begin(call: Call, fields: OllamaFields, asked: ChatFields | CompletionFields, kind: str) -> PendingResponse:
    """Read a prompt or a conversation and queue it."""
    engine = call.state.engine

    def read() -> ReadConversation:
        if isinstance(asked, ChatFields):
            return read_conversation(engine.llm, asked) if fields.truncate is False else read_newest(engine.llm, asked)
        params = completion_params(asked, engine.llm, asked.max_tokens)
        prompt = read_prompt(engine.llm, asked.prompt, asked, params)
        return ReadConversation(prompt.ids, prompt.params, ToolPlan())

    taken, generation = await queue_conversation(call, read)
    texts = await TokenTexts.from_engine(engine) if fields.logprobs else None
    pieces = Pieces(fields.model or call.model, kind, generation, taken.blocks(), texts, fields.top_logprobs or 0)
    return PendingResponse(asked, [generation], pieces, taken.ignored)


def served_name(request: Request, name: str | None) -> str | None:
    """Return the name without the tag that Ollama's clients add to names that have none."""
    state = state_of(request)
    if name is not None and name not in state.model_names:
        name = name.removesuffix(":latest")
    state.check_model(name)
    return name


def _loaded(request: Request, fields: OllamaFields, empty: dict[str, Any]) -> Response:
    """Answer a request without a prompt, which would load the model or remove it from memory: it stays loaded."""
    name = served_name(request, fields.model)
    head = {"model": fields.model or name or state_of(request).names[0], "created_at": formatted(time.time())}
    seconds = str(fields.keep_alive)
    is_over = "0" in seconds and not set(seconds) - set("0.hmnsu\u00b5")  # such as 0, "0s" or "0m0.0s"
    return JSONResponse(head | empty | {"done": True, "done_reason": "unload" if is_over else "load"})


def _as_format(given: Any) -> dict[str, Any]:
    if given == "json":
        return {"type": "json_object"}
    if not isinstance(given, dict):
        raise RequestError(f'format: must be "json" or a JSON schema, not {given!r:.60}')
    return {"type": "json_schema", "json_schema": {"schema": given}}
