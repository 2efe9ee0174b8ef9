"""POST /v1/chat/completions: takes a conversation and returns a message or tool calls, whole or as a stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from specinfer.core.errors import RequestError
from specinfer.core.outputs import TextChunk
from specinfer.core.sampling import SamplingParams
from specinfer.generation import Generation
from specinfer.inputs.chat.messages import unread_keys
from specinfer.inputs.formats.parser import OutputDelta
from specinfer.llm import LLM
from specinfer.server.call import Call
from specinfer.server.custom_tools import Parser
from specinfer.server.errors import ApiError
from specinfer.server.json_body import ParsedRoute
from specinfer.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from specinfer.server.parameters import sampling_params, truncated
from specinfer.server.pending_response import RESPONSES, ChoicesResponse, deltas_of, respond
from specinfer.server.protocol import ChatFields
from specinfer.server.response_format import structured_outputs_of
from specinfer.server.thinking import template_kwargs, thinking_budget
from specinfer.server.tools import ToolPlan, ignored_tools, plan_tools, tools_of_functions

router = APIRouter(route_class=ParsedRoute)


@router.post("/v1/chat/completions", responses=RESPONSES)
async def create_chat_completion(fields: ChatFields, request: Request) -> Response:
    """Answer a conversation."""
    headers = fields.check()
    _check(fields)
    return await respond(request, _begin(Call.of(request, fields), fields), headers)


def _check(fields: ChatFields) -> None:
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise ApiError(400, 'modalities: only ["text"] is served', param="modalities", code="unsupported_parameter")
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError("top_logprobs: only with logprobs set to true")
    if fields.tools and fields.functions:
        raise RequestError("functions: give either tools or functions")
    if not fields.functions and fields.function_call not in (None, "none", "auto"):
        raise RequestError("function_call: there are no functions to call; send some, or leave it out")
    if fields.add_special_tokens:
        raise RequestError("add_special_tokens: the chat template writes them; leave it out")
    if fields.add_generation_prompt and fields.continue_final_message:
        raise RequestError("continue_final_message: the last message goes on only without add_generation_prompt")


@dataclass(frozen=True, slots=True)
class ReadConversation:
    """A conversation as the engine takes it, the plan for parsing its response, and names of what was ignored in it."""

    ids: list[int]
    params: SamplingParams
    plan: ToolPlan
    ignored: Sequence[str] = ()


async def _begin(call: Call, fields: ChatFields) -> ChoicesResponse:
    """Read a conversation and queue it."""
    engine = call.state.engine
    read = await call.read(lambda: read_conversation(engine.llm, fields))
    texts = None
    if read.params.logprobs is not None or fields.prompt_logprobs is not None or fields.trace:
        texts = await TokenTexts.of(engine, as_ids=bool(fields.return_tokens_as_token_ids))
    generations = await call.submit([(read.ids, read.params)], read.plan.reasoning)
    outputs = [
        _Output(i, fields, read.plan.parser(separates_thoughts=fields.separates_thoughts), read.plan.custom, texts)
        for i in range(read.params.n)
    ]

    def once() -> dict[str, Any]:
        """Return the fields about the prompt, which are sent once."""
        extra: dict[str, Any] = {"prompt_token_ids": read.ids} if fields.return_token_ids else {}
        if texts is not None and fields.prompt_logprobs is not None:
            known = generations[0].requests[0].prompt_logprobs
            extra["prompt_logprobs"] = prompt_logprobs(known, texts)
        return extra

    return ChoicesResponse(
        fields=fields,
        name=call.name,
        model=call.model,
        prefix="chatcmpl",
        kinds=("chat.completion", "chat.completion.chunk"),
        generations=generations,
        outputs=[outputs],
        texts=texts,
        once=once,
        returns_progress=bool(fields.return_progress),
        ignored=read.ignored,
    )


async def queue_conversation(
    call: Call, read: Callable[[], ReadConversation], named: Callable[[RequestError], RequestError]
) -> tuple[ReadConversation, Generation]:
    """Read a conversation of another API and queue it.

    Args:
        named: Returns an error with the names of that API's fields.
    """
    try:
        found = await call.read(read)
        (generation,) = await call.submit([(found.ids, found.params)], found.plan.reasoning)
        return found, generation
    except RequestError as error:
        raise named(error) from error


def read_conversation(llm: LLM, fields: ChatFields) -> ReadConversation:
    """Render and check a conversation; runs in the thread that may use the tokenizer."""
    reader, tools, choice = llm.reader, fields.tools, fields.tool_choice
    if fields.functions:
        tools, choice = tools_of_functions(fields.functions, fields.function_call)
    plan = plan_tools(
        tools,
        choice,
        False if fields.functions else fields.parallel_tool_calls,
        reader.call_format,
        special_tokens=reader.special_tokens,
    )
    kwargs = template_kwargs(fields, reader.chat_template or "")
    asked = structured_outputs_of(fields.response_format, fields.constraints)
    params = sampling_params(
        fields,
        llm.target.loaded.sampling_defaults,
        max_tokens=fields.token_limit,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
        structured_outputs=plan.combined(asked),
        thinking_token_budget=thinking_budget(fields, kwargs),
        shows_special_tokens=plan.shows_special_tokens,
    )
    goes_on = bool(fields.continue_final_message)
    ids = reader.read_chat(
        fields.messages,
        tools=plan.tools_for_template,
        add_generation_prompt=not goes_on and fields.add_generation_prompt is not False,
        continue_final_message=goes_on,
        template_kwargs=kwargs or None,
    )
    plan = replace(plan, reasoning=reader.reasoning_of(ids))
    unread = reader.unread_kwargs(kwargs, with_tools=bool(plan.tools_for_template))
    ignored = [*ignored_tools(tools, choice), *(f"messages.{name}" for name in unread_keys(fields.messages))]
    ignored += [f"chat_template_kwargs.{name}" for name in unread]
    return ReadConversation(truncated(ids, fields, llm.max_model_len, fields.token_limit), params, plan, ignored)


@dataclass(slots=True)
class _Output:
    """One response, sent in one or more pieces.

    Attributes:
        custom: The names of custom tools.
        texts: The texts of tokens, if log-probabilities are sent.
        is_custom: Whether the last call is one of a custom tool.
    """

    index: int
    fields: ChatFields
    parser: Parser
    custom: frozenset[str]
    texts: TokenTexts | None
    is_begun: bool = False
    is_custom: bool = False

    def pieces(self, chunk: TextChunk) -> list[dict[str, Any]]:
        ends = chunk.finish_reason == "stop" and chunk.stop_reason is None
        if ends and chunk.logprobs and len(chunk.token_ids) > 1:
            # The end has no text. Some clients put the tokens of an event together instead of reading its content.
            ids, origins, known = chunk.token_ids, chunk.origins, chunk.logprobs
            text = TextChunk(chunk.text, ids[:-1], origins[:-1], index=chunk.index, logprobs=known[:-1])
            end = replace(chunk, text="", token_ids=ids[-1:], origins=origins[-1:], logprobs=known[-1:])
            return [*self.pieces(text), *self.pieces(end)]
        deltas = [part for one in deltas_of(self.parser, chunk) if (part := self._part(one))] or [{}]
        if not self.is_begun:
            deltas[0] = {"role": "assistant", "content": ""} | deltas[0]
            self.is_begun = True
        rest = self._rest(chunk)
        if not (deltas[-1] or chunk.finish_reason or rest["logprobs"] or rest.get("token_ids") or chunk.steps):
            return []
        empty = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        choices = [{"index": self.index, "delta": delta, **empty} for delta in deltas]
        choices[-1] |= rest
        return choices

    def whole(self, chunk: TextChunk) -> dict[str, Any]:
        deltas = deltas_of(self.parser, chunk)
        calls: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            if delta.name is not None and delta.index is not None:
                text = "".join(one.arguments for one in deltas if one.index == delta.index)
                calls[delta.index] = _call(delta, text, delta.name in self.custom)
        content = "".join(one.content for one in deltas)
        message = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
        message |= self._thought("".join(one.reasoning for one in deltas))
        if calls:
            message |= self._calls_as_requested(list(calls.values()))
        return {"index": self.index, "message": message, **self._rest(chunk)}

    def _part(self, delta: OutputDelta) -> dict[str, Any]:
        """Return the delta of an event."""
        if delta.index is None:
            return self._thought(delta.reasoning) | ({"content": delta.content} if delta.content else {})
        if delta.name is not None:
            self.is_custom = delta.name in self.custom
        return self._calls_as_requested([{"index": delta.index, **_call(delta, delta.arguments, self.is_custom)}])

    def _thought(self, text: str) -> dict[str, Any]:
        """Return a thought under both names that clients read."""
        return {"reasoning": text, "reasoning_content": text} if text and self.fields.shows_thoughts else {}

    def _calls_as_requested(self, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the calls in the format of the request: "functions" is the older one and takes a single call."""
        return {"function_call": calls[0]["function"]} if self.fields.functions else {"tool_calls": list(calls)}

    def _rest(self, chunk: TextChunk) -> dict[str, Any]:
        fields, reason, logprobs = self.fields, chunk.finish_reason, None
        if reason == "stop" and self.parser.has_whole_calls:  # a stop string can cut a call off
            reason = "function_call" if fields.functions else "tool_calls"
        if self.texts is not None and chunk.logprobs is not None:
            logprobs = chat_logprobs(
                chunk.token_ids, chunk.logprobs, fields.top_logprobs or 0, fields.logprob_token_ids or (), self.texts
            )
        rest = {"logprobs": logprobs, "finish_reason": reason, "stop_reason": chunk.stop_reason}
        return rest | {"token_ids": chunk.token_ids} if fields.return_token_ids else rest


def _call(delta: OutputDelta, text: str, is_custom: bool) -> dict[str, Any]:
    """Return a call, or a part of one; only the first part of each has its name and id."""
    kind, key = ("custom", "input") if is_custom else ("function", "arguments")
    if delta.name is None:
        return {kind: {key: text}}
    return {"id": delta.id, "type": kind, kind: {"name": delta.name, key: text}}
