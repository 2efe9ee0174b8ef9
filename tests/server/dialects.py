"""The APIs of the server: how each is asked for a text, and what its answers say, whole or streamed.

Answers are read as the official clients type them, so that a field of another type fails a test.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import ollama
from pydantic import TypeAdapter

from serving import serve
from specinfer import LLM
from specinfer.server.app import create_app
from specinfer.server.state import ServerState

T = TypeVar("T")

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE = "/v1/messages", "/api/chat", "/api/generate"
USER: dict[str, Any] = {"role": "user", "content": "Hi."}


def with_openai(llm: LLM, talk: Callable[[Any], Awaitable[T]]) -> T:
    """What `talk` makes of OpenAI's client of a server."""
    import httpx2
    import openai

    async def work(_: httpx.AsyncClient, state: ServerState) -> T:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=create_app(state)))
        url = "http://127.0.0.1/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
            return await talk(client)

    return serve(llm, work)


@dataclass(frozen=True, slots=True)
class Answer:
    """What an answer says, with the arguments of calls as JSON."""

    text: str = ""
    thought: str = ""
    calls: Sequence[tuple[str, str]] = field(default_factory=list)
    reason: str | None = None
    num_tokens: int | None = None

    @property
    def read_calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, or the one object of a whole answer."""
    assert answer.status_code == 200, answer.text
    kind = answer.headers["content-type"].partition(";")[0]
    if kind == "text/event-stream":
        is_ended = answer.text.rstrip().endswith("data: [DONE]")
        assert is_ended != answer.request.url.path.startswith(MESSAGES)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def read(answer: httpx.Response) -> Answer:
    """Read an answer of any of the APIs."""
    is_stream = "application/json" not in answer.headers["content-type"]
    return DIALECTS[answer.request.url.path].read(lines_of(answer), is_stream)


def _completion(events: Sequence[Any], is_stream: bool) -> Answer:
    choices = [choice for event in events for choice in event["choices"]]
    reason = next((choice["finish_reason"] for choice in choices if choice["finish_reason"]), None)
    usage = events[-1].get("usage") or {}
    return Answer("".join(choice["text"] for choice in choices), "", [], reason, usage.get("completion_tokens"))


def _chat(events: Sequence[Any], is_stream: bool) -> Answer:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk  # seconds, which few processes need

    kind: Any = ChatCompletionChunk if is_stream else ChatCompletion
    choices = [choice for event in events for choice in kind.model_validate(event).choices]
    parts: list[Any] = [choice.delta if is_stream else choice.message for choice in choices]
    calls: dict[int, list[str]] = {}
    for part in parts:
        for place, piece in enumerate(part.tool_calls or []):
            call = calls.setdefault(piece.index if is_stream else place, ["", ""])
            call[0] += piece.function.name or ""
            call[1] += piece.function.arguments or ""
    thoughts = [getattr(part, "reasoning_content", None) or "" for part in parts]
    return Answer(
        "".join(part.content or "" for part in parts),
        "".join(thoughts),
        [(name, arguments) for name, arguments in calls.values()],
        next((choice.finish_reason for choice in choices if choice.finish_reason), None),
        (events[-1].get("usage") or {}).get("completion_tokens"),
    )


def _responses(events: Sequence[Any], is_stream: bool) -> Answer:
    from openai.types.responses import Response, ResponseStreamEvent

    if is_stream:
        reader: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
        for event in events:
            reader.validate_python(event)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    found: Any = Response.model_validate(events[-1]["response"] if is_stream else events[-1])
    thoughts = [part for item in found.output if item.type == "reasoning" for part in item.content or item.summary]
    texts = [part.text for item in found.output if item.type == "message" for part in item.content]
    calls = [(item.name, item.arguments) for item in found.output if item.type == "function_call"]
    return Answer(
        "".join(texts), "".join(part.text for part in thoughts), calls, found.status, found.usage.output_tokens
    )


def _messages(events: Sequence[Any], is_stream: bool) -> Answer:
    from anthropic.types import Message, RawMessageStreamEvent

    if not is_stream:
        message = Message.model_validate(events[0])
        parts: list[Any] = list(message.content)
        uses = [(block.name, json.dumps(block.input)) for block in parts if block.type == "tool_use"]
        reason, count = message.stop_reason, message.usage.output_tokens
    else:
        reader: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
        read_events = [reader.validate_python(event) for event in events if event["type"] != "ping"]
        assert [read_events[0].type, read_events[-1].type] == ["message_start", "message_stop"]
        parts = [event.delta for event in read_events if event.type == "content_block_delta"]
        begun = [event.content_block for event in read_events if event.type == "content_block_start"]
        arguments = "".join(getattr(part, "partial_json", None) or "" for part in parts)
        uses = [(block.name, arguments) for block in begun if block.type == "tool_use"]
        reason, count = read_events[-2].delta.stop_reason, read_events[-2].usage.output_tokens
    text, thought = ("".join(getattr(part, kind, None) or "" for part in parts) for kind in ("text", "thinking"))
    return Answer(text, thought, uses, reason, count)


def _ollama_chat(events: Sequence[Any], is_stream: bool) -> Answer:
    pieces = [ollama.ChatResponse.model_validate(event) for event in events]
    messages = [piece.message for piece in pieces]
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    return Answer(
        "".join(message.content or "" for message in messages),
        "".join(message.thinking or "" for message in messages),
        [(call.name, json.dumps(call.arguments)) for call in calls],
        pieces[-1].done_reason,
        pieces[-1].eval_count,
    )


def _ollama_generate(events: Sequence[Any], is_stream: bool) -> Answer:
    pieces = [ollama.GenerateResponse.model_validate(event) for event in events]
    text, thought = ("".join(getattr(one, name) or "" for one in pieces) for name in ("response", "thinking"))
    return Answer(text, thought, [], pieces[-1].done_reason, pieces[-1].eval_count)


@dataclass(frozen=True, slots=True)
class ApiClient:
    """One API.

    Attributes:
        prompt: The field of the prompt.
        limit: The field of the most tokens; Ollama's is one of its options.
    """

    prompt: str
    limit: str
    read: Callable[[Sequence[Any], bool], Answer]

    @property
    def has_options(self) -> bool:
        return self.limit == "num_predict"

    def body(self, question: str = "Hi.", limit: int | None = None, *, stream: bool = False, **fields: Any) -> Any:
        """The body of a request for an answer.

        Args:
            fields: Further fields; `temperature`, `top_p`, `top_k`, `seed` and `stop` go where the API has them.
        """
        body: dict[str, Any] = {self.prompt: [USER | {"content": question}] if self.prompt == "messages" else question}
        names = {name: fields.pop(name) for name in ("temperature", "top_p", "top_k", "seed", "stop") if name in fields}
        limits = {} if limit is None else {self.limit: limit}
        if self.has_options:
            return body | fields | {"stream": stream, "options": names | limits}
        if self.read is _messages:
            limits = {self.limit: limit or 16}
            names |= {"stop_sequences": names.pop("stop")} if "stop" in names else {}
        return body | names | limits | fields | ({"stream": True} if stream else {})


DIALECTS = {
    COMPLETIONS: ApiClient("prompt", "max_tokens", _completion),
    CHAT: ApiClient("messages", "max_tokens", _chat),
    RESPONSES: ApiClient("input", "max_output_tokens", _responses),
    MESSAGES: ApiClient("messages", "max_tokens", _messages),
    OLLAMA_CHAT: ApiClient("messages", "num_predict", _ollama_chat),
    OLLAMA_GENERATE: ApiClient("prompt", "num_predict", _ollama_generate),
}
