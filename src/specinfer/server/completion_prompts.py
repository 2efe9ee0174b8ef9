"""The prompts of /v1/completions, converted for the engine: text, token ids, or several of them.

A prompt with a suffix is put between the tokens for filling in the middle that some models are trained on.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specinfer.core.errors import RequestError
from specinfer.core.sampling import SamplingParams
from specinfer.inputs.prompts import PromptReader
from specinfer.llm import LLM
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
    found = tokenizer.convert_tokens_to_ids(token)
    return found if isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == token else None
