"""What requests may hold: strict types, limits, refusals by name, and how fields become parameters of sampling."""

import json
import logging
from typing import Any

import pytest
from pydantic import ValidationError

from serving import post
from specinfer import RequestError, SamplingParams
from specinfer.core.sampling import MAX_LOGPROBS, MAX_SEED
from specinfer.server import anthropic
from specinfer.server.conversations import Conversation
from specinfer.server.errors import ApiError
from specinfer.server.field_checks import IGNORED_HEADER, with_ignored
from specinfer.server.parameters import sampling_params, truncated
from specinfer.server.protocol import ChatFields, CompletionFields
from specinfer.server.responses_fields import ResponsesFields
from tests.server.dialects import DIALECTS
from tests.server.scripted_target import scripted


def fields_of(**fields: Any) -> CompletionFields:
    return CompletionFields.model_validate({"prompt": "a"} | json.loads(json.dumps(fields)))


def params_of(defaults: dict[str, float] | None = None, **fields: Any) -> SamplingParams:
    return sampling_params(fields_of(**fields), defaults or {}, max_tokens=None)


WHOLE = ["n", "seed", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "priority", "best_of",
         "truncate_prompt_tokens", "stream_interval"]  # fmt: skip
NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
SWITCHES = ["stream", "echo", "ignore_eos", "skip_special_tokens", "return_token_ids", "trace", "add_special_tokens"]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in WHOLE for value in ("five", "", "1.5", "9" * 21, "nan", True, 1.5, [1], {})]
    + [(name, value) for name in NUMBERS for value in ("half", "", True, [0.5])]
    + [(name, value) for name in SWITCHES for value in ("true", 1, 0, [])],
)
def test_values_of_another_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        fields_of(**{name: value})


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_may_be_text_or_have_a_point(name: str) -> None:
    assert fields_of(**{name: "5"}) == fields_of(**{name: 5.0}) == fields_of(**{name: "5.0"}) == fields_of(**{name: 5})


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_be_text(name: str) -> None:
    assert fields_of(**{name: "0.5"}) == fields_of(**{name: 0.5})
    assert fields_of(**{name: "1"}) == fields_of(**{name: 1})
    with pytest.raises(RequestError, match=name):
        params_of(**{name: "inf"})


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [1] * 20_000},
        {"include": [1] * 20_000},
        {"metadata": {str(i): 1 for i in range(20_000)}},
        {"logit_bias": {str(i): "1" for i in range(20_000)}},
    ],
)
def test_of_many_wrong_values_one_is_reported(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ResponsesFields.model_validate({"input": "a"} | fields)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["a"] * 65},
        {"stop": "a" * 1025},
        {"stop": [1]},
        {"stop_token_ids": [1] * 1025},
        {"stop_token_ids": ["1"]},
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        {"logit_bias": {"1": "1"}},
        {"logit_bias": {"1": True}},
        {"bad_words": ["a"] * 257},
        {"logprobs": MAX_LOGPROBS + 1},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"priority": 2**31},
        {"truncate_prompt_tokens": -2},
        {"cache_salt": "a" * 257},
        {"request_id": "a" * 257},
        {"speculative": {"tree": 5}},
        {"speculative": {"drafters": []}},
        {"prediction": {"type": "other", "content": "a"}},
        {"slo": {"tpot": 0}},
        {"slo": {"e2el": 5}},
        {"slo": "tpot:5"},
        {"stream_options": []},
        {"stream_options": {"include_usage": 1}, "stream": True},
    ],
)
def test_what_is_too_large_or_out_of_shape_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        fields_of(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 129}, "n must be from 1 to 128"),
        ({"n": 10**9}, "n must be from 1 to 128"),
        ({"temperature": 999999.0}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop": ["a" * 1000] * 5}, "stop: 5000 characters are too many; send 4096 at most"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
        ({"speculative": {"tree": "nonsense"}}, "tree"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction"),
        ({"slo": {}}, "slo"),
        ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction"),
    ],
)
def test_values_out_of_range_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        params_of(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": ["a"] * 10**6},
        {"logit_bias": {str(i): "a" for i in range(10**5)}},
        {"stop": [1] * 10**6},
        {"bad_words": [1] * 10**6},
        {"logprob_token_ids": ["a"] * 10**6},
    ],
)
def test_long_lists_of_nonsense_are_refused_quickly(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        CompletionFields.model_validate({"prompt": "a"} | fields)
    assert refused.value.error_count() <= 2


@pytest.mark.parametrize("name", ["messages", "tools", "functions", "modalities"])
def test_long_conversations_of_nonsense_are_refused_quickly(name: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatFields.model_validate({"messages": []} | {name: [1] * 10**6})
    assert refused.value.error_count() == 1


def test_null_is_the_default() -> None:
    everything = {name: None for name in CompletionFields.model_fields if name not in ("prompt", "max_tokens")}
    assert params_of(**everything) == params_of()
    assert fields_of(**everything).check() == {}


def test_a_request_comes_before_the_model_and_the_model_before_openai() -> None:
    recommended = {"temperature": 0.6, "top_k": 20}
    assert params_of(recommended).temperature == 0.6
    assert params_of(recommended, temperature=0.1) == SamplingParams(temperature=0.1, top_k=20, max_tokens=None)
    assert params_of().temperature == 1.0


@pytest.mark.parametrize(
    ("asked", "seed"), [(0, 0), (7, 7), (-1, None), (None, None), (-2, MAX_SEED - 1), (2**63 - 1, MAX_SEED)]
)
def test_seeds(asked: int | None, seed: int | None) -> None:
    assert params_of(seed=asked).seed == seed


def test_fields_of_vllm_and_our_own_reach_sampling() -> None:
    params = params_of(
        min_p=0.1, bad_words=["x"], allowed_token_ids=[1, 2], stop=["a", "b"], stop_token_ids=[3], ignore_eos=True,
        include_stop_str_in_output=True, skip_special_tokens=False, logprob_token_ids=[4], logit_bias={"5": -1},
        speculative={"tree": "1,1,3"}, prediction={"type": "content", "content": [{"type": "text", "text": "a"}] * 2},
    )  # fmt: skip
    assert params == SamplingParams(
        min_p=0.1, bad_words=["x"], allowed_token_ids=[1, 2], stop=["a", "b"], stop_token_ids=[3], ignore_eos=True,
        include_stop_str_in_output=True, skip_special_tokens=False, logprob_token_ids=[4], logit_bias={5: -1.0},
        tree="1,1,3", prediction="aa", max_tokens=None,
    )  # fmt: skip
    assert params.logprobs == 0


@pytest.mark.parametrize(
    "name",
    ["logits_processors", "prompt_embeds", "chat_template", "audio", "web_search_options", "structural_tag",
     "use_beam_search", "documents"],
)  # fmt: skip
def test_what_looks_like_a_promise_is_refused_by_name(name: str) -> None:
    with pytest.raises(ApiError, match=name) as refused:
        fields_of(**{name: {"a": 1}}).check()
    assert (refused.value.status, refused.value.param) == (400, name)
    assert refused.value.code == "unsupported_parameter"
    for empty in (None, False, [], ""):
        assert fields_of(**{name: empty}).check().get(IGNORED_HEADER) == (None if empty is None else name)


@pytest.mark.parametrize(
    ("name", "value", "constraint"),
    [
        ("guided_json", {"type": "integer"}, {"json": {"type": "integer"}}),
        ("guided_json", '{"type": "integer"}', {"json": '{"type": "integer"}'}),
        ("json_schema", {}, {"json": {}}),
        ("guided_regex", "[ab]+", {"regex": "[ab]+"}),
        ("regex", "[ab]+", {"regex": "[ab]+"}),
        ("guided_choice", ["a", "b"], {"choice": ["a", "b"]}),
        ("guided_grammar", 'start: "a"', {"grammar": 'start: "a"'}),
        ("grammar", 'start: "a"', {"grammar": 'start: "a"'}),
        ("guided_json_object", True, {"json_object": True}),
        ("guided_json_object", False, None),
        ("guided_json", None, None),
    ],
)
def test_constraints_under_other_names_are_served(name: str, value: Any, constraint: dict[str, Any] | None) -> None:
    fields = fields_of(**{name: value})
    assert fields.check() == {}
    assert fields.constraints == constraint
    both = fields_of(**{name: value}, structured_outputs={"choice": ["x"]}).constraints
    assert both == (constraint or {}) | {"choice": ["x"]}


def test_unknown_fields_are_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    given = {"foo_once": 1, "bar_once": [], "user": "me", "metadata": {}, "store": True, "service_tier": "auto"}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert fields_of(**given).check() == {IGNORED_HEADER: "bar_once, foo_once"}
        assert fields_of(bar_once=1, third_once=1).check() == {IGNORED_HEADER: "bar_once, third_once"}
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["bar_once, foo_once", "third_once"]
    assert fields_of(user="me").check() == {}


def test_the_log_and_the_header_have_a_limited_number_of_names(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specinfer.server.field_checks._logged", set())
    with caplog.at_level(logging.WARNING):
        headers = with_ignored({IGNORED_HEADER: "a, b"}, [f"k{i}" for i in range(15_000)])
        with_ignored({}, ["one more"])
    assert headers == {IGNORED_HEADER: "a, b, " + ", ".join(f"k{i}" for i in range(14))}
    assert len(caplog.records) == 1
    assert "k1023" in caplog.text
    assert "k1024" not in caplog.text


def test_parts_of_a_field_that_are_ignored_are_named() -> None:
    fields = {"response_format": {"type": "json_object", "odd": 1}, "stream_options": {"foo": 1}, "stream": True}
    assert fields_of(**fields).check() == {IGNORED_HEADER: "stream_options.foo, response_format.odd"}


def test_names_of_ignored_fields_cannot_break_a_header() -> None:
    headers = fields_of(**{"a\r\nSet-Cookie: b": 1, "\u20ac": 1, "x" * 9999: 1}).check()
    assert headers[IGNORED_HEADER] == "x" * 64 + ", ?"
    # HTTP servers refuse a header that begins or ends with a space.
    spaced = ["", "   ", " first", "y" * 63 + " y", "last ", " "]
    assert with_ignored({}, spaced) == {IGNORED_HEADER: "first, " + "y" * 63 + ", last"}
    assert with_ignored({}, ["", " "]) == {}


def test_fields_that_do_not_go_together() -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        fields_of(prompt_logprobs=1, stream=True).check()


@pytest.mark.parametrize("stream", [None, False])
def test_options_of_a_stream_without_a_stream_are_ignored(stream: bool | None) -> None:
    for options in ({}, {"include_usage": True}):
        assert fields_of(stream=stream, stream_options=options).check() == {IGNORED_HEADER: "stream_options"}
    assert fields_of(stream=True, stream_options={}).check() == {}
    assert fields_of(stream_options=None).check() == {}


def test_truncation_keeps_the_end_or_the_start() -> None:
    def kept(limit: int | None, max_model_len: int, max_tokens: int | None, **fields: Any) -> list[int]:
        return truncated(ids, fields_of(truncate_prompt_tokens=limit, **fields), max_model_len, max_tokens)

    ids = list(range(10))
    assert kept(None, 8, None) == ids
    assert kept(3, 100, None) == kept(3, 100, None, truncation_side="left") == [7, 8, 9]
    assert kept(3, 100, None, truncation_side="right") == [0, 1, 2]
    assert kept(99, 100, None) == ids
    assert kept(-1, 8, 2) == ids[-6:]
    assert kept(-1, 8, 2, truncation_side="right") == ids[:6]
    assert kept(-1, 100, 2) == ids
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        kept(0, 100, None)
    assert kept(-1, 8, 8) == kept(-1, 8, 10**9) == ids[-7:]
    auto = ResponsesFields.model_validate({"input": "a", "truncation": "auto"})
    assert truncated(ids, auto, 8, 2) == ids[-6:]


@pytest.mark.parametrize(
    "name",
    ["top_a", "typical_p", "length_penalty", "top_logprobs", "messages", "cache_prompt", "max_token", "temperatures",
     "top-p", "stops", "maxTokens", "max_new_tokens", "repeat_penalty", "presence_penalty_range", "stop_token",
     "guided_decoding_backend", "guided_whitespace_pattern"],
)  # fmt: skip
def test_other_unknown_fields_are_ignored(name: str) -> None:
    """A name that resembles a known one may be one of another engine."""
    assert fields_of(**{name: 1}).check() == {IGNORED_HEADER: name}
    assert fields_of(**{name: None}).check() == {}


def test_unknown_options_of_a_stream_are_ignored() -> None:
    headers = fields_of(stream=True, stream_options={"include_usages": True, "include_usage": True}).check()
    assert headers == {IGNORED_HEADER: "stream_options.include_usages"}


def test_messages_are_required() -> None:
    with pytest.raises(ValidationError, match="messages"):
        ChatFields.model_validate({})
    with pytest.raises(ValidationError, match="messages"):
        ChatFields.model_validate({"messages": "hello"})


def test_blocks_of_anthropic_are_counted_before_they_are_converted() -> None:
    message = {"role": "assistant", "content": [{"type": "tool_use"}] * 4097}
    fields = anthropic.CountFields.model_validate({"messages": [message] * 4})
    with pytest.raises(RequestError, match="16388 blocks of content are too many"):
        fields.as_chat(Conversation("messages"), None)


_LOOSE = {"type": "object", "properties": {"m": {"type": "object", "propertyNames": {"pattern": "^a"}}}}
_FORMAT = {"type": "json_schema", "schema": _LOOSE}
_FUNCTION = {"name": "f", "parameters": _LOOSE}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/chat/completions", {"tools": [{"function": _FUNCTION}]}, "tools[0].function.parameters"),
        ("/v1/responses", {"tools": [{"type": "function", **_FUNCTION}]}, "tools[0].parameters"),
        ("/v1/responses", {"text": {"format": _FORMAT}}, "text.format.schema"),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": _LOOSE}]}, "tools[0].input_schema"),
        ("/v1/messages", {"output_config": {"format": _FORMAT}}, "output_config.format.schema"),
        ("/api/chat", {"format": _LOOSE}, "format"),
    ],
)  # fmt: skip
def test_a_keyword_that_is_left_to_the_model_is_named_as_the_client_typed_it(
    path: str, fields: dict[str, Any], named: str
) -> None:
    with scripted(["{}"]) as llm:
        (answer,) = post(llm, path, DIALECTS[path].body(**fields))
    assert answer.status_code == 200, answer.text
    assert f"{named}.properties.m.propertyNames" in answer.headers[IGNORED_HEADER].split(", ")
