"""The prompts of /v1/completions: text, token ids, or several of them, converted for the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specinfer.core.errors import RequestError
from specinfer.core.sampling import SamplingParams
from specinfer.llm import LLM
from specinfer.server.infill import infill_ids
from specinfer.server.parameters import truncated
from specinfer.server.protocol import CompletionFields

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
    kept = truncated(ids, fields, llm.max_model_len, params.max_tokens)
    ids, text = kept, text if len(kept) == len(ids) else None
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
