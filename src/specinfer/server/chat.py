"""POST /v1/chat/completions: takes a conversation and returns a message or tool calls, whole or as a stream."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from specinfer.core.errors import RequestError
from specinfer.core.outputs import TextChunk
from specinfer.server.blocks import Block, BlockEvent, Blocks
from specinfer.server.call import Call
from specinfer.server.conversations import read_conversation
from specinfer.server.errors import ApiError
from specinfer.server.json_body import ParsedRoute
from specinfer.server.logprobs import TokenTexts, chat_logprobs
from specinfer.server.pending_response import RESPONSES, Choices, PendingResponse, respond
from specinfer.server.protocol import ChatFields

router = APIRouter(route_class=ParsedRoute)


@router.post("/v1/chat/completions", responses=RESPONSES)
async def create_chat_completion(fields: ChatFields, request: Request) -> Response:
    """Answer a conversation."""
    headers = fields.check()
    _check(fields)
    return await respond(request, _begin(Call.from_request(request, fields), fields), headers)


def _check(fields: ChatFields) -> None:
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise ApiError("unsupported_parameter", 'modalities: only ["text"] is served', param="modalities")
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


async def _begin(call: Call, fields: ChatFields) -> PendingResponse:
    """Read a conversation and queue it."""
    engine = call.state.engine
    read = await call.read(lambda: read_conversation(engine.llm, fields))
    texts = None
    if read.params.logprobs is not None or fields.prompt_logprobs is not None or fields.trace:
        texts = await TokenTexts.from_engine(engine, as_ids=bool(fields.return_tokens_as_token_ids))
    generations = await call.submit([(read.ids, read.params)], read.plan.reasoning)
    outputs = [
        _Output(i, fields, read.blocks(separates_thoughts=fields.separates_thoughts), read.plan.custom, texts)
        for i in range(read.params.n)
    ]

    def once() -> dict[str, Any]:
        """Return the fields about the prompt, which are sent once."""
        extra: dict[str, Any] = {"prompt_token_ids": read.ids} if fields.return_token_ids else {}
        if texts is not None and fields.prompt_logprobs is not None:
            known = generations[0].requests[0].prompt_logprobs
            extra["prompt_logprobs"] = texts.prompt_logprobs(known)
        return extra

    return Choices(
        call,
        "chatcmpl",
        ("chat.completion", "chat.completion.chunk"),
        generations,
        [outputs],
        texts,
        once=once,
        returns_progress=bool(fields.return_progress),
    ).response(read.ignored)


@dataclass(slots=True)
class _Output:
    """One response, sent in one or more pieces.

    Attributes:
        custom: The names of custom tools.
        texts: The texts of tokens, if log-probabilities are sent.
    """

    index: int
    fields: ChatFields
    blocks: Blocks
    custom: frozenset[str]
    texts: TokenTexts | None
    is_begun: bool = False

    def pieces(self, chunk: TextChunk) -> list[dict[str, Any]]:
        ends = chunk.finish_reason == "stop" and chunk.stop_reason is None
        if ends and chunk.logprobs and len(chunk.token_ids) > 1:
            # The end has no text. Some clients put the tokens of an event together instead of reading its content.
            ids, origins, known = chunk.token_ids, chunk.origins, chunk.logprobs
            text = TextChunk(chunk.text, ids[:-1], origins[:-1], index=chunk.index, logprobs=known[:-1])
            end = replace(chunk, text="", token_ids=ids[-1:], origins=origins[-1:], logprobs=known[-1:])
            return [*self.pieces(text), *self.pieces(end)]
        deltas = [delta for event in self.blocks.read(chunk) if (delta := self._delta(event))] or [{}]
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
        blocks = self.blocks
        blocks.read(chunk)
        calls, content = [self._call(block, "begin", block.text) for block in blocks.calls()], blocks.text("text")
        message = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
        message |= self._thought(blocks.text("thought"))
        if calls:
            message |= self._calls_as_requested(calls)
        return {"index": self.index, "message": message, **self._rest(chunk)}

    def _delta(self, event: BlockEvent) -> dict[str, Any]:
        """Return the delta of an event; nothing if only the dialects with blocks have one."""
        change, block, text = event
        if block.kind == "call" and change != "end":
            return self._calls_as_requested([{"index": block.call.index, **self._call(block, change, text)}])
        if change != "grow":
            return {}
        return {"content": text} if block.kind == "text" else self._thought(text)

    def _call(self, block: Block, change: str, text: str) -> dict[str, Any]:
        """Return a call, or a part of one; only the first part of each has its name and id."""
        kind, key = ("custom", "input") if block.call.name in self.custom else ("function", "arguments")
        if change != "begin":
            return {kind: {key: text}}
        return {"id": block.call.id, "type": kind, kind: {"name": block.call.name, key: text}}

    def _thought(self, text: str) -> dict[str, Any]:
        """Return a thought under both names that clients read."""
        return {"reasoning": text, "reasoning_content": text} if text and self.fields.shows_thoughts else {}

    def _calls_as_requested(self, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the calls in the format of the request: "functions" is the older one and takes a single call."""
        return {"function_call": calls[0]["function"]} if self.fields.functions else {"tool_calls": list(calls)}

    def _rest(self, chunk: TextChunk) -> dict[str, Any]:
        fields, reason, logprobs = self.fields, chunk.finish_reason, None
        if reason == "stop" and self.blocks.has_whole_calls:  # a stop string can cut a call off
            reason = "function_call" if fields.functions else "tool_calls"
        if self.texts is not None and chunk.logprobs is not None:
            logprobs = chat_logprobs(
                chunk.token_ids, chunk.logprobs, fields.top_logprobs or 0, fields.logprob_token_ids or (), self.texts
            )
        rest = {"logprobs": logprobs, "finish_reason": reason, "stop_reason": chunk.stop_reason}
        return rest | {"token_ids": chunk.token_ids} if fields.return_token_ids else rest
