"""/tokenize, /detokenize and /tokenizer_info, in vLLM's formats."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from specinfer.core.errors import RequestError
from specinfer.server.auth import body_size_of, tenant_of
from specinfer.server.errors import as_api_error, unsupported
from specinfer.server.field_checks import REFUSED, with_ignored
from specinfer.server.json_body import MAX_VALUES, ParsedRoute
from specinfer.server.state import ServerState, state_of
from specinfer.server.stream import until_disconnect

T = TypeVar("T")
router = APIRouter(route_class=ParsedRoute)

MAX_CHARACTERS = 1_000_000  # some 250 MiB while they are tokenized
Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]


class TokenizeRequest(BaseModel):
    """The body of a request to /tokenize: a text, or a conversation for the model's chat template."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: StrictStr | None = None
    prompt: Annotated[StrictStr, Field(max_length=MAX_CHARACTERS)] | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000, fail_fast=True)] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=10_000, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool | None = None


class TokenizeResponse(BaseModel):
    """Token ids, and their strings in the vocabulary if the request asked for them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    """The body of a request to /detokenize."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: StrictStr | None = None
    tokens: Annotated[list[Token], Field(max_length=MAX_VALUES, fail_fast=True)]


class DetokenizeResponse(BaseModel):
    """The text of the tokens, with special tokens."""

    prompt: str


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(request: Request, asked: TokenizeRequest) -> Response:
    state = _state(request, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("prompt: give either prompt or messages")
    headers = _headers(asked, state.engine.llm.reader.unread_kwargs(asked.chat_template_kwargs))
    body = await _read(request, state, lambda: _tokenized(state, asked))
    return Response(body, headers=headers, media_type="application/json")


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(request: Request, asked: DetokenizeRequest) -> Response:
    state = _state(request, asked.model)
    headers = _headers(asked)
    body = await _read(request, state, lambda: _detokenized(state, asked.tokens))
    return Response(body, headers=headers, media_type="application/json")


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Describe the tokenizer and the chat template, for clients that fill in the template themselves."""
    llm = _state(request, None).engine.llm
    added = llm.tokenizer.added_tokens_decoder.items()
    return {name: str(token) for name, token in llm.tokenizer.special_tokens_map.items()} | {
        "tokenizer_class": type(llm.tokenizer).__name__,
        "model_max_length": llm.max_model_len,
        "added_tokens_decoder": {str(i): {"content": one.content, "special": one.special} for i, one in added},
        "chat_template": llm.reader.chat_template,
    }


def _headers(asked: BaseModel, unread: Sequence[str] = ()) -> dict[str, str]:
    """Return the header that names ignored fields and keywords of the template."""
    unknown = {name: value for name, value in (asked.model_extra or {}).items() if value is not None}
    if "chat_template" in unknown:
        raise unsupported("chat_template", REFUSED["chat_template"])
    return with_ignored({}, [*sorted(unknown), *(f"chat_template_kwargs.{name}" for name in unread)])


async def _read(request: Request, state: ServerState, action: Callable[[], T]) -> T:
    """Run an action in turn with those of other tenants, unless the client leaves first."""
    try:
        work = state.engine.read(action, tenant_of(request), num_bytes=body_size_of(request))
        return await until_disconnect(request, work)
    except ValueError as error:
        raise as_api_error(error) from error


def _state(request: Request, model: str | None) -> ServerState:
    state = state_of(request)
    state.check_model(model)
    if state.engine.llm.tokenizer is None:
        raise RequestError("prompt: this model has no tokenizer; work with token ids")
    return state


def _detokenized(state: ServerState, tokens: list[int]) -> str:
    """Return the response as JSON."""
    size = state.engine.llm.target.loaded.vocab_size
    if wrong := [token for token in tokens if token >= size]:
        raise RequestError(f"tokens: {wrong[0]} is not in the vocabulary of {size} tokens; leave it out")
    return DetokenizeResponse(prompt=state.engine.llm.reader.texts.decode(tokens)).model_dump_json()


def _tokenized(state: ServerState, asked: TokenizeRequest) -> str:
    """Return the response as JSON."""
    llm, with_strings = state.engine.llm, bool(asked.return_token_strs)
    if asked.messages is None:
        assert asked.prompt is not None
        special = asked.add_special_tokens is not False
        fields = llm.reader.texts.tokenized(asked.prompt, add_special_tokens=special, with_strings=with_strings)
    else:
        fields = llm.reader.texts.described(_render(state, asked), with_strings)
    return f'{{"max_model_len":{llm.max_model_len},{fields}}}'


def _render(state: ServerState, asked: TokenizeRequest) -> list[int]:
    assert asked.messages is not None
    if asked.add_special_tokens:
        raise RequestError("add_special_tokens: with messages they are the template's; leave it out")
    return state.engine.llm.reader.read_chat(
        asked.messages,
        tools=asked.tools,
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=bool(asked.continue_final_message),
        template_kwargs=asked.chat_template_kwargs,
    )
