"""POST /v1/completions: takes text or token ids and returns the outputs of each prompt, whole or as a stream.

A prompt with a suffix is put between the tokens for filling in the middle that some models are trained on.
"""

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response

from specinfer.core.errors import RequestError
from specinfer.core.outputs import TextChunk
from specinfer.core.request import Request as EngineRequest
from specinfer.core.sampling import SamplingParams
from specinfer.inputs.prompts import PromptReader
from specinfer.llm import LLM
from specinfer.server.call import Call
from specinfer.server.json_body import ParsedRoute
from specinfer.server.logprobs import Scored, TokenTexts, completion_logprobs
from specinfer.server.parameters import sampling_params, truncated
from specinfer.server.pending_response import RESPONSES, Choices, PendingResponse, respond
from specinfer.server.protocol import CompletionFields
from specinfer.server.response_format import structured_outputs_of

_MAX_PROMPTS = 2048


@dataclass(frozen=True, slots=True)
class Echo:
    """The text of a prompt that is repeated before the output, and the offset of each of its tokens."""

    text: str
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """One prompt, encoded and checked.

    Attributes:
        echo: The prompt's text, if the output repeats it.
    """

    ids: list[int]
    params: SamplingParams
    echo: Echo | None


def as_prompts(given: Any) -> Sequence[str | list[int]]:
    """Return the "prompt" field as a list of prompts."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(type(item) is int for item in given):
            return [given]
        if len(given) > _MAX_PROMPTS:
            raise RequestError(f"prompt: {len(given)} prompts at once; send {_MAX_PROMPTS} at most")
        if all(isinstance(item, str) for item in given):
            return given
        if all(isinstance(item, list) and all(type(i) is int for i in item) for item in given):
            return given
    raise RequestError("prompt: give text, a list of texts, a list of token ids, or a list of such lists; not empty")


def read_prompt(llm: LLM, prompt: str | list[int], fields: CompletionFields, params: SamplingParams) -> ReadPrompt:
    """Encode and check one prompt of a request; runs in the thread that may use the tokenizer."""
    text = prompt if isinstance(prompt, str) else None
    if fields.suffix:
        ids = _infilled(llm, text, fields)
    elif text is not None:
        special = fields.add_special_tokens is not False
        side: Literal["start", "end"] = "start" if fields.truncation_side == "right" else "end"
        keeps = None if fields.prompt_limit is None else side
        ids = llm.reader.encode(text, add_special_tokens=special, keeps=keeps)
    else:
        ids = list(prompt)  # type: ignore[arg-type]  # not text, so ids
    num_given, ids = len(ids), truncated(ids, fields, llm.max_model_len, params.max_tokens)
    text = text if len(ids) == num_given else None
    llm.reader.read(ids, params)
    return ReadPrompt(ids, params, _echo(llm, text, ids, params) if fields.echo else None)


def _infilled(llm: LLM, text: str | None, fields: CompletionFields) -> list[int]:
    if text is None or fields.echo:
        raise RequestError("suffix: only with a prompt that is text, and without echo")
    if llm.tokenizer is None:
        raise RequestError("suffix: this model has no tokenizer; leave it out")
    assert fields.suffix is not None
    return infill_ids(llm.tokenizer, llm.reader, text, fields.suffix, has_frame=fields.add_special_tokens is not False)


def _echo(llm: LLM, text: str | None, ids: Sequence[int], params: SamplingParams) -> Echo:
    buffer = llm.reader.text_buffer(params)
    if buffer is None:
        return Echo("", [0] * len(ids))
    for token in ids:
        buffer.push(token, may_stop=False)
    buffer.finish()
    return Echo(buffer.text if text is None else text, [0, *buffer.ends[:-1]])


_PREFIX, _SUFFIX = object(), object()  # placeholders for the two texts among a model's special tokens
_FORMS: tuple[tuple[object, ...], ...] = (
    ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),
    ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),
    ("<fim-prefix>", _PREFIX, "<fim-suffix>", _SUFFIX, "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", _PREFIX, "<\uff5cfim\u2581hole\uff5c>", _SUFFIX, "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", _PREFIX, "\u2581<SUF>", _SUFFIX, "\u2581<MID>"),
    ("<PRE>", _PREFIX, "<SUF>", _SUFFIX, "<MID>"),
    ("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX),
)


def can_infill(tokens: Container[str]) -> bool:
    """Return whether a model with these special tokens can fill in the middle."""
    return any(all(part in tokens for part in form if isinstance(part, str)) for form in _FORMS)


def infill_ids(tokenizer: Any, reader: PromptReader, prefix: str, suffix: str, *, has_frame: bool) -> list[int]:
    """Return a prompt after which the model generates the text between a prefix and a suffix.

    Args:
        has_frame: Whether the tokens come first that the tokenizer puts before any text.
    """

    def encode(text: str) -> list[int]:
        return reader.encode(text, add_special_tokens=False)

    for form in _FORMS:
        marks = {part: _id_of(tokenizer, part) for part in form if isinstance(part, str)}
        known: dict[object, list[int]] = {part: [mark] for part, mark in marks.items() if mark is not None}
        if len(known) == len(marks):
            known |= {_PREFIX: encode(prefix), _SUFFIX: encode(suffix)}
            frame = reader.encode("a") if has_frame else []
            first = encode("a")[:1]
            before = frame[: frame.index(first[0])] if first and first[0] in frame else []
            return before + [token for part in form for token in known[part]]
    raise RequestError("suffix: this model has no tokens for filling in the middle; leave it out")


def _id_of(tokenizer: Any, token: str) -> int | None:
    """Return a token's id, or None: tokenizers return the id of the unknown token for a missing one."""
    number = tokenizer.convert_tokens_to_ids(token)
    return number if isinstance(number, int) and tokenizer.convert_ids_to_tokens(number) == token else None


router = APIRouter(route_class=ParsedRoute)
_DEFAULT_MAX_TOKENS = 16  # OpenAI's default


@router.post("/v1/completions", responses=RESPONSES)
async def create_completion(fields: CompletionFields, request: Request) -> Response:
    """Complete one or several prompts."""
    headers = fields.check()
    return await respond(request, _begin(Call.from_request(request, fields), fields), headers)


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
        texts = await TokenTexts.from_engine(engine, as_ids=bool(fields.return_tokens_as_token_ids))
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
            choice["prompt_logprobs"] = self.texts.prompt_logprobs(request.prompt_logprobs)
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
