"""POST /v1/completions: takes text or token ids and returns the outputs of each prompt, whole or as a stream."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from specinfer.core.errors import RequestError
from specinfer.core.outputs import TextChunk
from specinfer.core.request import Request as EngineRequest
from specinfer.core.sampling import SamplingParams
from specinfer.llm import LLM
from specinfer.server.call import Call
from specinfer.server.choices import Choices
from specinfer.server.completion_prompts import Echo, ReadPrompt, as_prompts, read_prompt
from specinfer.server.json_body import ParsedRoute
from specinfer.server.logprobs import Scored, TokenTexts, completion_logprobs, prompt_logprobs
from specinfer.server.parameters import sampling_params
from specinfer.server.pending_response import RESPONSES, PendingResponse, respond
from specinfer.server.protocol import CompletionFields
from specinfer.server.response_format import structured_outputs_of

router = APIRouter(route_class=ParsedRoute)
_DEFAULT_MAX_TOKENS = 16  # OpenAI's default


@router.post("/v1/completions", responses=RESPONSES)
async def create_completion(fields: CompletionFields, request: Request) -> Response:
    """Complete one or several prompts."""
    headers = fields.check()
    return await respond(request, _begin(Call.of(request, fields), fields), headers)


async def _begin(call: Call, fields: CompletionFields) -> PendingResponse:
    """Read the prompts and queue them."""
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise RequestError("best_of: outputs are not ranked; leave it out, or give the value of n")
    engine = call.state.engine
    max_tokens = _DEFAULT_MAX_TOKENS if fields.token_limit is None else fields.token_limit

    def read_first() -> tuple[SamplingParams, ReadPrompt, Sequence[str | list[int]]]:
        """Read the parameters and the first prompt, and return the others."""
        given, params = as_prompts(fields.prompt), completion_params(fields, engine.llm, max_tokens)
        call.check_count(len(given), len(given) * params.n)
        return params, read_prompt(engine.llm, given[0], fields, params), given[1:]

    params, first, left = await call.read(read_first, only_encodes=True)
    # Read one at a time, so that prompts of other requests are read in between.
    others = [await call.read(partial(read_prompt, engine.llm, p, fields, params)) for p in left]
    prompts = [first, *others]
    texts = None
    if params.logprobs is not None or params.prompt_logprobs is not None or fields.trace:
        texts = await TokenTexts.of(engine, as_ids=bool(fields.return_tokens_as_token_ids))
    generations = await call.submit([(prompt.ids, prompt.params) for prompt in prompts])
    numbers = itertools.count()
    outputs = [
        [_Output(next(numbers), request, fields, prompt.echo, texts) for request in generation.requests]
        for generation, prompt in zip(generations, prompts, strict=True)
    ]
    return Choices(
        call,
        "cmpl",
        ("text_completion", "text_completion"),
        generations,
        outputs,
        texts,
        hides_output=fields.hides_output,
        returns_progress=bool(fields.return_progress),
    ).response()


def completion_params(fields: CompletionFields, llm: LLM, max_tokens: int | None) -> SamplingParams:
    """Return the sampling parameters of a request."""
    echoed = fields.logprobs if fields.echo else None
    return sampling_params(
        fields,
        llm.target.loaded.sampling_defaults,
        max_tokens=1 if fields.hides_output else max_tokens,  # the engine generates at least one token
        logprobs=fields.logprobs,
        prompt_logprobs=max((count for count in (fields.prompt_logprobs, echoed) if count is not None), default=None),
        structured_outputs=structured_outputs_of(fields.response_format, fields.constraints),
    )


@dataclass(slots=True)
class _Output:
    """One output, sent in one or more pieces.

    Attributes:
        index: The output's index among those of all prompts.
        texts: The texts of tokens, if log-probabilities are sent.
        num_sent: Tokens that have been sent to the client.
    """

    index: int
    request: EngineRequest
    fields: CompletionFields
    echo: Echo | None
    texts: TokenTexts | None
    num_sent: int = 0
    is_begun: bool = False

    def pieces(self, chunk: TextChunk) -> list[dict[str, Any]]:
        choice = self.whole(chunk)
        has_content = any(map(choice.get, ("text", "finish_reason", "logprobs", "token_ids"))) or chunk.steps
        return [choice] if has_content else []

    def whole(self, chunk: TextChunk) -> dict[str, Any]:
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
            choice["prompt_logprobs"] = prompt_logprobs(request.prompt_logprobs, self.texts)
        if fields.return_token_ids:
            choice["token_ids"] = chunk.token_ids if shows else []
        if not self.is_begun:
            choice["text"] = (self.echo.text if self.echo else "") + choice["text"]
            choice |= {"prompt_token_ids": request.prompt_ids} if fields.return_token_ids else {}
        self.is_begun = True
        self.num_sent += len(chunk.token_ids)
        return choice

    def _scored(self, chunk: TextChunk) -> Scored:
        """Return the chunk's scored tokens; the first chunk's follow those of an echoed prompt."""
        scored = Scored()
        if self.echo is not None and not self.is_begun:
            scored += Scored(self.request.prompt_ids, self.request.prompt_logprobs, self.echo.offsets)
        if self.fields.hides_output or chunk.logprobs is None:
            return scored
        start, text = len(self.echo.text) if self.echo else 0, self.request.text
        offsets = [start] * len(chunk.token_ids)
        if text is not None:
            places = range(self.num_sent, self.num_sent + len(chunk.token_ids))
            # A token begins where the one before it ends; tokens that a stop string cut off begin at the end.
            offsets = [start + (min(text.ends[i - 1], len(text.text)) if i else 0) for i in places]
        return scored + Scored(chunk.token_ids, chunk.logprobs, offsets)
