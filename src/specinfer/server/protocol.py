"""The fields of completion requests: OpenAI's, vLLM's and SpecInfer's own. Types are strict; null means the default.

`SamplingParams` checks the numbers. This module checks what JSON adds: types, and how many items may be sent. Unknown
fields are ignored with a warning, except misspelt ones and fields whose sender would rely on them: these are refused by
name.
"""

import difflib
import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from specinfer.core.sampling import MAX_LOGPROBS
from specinfer.server.errors import ApiError

logger = logging.getLogger(__name__)
_STRICT = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())
IGNORED_HEADER = "X-SpecInfer-Ignored-Fields"
_MAX_UNKNOWN = 64  # each takes a tenth of a millisecond to compare
_SIMILARITY = 0.81  # the least at which an unknown name is a misspelt one: refuses max_new_tokens, but not top_a

Text = Annotated[str, Field(max_length=1024)]
# Lists fail at their first wrong entry: to report every wrong entry of a long list takes minutes.
TokenIds = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]
FewTokenIds = Annotated[list[int], Field(max_length=1024, fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=10_000, fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Label = Annotated[str, Field(max_length=256)]
_STRINGS = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
_IDS = {"type": "array", "items": {"type": "integer"}}

# Fields that are accepted and have no effect here.
_HARMLESS = {
    "metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
}  # fmt: skip

# A client that sends one of these relies on it: a response that ignored it would be wrong and look right.
_REFUSED = {
    "allowed_tools": "use tool_choice",
    "audio": "only text is served",
    "chat_template": "templates come with the model or from the operator",
    "documents": "put their text into a message",
    "ebnf": "use structured_outputs.grammar, in Lark's notation",
    "format": "use response_format",
    "function_call": "use /v1/chat/completions",
    "functions": "use /v1/chat/completions",
    "grammar": "use structured_outputs.grammar, in Lark's notation",
    "guided_choice": "use structured_outputs.choice",
    "guided_decoding_backend": "use structured_outputs",
    "guided_grammar": "use structured_outputs.grammar, in Lark's notation",
    "guided_json": "use structured_outputs.json, or response_format",
    "guided_json_object": "use response_format",
    "guided_regex": "use structured_outputs.regex",
    "guided_whitespace_pattern": "use structured_outputs.regex",
    "json_schema": "use response_format",
    "kv_transfer_params": "leave it out",
    "logits_processors": "use logit_bias, bad_words or structured_outputs",
    "prompt_embeds": "send text or token ids",
    "regex": "use structured_outputs.regex",
    "structural_tag": "use tools or structured_outputs.grammar",
    "tool_choice": "use /v1/chat/completions",
    "tools": "use /v1/chat/completions",
    "use_beam_search": "leave it out",
    "web_search_options": "nothing is searched",
}


def few(limit: int) -> BeforeValidator:
    """Return a validator that counts the keys of an object before it looks at any of them."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > limit:
            raise ValueError(f"{len(given)} names are too many; send {limit} at most")
        return given

    return BeforeValidator(check)


USE_CHAT = "use /v1/chat/completions"
_OF_CHOICES = ("logprob_token_ids", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "trace")


def check_single(fields: "SharedFields", refused: Mapping[str, str]) -> None:
    """Check the fields of an API without choices.

    Args:
        refused: The remedies for further fields that this API has no place for.

    Raises:
        ApiError: A field is not supported there.
    """
    remedies = dict.fromkeys(_OF_CHOICES, USE_CHAT) | dict(refused)
    for name, remedy in remedies.items():
        if getattr(fields, name, (fields.model_extra or {}).get(name)) not in (None, False):
            raise ApiError(400, f"{name}: not supported; {remedy}", param=name, code="unsupported_parameter")
    if fields.n not in (None, 1):
        raise ApiError(400, "n: a response has one output; send several requests", param="n")


def check_spelling(unknown: Iterable[str], known: Iterable[str], prefix: str = "") -> None:
    """Refuse the first unknown name that resembles a known one.

    Raises:
        ApiError: A name is misspelt, and the message has the likely one; or there are too many names to compare.
    """
    names = set(known)
    for i, name in enumerate(unknown):
        if i == _MAX_UNKNOWN:
            place = prefix.rstrip(".") or "body"
            message = f"{place}: more than {i} names are not known, {name!r:.64} among them; leave them out"
            raise ApiError(400, message, param=prefix + name[:64], code="unknown_field")
        plain = name[:64].lower().replace("-", "_")
        if likely := difflib.get_close_matches(plain, names, 1, _SIMILARITY):
            field = prefix + name[:64]
            raise ApiError(
                400, f"{field}: is not known; did you mean {prefix}{likely[0]}?", param=field, code="unknown_field"
            )


class StreamOptions(BaseModel):
    """Options for a stream's reports in addition to text."""

    model_config = _STRICT

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SpeculativeFields(BaseModel):
    """Settings of speculation for this request; they do not change the output."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    tree: Annotated[str, Field(max_length=256)] | None = None


class SLOFields(BaseModel):
    """Latency targets of this request in milliseconds; they affect only who is served first."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    ttft: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    tpot: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class Prediction(BaseModel):
    """A predicted output: text that the output is likely to resemble."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["content"]
    content: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})]


class SharedFields(BaseModel):
    """The fields that both endpoints have."""

    model_config = _STRICT

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=1, le=1 << 20)] | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], few(1024)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[Label], Field(max_length=256, fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: Annotated[
        Text | Annotated[list[Text], Field(max_length=64, fail_fast=True)] | None,
        WithJsonSchema({"anyOf": [*_STRINGS, {"type": "null"}]}),
    ] = None
    stop_token_ids: FewTokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    prediction: Prediction | None = None

    prompt_logprobs: Count | None = None
    logprob_token_ids: FewTokenIds | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Label | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Label | None = None
    speculative: SpeculativeFields | None = None
    slo: SLOFields | None = None
    trace: bool | None = None

    def check(self) -> dict[str, str]:
        """Check the fields and return the headers that the response gets because of them.

        Raises:
            ApiError: A field is not supported, or needs another field that is missing.
        """
        unknown = self.model_extra or {}
        for name, value in unknown.items():
            if name in _REFUSED and value not in (None, False):
                raise ApiError(
                    400, f"{name}: not supported; {_REFUSED[name]}", param=name, code="unsupported_parameter"
                )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only with stream; leave it out", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs: not in a stream; leave one of them out", param="prompt_logprobs")
        ignored = sorted(name for name, value in unknown.items() if name not in _HARMLESS and value is not None)
        check_spelling((name for name in ignored if name not in _fields_of_any()), type(self).model_fields)
        if self.stream_options is not None:
            given = self.stream_options.model_extra or ()
            check_spelling(given, StreamOptions.model_fields, "stream_options.")
        if not ignored:
            return {}
        shown = [name[:64].encode("ascii", "replace").decode() for name in ignored[:16] if name.isprintable()]
        logger.warning("fields that are not known were ignored: %s", ", ".join(shown))
        return {IGNORED_HEADER: ", ".join(shown)}

    @property
    def token_limit(self) -> int | None:
        """The maximum number of output tokens; `max_completion_tokens`, the newer name, takes precedence."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def prompt_limit(self) -> int | None:
        """The number of prompt tokens to keep, -1 for as many as fit, or None for all."""
        return self.truncate_prompt_tokens

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return self.wants_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionFields(SharedFields):
    """The body of a request to /v1/completions."""

    prompt: Annotated[
        Any,
        WithJsonSchema({"anyOf": [*_STRINGS, _IDS, {"type": "array", "items": _IDS}]}),
    ]
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Count | None = None

    @property
    def hides_output(self) -> bool:
        """True if the request asks for the prompt only (`echo` with a limit of 0 tokens)."""
        return bool(self.echo) and self.token_limit == 0


class ChatFields(SharedFields):
    """The body of a request to /v1/chat/completions."""

    messages: Objects
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Objects | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    reasoning_effort: Label | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


Fields = TypeVar("Fields", bound=SharedFields)


def as_fields(kind: type[Fields], fields: Mapping[str, Any]) -> Fields:
    """Return the fields of a request of another API as those of an endpoint.

    Raises:
        RequestValidationError: A value is wrong.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from error


@cache
def _fields_of_any() -> frozenset[str]:
    """Return the fields of both endpoints: in the other one they are no misspelt names."""
    return frozenset(CompletionFields.model_fields) | frozenset(ChatFields.model_fields)
