"""Sampling parameters: what is refused, by name, and what they say of themselves."""

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from specinfer.core.limits import SLO
from specinfer.core.sampling import EFFECTS, MAX_LOGPROBS, Effect, SamplingParams
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.ops.logits import DEVICE_FIELDS

NAN, INF = math.nan, math.inf
# A finite number is wanted: everything that is not one, and the range's outside.
NO_FLOAT: list[Any] = [NAN, INF, -INF, "1", None, True, [1.0], 1j]
NO_INT: list[Any] = [NAN, INF, 1.5, 1.0, "1", True, [1], 2**70 * 1.0]
REFUSED: dict[str, list[Any]] = {
    "n": [*NO_INT, None, 0, -1, 129, 10**30],
    "temperature": [*NO_FLOAT, -0.1, -1e-9, 100.1],
    "top_p": [*NO_FLOAT, -0.5, 1.0001],
    "top_k": [*NO_INT, None, -2],
    "min_p": [*NO_FLOAT, -0.1, 1.1],
    "presence_penalty": [*NO_FLOAT, -2.1, 2.1],
    "frequency_penalty": [*NO_FLOAT, -2.1, 2.1],
    "repetition_penalty": [*NO_FLOAT, 0.0, 1e-40, 0.0099, -1.0, 100.5],
    "logit_bias": [{-1: 0.0}, {True: 0.0}, {1.5: 0.0}, {"x": 0.0}, {"-1": 0.0}, {3: NAN}, {3: 100.5}, {3: "1"}],
    "allowed_token_ids": [3, [], [-1], [True], [1.0], ["1"], [3, None]],
    "seed": [*NO_INT, 2**63, -(2**63) - 1],
    "stop": [3, [1], [None], b"x"],
    "stop_token_ids": [3, [-1], [False], [2.0], ["1"]],
    "max_tokens": [*NO_INT, 0, -1, -(10**30)],
    "min_tokens": [*NO_INT, None, -1, 17],  # max_tokens is 16
    "logprobs": [*NO_INT, -1, MAX_LOGPROBS + 1],
    "prompt_logprobs": [*NO_INT, -1, MAX_LOGPROBS + 1],
    "bad_words": [3, "a", [1], [None], {"a": 1}],
    "tree": ["", "0", "1,x", "best-first", "9999", 3],
    "slo": [3, {}, {"ttft": 0}, {"tpot": -1.0}, {"tpot": True}, {"ttft": NAN}, {"e2el": 5}, "ttft", "tpot:x"],
    "prediction": [3, [-1], [True], [1.0], ["a"], {"a": 1}, b"x"],
    "ignore_eos": ["false", 1, None],
    "skip_special_tokens": ["no", 0, None],
    "include_stop_str_in_output": ["true", None],
    "output_kind": [1, "DELTA", None],
    "structured_outputs": [
        *({}, {"json_object": False}, {"regex": "a", "choice": ["b"]}, {"pattern": "a"}, {3: "a"}, "a", 3),
        *({"regex": ""}, {"regex": 3}, {"grammar": ""}, {"grammar": b"x"}, {"json_object": "yes"}),
        *({"json_object": 1}, {"json_object": 1.0}, {"json_object": 0, "regex": "a"}),
        *({"choice": []}, {"choice": "abc"}, {"choice": [""]}, {"choice": [3]}, {"choice": ["\ud800"]}),
        *({"json": "{"}, {"json": "[]"}, {"json": True}, {"json": {"a": NAN}}, {"json": {"a": {1}}}),
        *({"json": '{"a":' * 100_000}, {"json": '{"const": ' + "9" * 5000 + "}"}, {"regex": "\ud800"}),
    ],
}


def test_numbers_of_numpy_and_tensors_are_pythons() -> None:
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), top_k=torch.tensor(3), ignore_eos=np.bool_(True),
        stop_token_ids=np.array([1, 2]), logit_bias={np.int32(3): np.float64(1.5)}, slo=SLO(ttft=np.float32(5)),
    )  # fmt: skip
    plain = SamplingParams(
        n=2, temperature=0.5, top_k=3, ignore_eos=True, stop_token_ids=[1, 2], logit_bias={3: 1.5}, slo=SLO(ttft=5.0)
    )
    assert repr(params) == repr(plain)
    with pytest.raises(ValueError, match=r"^top_k must be at least -1, not -2"):
        SamplingParams(top_k=np.int64(-2))


@pytest.mark.parametrize("array", [np.array([1, 3]), np.array(["1", "3"]), torch.tensor([1, 3])], ids=repr)
@pytest.mark.parametrize("field", ["tree", "structured_outputs", "output_kind", "logit_bias", "slo"])
def test_arrays_are_refused_by_the_name_of_the_field(field: str, array: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}.* \['?1'?, '?3'?\]"):
        SamplingParams(**{field: array})


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in REFUSED.items() for value in values],
    ids=lambda x: x if isinstance(x, str) else repr(x)[:20],
)
def test_refuses_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "seed", "max_tokens"])
def test_none_is_as_if_left_out(field: str) -> None:
    """vLLM's own defaults for these are None, so parameters moved over from there may hold it."""
    params = SamplingParams(**{field: None})
    assert not any(params.named_token_ids().values())
    assert params.stop_strings == ()
    assert params.is_plain_greedy is False
    assert SamplingParams(**{field: None}, temperature=0.0).is_plain_greedy


@pytest.mark.parametrize(
    ("given", "seed"), [(0, 0), (7, 7), (-1, None), (None, None), (-2, 2**63 - 2), (2**63 - 1, 2**63 - 1)]
)
def test_a_seed_may_be_negative_and_minus_one_is_none(given: int | None, seed: int | None) -> None:
    assert SamplingParams(seed=given).seed == seed


def test_no_nucleus_is_greedy() -> None:
    params = SamplingParams(top_p=0, temperature=0.7)
    assert params.is_plain_greedy
    assert not params.truncates
    assert dataclasses.replace(params, n=2).is_greedy


def test_empty_texts_are_left_out() -> None:
    assert SamplingParams(stop="").stop_strings == SamplingParams(stop=["", ""]).stop_strings == ()
    assert SamplingParams(stop=["a", ""], bad_words=["", "b"]) == SamplingParams(stop=["a"], bad_words=["b"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -1.0}, r"temperature must be from 0 to 100, not -1"),
        ({"top_p": -1}, r"top_p must be from 0 to 1, not -1"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens must be from 0 to 4, not 5"),
        ({"max_tokens": 0}, r"max_tokens must be at least 1, not 0"),
        ({"n": 2.0}, r"n must be a whole number, not 2.0"),
    ],
)
def test_message_gives_the_range(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}$"):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": value} for value in (0, 100.0, 1e-300)),
        *({"top_p": value} for value in (1, 1e-12)),
        *({"top_k": value} for value in (-1, 10**9)),
        *({"repetition_penalty": value} for value in (100, 0.01)),
        *({"max_tokens": None, "min_tokens": 10**6}, {"max_tokens": 10**18}, {"min_tokens": 16}),
        *({"seed": value} for value in (0, 2**63 - 1)),
        *({"logprobs": value} for value in (0, MAX_LOGPROBS)),
        *({"tree": value} for value in ("off", "auto", "1,1,3", "best-first:32")),
        *({"prediction": value} for value in ("", (3, 4))),
        *({"min_p": 1}, {"n": 128}, {"prompt_logprobs": 0}, {"slo": SLO(ttft=1)}),
    ],
    ids=repr,
)
def test_accepts_the_ends_of_each_range(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert all(getattr(params, name) == value for name, value in fields.items())


def test_an_assignment_is_refused_with_the_remedy() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError, match=r"^max_tokens: .* dataclasses.replace\(params, max_tokens=100\)"):
        params.max_tokens = 100  # type: ignore[misc]
    for copied in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert copied == params
    assert dataclasses.replace(params, max_tokens=100).max_tokens == 100


def test_latency_targets_are_read_from_text_and_dicts() -> None:
    params = SamplingParams(slo={"ttft": 500, "tpot": 50.0})
    assert params.slo == SLO.parse("ttft:500,tpot:50") == SLO(ttft=500, tpot=50)
    assert SLO.parse(None) is None


def test_takes_lists_strings_and_json_keys() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 9], allowed_token_ids=range(5), logit_bias={"7": 1, 8: -2.5})
    assert params.stop_strings == ("end",)
    assert params.stop_token_ids == (3, 9)
    assert params.allowed_token_ids == (0, 1, 2, 3, 4)
    assert params.logit_bias == {7: 1.0, 8: -2.5}
    assert params.named_token_ids() == {
        "stop_token_ids": (3, 9), "logprob_token_ids": (), "logit_bias": (7, 8),
        "allowed_token_ids": (0, 1, 2, 3, 4),
    }  # fmt: skip
    assert SamplingParams(stop=["a", "bc"]).stop_strings == ("a", "bc")
    assert not any(SamplingParams().named_token_ids().values())


def test_later_changes_of_a_list_do_not_reach_the_parameters() -> None:
    ids, bias = [1, 2], {1: 1.0}
    params = SamplingParams(stop_token_ids=ids, logit_bias=bias)
    ids.append(3)
    bias[1] = 9.0
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {1: 1.0}


@pytest.mark.parametrize(
    "field",
    [
        *(
            {"presence_penalty": 0.1},
            {"frequency_penalty": -0.1},
            {"repetition_penalty": 1.1},
            {"logit_bias": {1: 1.0}},
        ),
        *({"allowed_token_ids": [1]}, {"min_tokens": 1}, {"temperature": 0.5}, {"bad_words": ["a"]}),
        {"structured_outputs": {"regex": "a"}},
    ],
    ids=repr,
)
def test_plain_greedy_is_the_argmax_of_bare_logits(field: dict[str, Any]) -> None:
    assert SamplingParams(temperature=0.0).is_plain_greedy
    assert not SamplingParams(**({"temperature": 0.0} | field)).is_plain_greedy


def test_top_p_and_top_k_do_not_change_the_argmax() -> None:
    assert SamplingParams(temperature=0.0, top_p=0.1, top_k=3, min_p=0.5, seed=3).is_plain_greedy


def test_schemas_go_only_with_a_grammar() -> None:
    asked = StructuredOutputsParams(grammar="start: @a", schemas={"a": {"type": "null"}})
    assert (asked.kind, asked.text) == (
        "grammars",
        '[["", "grammar", "start: @a"], ["a", "json", "{\\"type\\": \\"null\\"}"]]',
    )
    for wrong in ({"regex": "a", "schemas": {}}, {"grammar": "start: @a", "schemas": ["a"]}):
        with pytest.raises(ValueError, match="structured_outputs: schemas must map names"):
            StructuredOutputsParams(**wrong)  # type: ignore[arg-type]


def test_structured_outputs_are_one_text() -> None:
    def text(**fields: Any) -> tuple[str, str]:
        asked = SamplingParams(structured_outputs=fields).structured_outputs
        assert asked == StructuredOutputsParams(**fields)
        return asked.kind, asked.text

    assert text(regex="a|b") == ("regex", "a|b")
    assert text(json={"type": "object"}) == text(json='{"type": "object"}') == ("json", '{"type": "object"}')
    assert text(json_object=True) == ("json", '{"type": "object"}')
    assert text(choice=["a.", "\u00e9"]) == ("choice", r"a\x{2e}|\x{e9}")
    assert text(grammar='start: "a"', json_object=False)[0] == "grammar"


def test_later_changes_of_a_schema_do_not_reach_the_parameters() -> None:
    schema: dict[str, Any] = {"type": "string"}
    asked = StructuredOutputsParams(json=schema)
    schema["type"] = "number"
    assert asked.text == '{"type": "string"}'


def test_a_schema_nested_beyond_any_reader_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match=r"structured_outputs: json .* nested too deeply"):
        StructuredOutputsParams(json=schema)
    while schema:  # freed from outside in
        schema = schema.pop("items")


def test_the_effect_of_every_field_is_stated() -> None:
    """An added field belongs to `EFFECTS`; until devices apply it, requests with it take steps on the host."""
    assert set(EFFECTS) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert {name for name, effect in EFFECTS.items() if effect is not Effect.NONE} >= DEVICE_FIELDS
