"""The fields of completion requests: OpenAI's, vLLM's and SpecInfer's own. Null means the default.

Each field is declared once. Parsing and the schema follow, and a table of the documentation, a row of which is a field
with a text (`row`) and those after it. A field that `SamplingParams` has under the same name is passed to it, and its
number is checked there. This module checks what JSON adds: types, and how many items may be sent. Unknown
fields are ignored and named in a header, except those whose sender would rely on them: these are refused by name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from specinfer.core.errors import RequestError
from specinfer.core.sampling import MAX_LOGPROBS
from specinfer.server.errors import unsupported
from specinfer.server.field_checks import CONSTRAINTS, HARMLESS, REFUSED, as_number, few, with_ignored
from specinfer.server.response_format import ignored_keys

_STRICT = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())

Int = Annotated[int, BeforeValidator(as_number)]
Float = Annotated[float, BeforeValidator(as_number)]
Text = Annotated[str, Field(max_length=1024)]
# Lists fail at their first wrong entry: to report every wrong entry of a long list takes minutes.
TokenIds = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]
FewTokenIds = Annotated[list[int], Field(max_length=1024, fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=10_000, fail_fast=True)]
Count = Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)]
Label = Annotated[str, Field(max_length=256)]
# The names of the budget of a thought: vLLM's, llama.cpp's, and those of services.
ThinkingBudget = Annotated[
    Annotated[Int, Field(ge=-1)] | None,
    Field(
        validation_alias=AliasChoices(
            "thinking_token_budget", "thinking_budget_tokens", "thinking_budget", "max_thinking_tokens",
            "reasoning_budget", "reasoning_budget_tokens",
        )
    ),
]  # fmt: skip
Progress = Annotated[
    bool | None,
    Field(
        description="as in llama.cpp: while the prompt is read, a stream has an event a second with "
        '`"prompt_progress": {"total": 6000, "cache": 0, "processed": 1536, "time_ms": 21000}`, and a last one before '
        "the first token"
    ),
]
_STRINGS = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
_IDS = {"type": "array", "items": {"type": "integer"}}
USE_CHAT = "use /v1/chat/completions"
_OF_CHOICES = ("logprob_token_ids", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "trace")


def row(text: str) -> Any:
    """Return the default of a field, None, with what the documentation says about it and about those after it."""
    return Field(default=None, description=text)


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

    ttft: Annotated[Float, Field(gt=0, allow_inf_nan=False)] | None = None
    tpot: Annotated[Float, Field(gt=0, allow_inf_nan=False)] | None = None


class Prediction(BaseModel):
    """A predicted output: text that the output is likely to resemble."""

    model_config = _STRICT

    type: Literal["content"]
    content: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})]


class SharedFields(BaseModel):
    """The fields that all endpoints for text have."""

    model_config = _STRICT
    prompt_field: ClassVar[str] = "prompt"  # the field that a prompt which is too long came from

    model: str | None = row(
        "one of the served names, or an adapter; any other name is a 404; without it, the first name"
    )
    max_tokens: Int | None = row(
        "the second takes precedence over the first; default for completions: 16; for chat: the rest of the context. "
        "More than the context has left ends at its end"
    )
    max_completion_tokens: Int | None = None
    temperature: Float | None = row("`n` up to 128; `best_of` must equal `n`; `top_p` 0 is greedy; `seed` -1 is none")
    top_p: Float | None = None
    top_k: Int | None = None
    min_p: Float | None = None
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Int | None = None
    presence_penalty: Float | None = row("as in OpenAI's API and in vLLM")
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    logit_bias: Annotated[dict[str, float], few(1024)] | None = None
    bad_words: Annotated[list[Label], Field(max_length=256, fail_fast=True)] | None = None
    allowed_token_ids: TokenIds | None = None
    stop: Annotated[
        Text | Annotated[list[Text], Field(max_length=64, fail_fast=True)] | None,
        WithJsonSchema({"anyOf": [*_STRINGS, {"type": "null"}]}),
    ] = row("no part of a stop string is ever streamed, however the text is split into events; empty ones are ignored")
    stop_token_ids: FewTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = row(
        "`include_usage` adds a last event with usage and counters; `continuous_usage_stats` adds usage to each event"
    )
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[Int, Field(ge=1, le=1 << 20)] | None = None
    prompt_logprobs: Count | None = row("as in vLLM, from the model itself, before temperature and penalties")
    logprob_token_ids: FewTokenIds | None = None
    response_format: dict[str, Any] | None = row(
        "`json_object`, `json_schema`, see [formats](../tools.md#formats); or vLLM's `json`, `regex`, `choice`, "
        "`grammar` (Lark or GBNF), `json_object`, with `disable_any_whitespace` and `whitespace_pattern`"
    )
    structured_outputs: dict[str, Any] | None = None
    prediction: Prediction | None = row(
        "a text that the output may resemble: used as draft tokens, never forced; usage reports how much was used"
    )
    speculative: SpeculativeFields | None = row(
        '`{"tree": "off"}`: the token tree for this request, see [Serving](../serving.md#speculation-by-request)'
    )
    trace: bool | None = row("events contain the token trees of their steps")
    cache_salt: Label | None = row("only requests with the same salt share cached prefixes")
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1, le=2**31)] | None = row(
        'keeps the last tokens of a longer prompt (`"right"`: the first); -1 keeps what leaves room for the output; '
        'in responses, `truncation: "auto"` is -1'
    )
    truncation_side: Literal["left", "right"] | None = None
    priority: Annotated[Int, Field(ge=-(2**31), lt=2**31)] | None = row("as in vLLM; lower priorities go first")
    request_id: Label | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    slo: SLOFields | None = row(
        'latency targets in milliseconds, `{"ttft": 500, "tpot": 50}`, see [serving](../serving.md)'
    )

    def check(self) -> dict[str, str]:
        """Check the fields and return the headers that the response gets because of them."""
        unknown = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        for name, value in unknown.items():
            if name in REFUSED and value not in (False, [], ""):
                raise unsupported(name, REFUSED[name])
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs: not in a stream; leave one of them out")
        ignored = sorted(name for name in unknown if name not in HARMLESS and name not in CONSTRAINTS)
        if self.stream_options is not None:
            ignored += [f"stream_options.{name}" for name in self.stream_options.model_extra or ()]
            ignored += [] if self.stream else ["stream_options"]
        return with_ignored({}, [*ignored, *ignored_keys("response_format", self.response_format)])

    @property
    def constraints(self) -> dict[str, Any] | None:
        """The "structured_outputs" field, with what was given under other names."""
        given = {CONSTRAINTS[name]: value for name, value in (self.model_extra or {}).items() if name in CONSTRAINTS}
        given = {name: value for name, value in given.items() if value is not None and value is not False}
        return given | (self.structured_outputs or {}) if given else self.structured_outputs

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
        Field(
            description="text, token ids, or a list of either; each has its own choices. An empty text is the "
            "tokenizer's BOS token"
        ),
    ]
    best_of: Int | None = row("the same as `n`: outputs are not ranked")
    logprobs: Count | None = row(
        "from the model itself, before temperature and penalties, with as many of the most probable tokens; in chat "
        "`top_logprobs` is their number. `echo` with `max_tokens` 0 scores a prompt"
    )
    echo: bool | None = None
    suffix: str | None = row(
        "fill-in-the-middle, if the tokenizer has the tokens for it, after the tokens that it puts before every text"
    )
    return_progress: Progress = None

    @property
    def hides_output(self) -> bool:
        """True if the request asks for the prompt only (`echo` with a limit of 0 tokens)."""
        return bool(self.echo) and self.token_limit == 0


class ChatFields(SharedFields):
    """The body of a request to /v1/chat/completions."""

    prompt_field = "messages"
    messages: Annotated[
        Objects,
        Field(description="roles system, developer, user, assistant, tool; content is text, or parts of type text"),
    ]
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    return_progress: Progress = None
    tools: Objects | None = row(
        "arguments match the function's schema: they are generated under a grammar. Tools of a service are ignored"
    )
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Objects | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = row("JSON for names that the template reads")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Label | None = row("the thoughts of models that think, see [tools](../tools.md#thoughts)")
    enable_thinking: bool | None = None
    thinking_token_budget: ThinkingBudget = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: Label | None = None
    reasoning: dict[str, Any] | None = None
    modalities: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = row('only `["text"]`')

    @property
    def shows_thoughts(self) -> bool:
        """True if thoughts are a part of the response."""
        return self.include_reasoning is not False and (self.reasoning or {}).get("exclude") is not True

    @property
    def separates_thoughts(self) -> bool:
        """True if thoughts are separate from the content. The fields are SGLang's and llama.cpp's."""
        return self.separate_reasoning is not False and self.reasoning_format != "none"


def check_single(fields: SharedFields, refused: Mapping[str, str]) -> None:
    """Check the fields of an API without choices.

    Args:
        refused: The remedies for further fields that this API has no place for.
    """
    remedies = dict.fromkeys(_OF_CHOICES, USE_CHAT) | dict(refused)
    for name, remedy in remedies.items():
        if getattr(fields, name, (fields.model_extra or {}).get(name)) not in (None, False):
            raise unsupported(name, remedy)
    if fields.n not in (None, 1):
        raise RequestError("n: a response has one output; send several requests")


Fields = TypeVar("Fields", bound=SharedFields)


def as_fields(kind: type[Fields], fields: Mapping[str, Any]) -> Fields:
    """Return the fields of a request of another API as those of an endpoint."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from error
