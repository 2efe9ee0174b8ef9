"""POST /v1/completions: text or token ids in, each prompt's outputs out, whole or as a stream."""

import itertools
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from specinfer.async_llm import Generation
from specinfer.errors import RequestError
from specinfer.outputs import TextChunk
from specinfer.request import Request as EngineRequest
from specinfer.sampling import SamplingParams
from specinfer.server.completion_prompts import Echo, read_prompts
from specinfer.server.disconnect import until_disconnect
from specinfer.server.fields import CompletionFields
from specinfer.server.generations import Call, as_chunks, chunks_of, close_all, finish_all, steps_of
from specinfer.server.logprobs import Scored, TokenTexts, completion_logprobs, prompt_logprobs
from specinfer.server.parameters import sampling_params
from specinfer.server.stream import EventStream, JsonResponse
from specinfer.server.usage import metrics_of, usage_of

router = APIRouter()
_DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post("/v1/completions")
async def create_completion(fields: CompletionFields, request: Request) -> Response:
    """Completes one or several prompts."""
    headers = fields.check()
    work = _Completion(Call.of(request, fields), fields)
    await until_disconnect(request, work.begin())
    if fields.stream:
        return EventStream(work.events(), work.close, headers)
    return JsonResponse(await until_disconnect(request, work.answer()), headers)


@dataclass(slots=True)
class _Completion:
    """One request on its way.

    Attributes:
        texts: What tokens stand for, if that is to be told.
        outputs: By prompt, then by output.
    """

    call: Call
    fields: CompletionFields
    created: int = field(default_factory=lambda: int(time.time()))
    generations: list[Generation] = field(default_factory=list)
    texts: TokenTexts | None = None
    outputs: list[list["_Output"]] = field(default_factory=list)

    async def begin(self) -> None:
        """Reads the prompts and queues them.

        Raises:
            RequestError: They cannot be served.
            QueueFullError: They do not find room.
        """
        fields, engine = self.fields, self.call.state.engine
        if fields.best_of is not None and fields.best_of != (fields.n or 1):
            raise RequestError("best_of: outputs are not ranked; leave it out, or give the value of n")
        params = self._params()
        prompts = await engine.read(lambda: read_prompts(engine.llm, fields, params))
        if params.logprobs is not None or params.prompt_logprobs is not None or fields.trace:
            self.texts = await TokenTexts.of(engine, as_ids=bool(fields.return_tokens_as_token_ids))
        self.generations = await self.call.submit([(prompt.ids, prompt.params) for prompt in prompts])
        numbers = itertools.count()
        self.outputs = [
            [_Output(next(numbers), request, fields, prompt.echo, self.texts) for request in generation.requests]
            for generation, prompt in zip(self.generations, prompts, strict=True)
        ]

    def close(self) -> None:
        close_all(self.generations)

    def _params(self) -> SamplingParams:
        fields = self.fields
        asked = _DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        echoed = fields.logprobs if fields.echo else None
        return sampling_params(
            fields,
            self.call.state.engine.llm.target.loaded.sampling_defaults,
            max_tokens=1 if fields.hides_output else asked,  # the engine says one token at least
            logprobs=fields.logprobs,
            prompt_logprobs=max(
                (count for count in (fields.prompt_logprobs, echoed) if count is not None), default=None
            ),
        )

    # -------------------------------------------------------------------------------- the answer

    async def answer(self) -> dict[str, Any]:
        """All outputs.

        Raises:
            ApiError: One of them failed.
        """
        choices = []
        for place, output in enumerate(await finish_all(self.generations)):
            for chunk in as_chunks(self.generations[place], output):
                choice = self.outputs[place][chunk.index].choice(chunk)
                if self.fields.trace:
                    choice["specinfer"] = steps_of(chunk, self.texts)
                choices.append(choice)
        return {**self._head(), "choices": choices, "usage": self._usage(), "metrics": metrics_of(self.generations)}

    async def events(self) -> AsyncGenerator[dict[str, Any] | None]:
        """The answer in pieces, as they come."""
        fields, state = self.fields, self.call.state
        async for found in chunks_of(self.generations, state.config.ping_seconds, fields.stream_interval or 1):
            if found is None:
                yield None
                continue
            place, chunk = found
            choice = self.outputs[place][chunk.index].choice(chunk)
            if not (any(map(choice.get, ("text", "finish_reason", "logprobs", "token_ids"))) or fields.trace):
                continue  # nothing to tell yet: a character or a stop string is unfinished
            event = {**self._head(), "choices": [choice]}
            if fields.wants_usage:
                event["usage"] = self._usage() if fields.wants_usage_always else None
            if fields.trace:
                event["specinfer"] = steps_of(chunk, self.texts)
            yield event
        if fields.wants_usage:
            yield {**self._head(), "choices": [], "usage": self._usage(), "metrics": metrics_of(self.generations)}

    def _head(self) -> dict[str, Any]:
        return self.call.head("cmpl", "text_completion", self.created)

    def _usage(self) -> dict[str, Any]:
        return usage_of(self.generations, hides_output=self.fields.hides_output)


@dataclass(slots=True)
class _Output:
    """One output, told in one or more pieces.

    Attributes:
        index: Among the outputs of all prompts.
        num_told: Tokens that the reader has been told of.
    """

    index: int
    request: EngineRequest
    fields: CompletionFields
    echo: Echo | None
    texts: TokenTexts | None
    num_told: int = 0
    is_begun: bool = False

    def choice(self, chunk: TextChunk) -> dict[str, Any]:
        """The next piece, or all of it."""
        request, fields, shows = self.request, self.fields, not self.fields.hides_output
        choice: dict[str, Any] = {
            "index": self.index,
            "text": chunk.text if shows else "",
            "logprobs": None,
            "finish_reason": chunk.finish_reason if shows or chunk.finish_reason is None else "length",
            "stop_reason": chunk.stop_reason if shows else None,
        }
        if self.texts is not None and request.params.logprobs is not None:
            choice["logprobs"] = completion_logprobs(self._scored(chunk), self.texts)
        if self.texts is not None and fields.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(request.prompt_logprobs, fields.prompt_logprobs, self.texts)
        if fields.return_token_ids:
            choice["token_ids"] = chunk.token_ids if shows else []
        if not self.is_begun:
            choice["text"] = (self.echo.text if self.echo else "") + choice["text"]
            choice |= {"prompt_token_ids": request.prompt_ids} if fields.return_token_ids else {}
        self.is_begun = True
        self.num_told += len(chunk.token_ids)
        return choice

    def _scored(self, chunk: TextChunk) -> Scored:
        """The piece's tokens, after those of the prompt where it begins."""
        scored = Scored()
        if self.echo is not None and not self.is_begun:
            scored += Scored(self.request.prompt_ids, self.request.prompt_logprobs, self.echo.offsets)
        if self.fields.hides_output or chunk.logprobs is None:
            return scored
        start, text = len(self.echo.text) if self.echo else 0, self.request.text
        stop = self.num_told + len(chunk.token_ids)
        ends = [0] * stop if text is None else [min(end, len(text.text)) for end in text.ends[:stop]]
        offsets = [start + end for end in [0, *ends][self.num_told : stop]]
        return scored + Scored(chunk.token_ids, chunk.logprobs, offsets)
