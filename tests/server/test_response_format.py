"""Formats of answers: what becomes which constraint, and what is refused."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from parsing import is_response, reader_of
from specinfer.core.errors import RequestError
from specinfer.server.response_format import ignored_keys, structured_outputs_of
from talking import make_talker

READER = reader_of(make_talker())


def _json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


class City(BaseModel):
    name: Literal["Rome", "Paris"]
    near: "City | None" = None


def test_text_asks_nothing() -> None:
    assert structured_outputs_of(None) is None
    assert structured_outputs_of({"type": "text"}) is None
    asked = structured_outputs_of({"type": "text"}, {"choice": ["a"], "regex": None})
    assert is_response(READER, asked, "a")


def test_json_objects_and_schemas() -> None:
    asked = structured_outputs_of({"type": "json_object"})
    assert is_response(READER, asked, '{"a": [1, {}]}')
    assert not is_response(READER, asked, "[1]")
    for strict in (None, True, False):
        of_model = structured_outputs_of(_json_schema(City.model_json_schema(), strict=strict))
        assert is_response(READER, of_model, '{"name": "Rome", "near": {"name": "Paris", "near": null}}')
        assert not is_response(READER, of_model, '{"name": "Rome", "near": {"name": "Oslo"}}')


OSLO = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ({"type": "json_object", "schema": OSLO}, []),
        ({"type": "json_object", "json_schema": {"name": "x", "schema": OSLO}}, []),
        ({"type": "json_object", "json_schema": OSLO}, []),
        ({"type": "json_schema", "schema": OSLO, "name": "x", "strict": True}, []),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": True}, "schema": OSLO}, []),
        ({"type": "json_schema", "json_schema": OSLO}, []),
        (_json_schema(OSLO, description="d", odd=1) | {"foo": 2, "bar": None}, ["foo", "json_schema.odd"]),
    ],
)
def test_a_schema_is_obeyed_wherever_it_is(given: dict[str, Any], ignored: list[str]) -> None:
    for field in ("response_format", "text.format"):
        asked = structured_outputs_of(given, None, field)
        assert is_response(READER, asked, '{"city": "Oslo"}')
        assert not is_response(READER, asked, '{"city": "Rome"}')
        assert not is_response(READER, asked, '{"city": "Oslo", "land": 1}'), "objects are closed"
        assert ignored_keys(field, given) == [f"{field}.{name}" for name in ignored]


def test_keys_without_effect_are_named() -> None:
    assert ignored_keys("f", {"type": "text", "schema": {}, "strict": None}) == ["f.schema"]
    assert ignored_keys("f", {"type": "json_object", "foo": 1}) == ["f.foo"]
    assert ignored_keys("f", None) == ignored_keys("f", {"type": "json_object"}) == []


def test_strict_keeps_to_every_word() -> None:
    schema = {"type": "object", "not": {"required": ["a"]}}
    assert is_response(READER, structured_outputs_of(_json_schema(schema)), "{}")
    with pytest.raises(RequestError, match=r"^response_format.schema: json: not: no grammar"):
        is_response(READER, structured_outputs_of(_json_schema(schema, strict=True)), "{}")


@pytest.mark.parametrize(
    ("field", "fits", "fails"),
    [
        ({"json": {"type": "object"}}, '{"a": 1}', "1"),
        ({"json": json.dumps({"type": "integer"})}, "12", "a"),
        ({"regex": "[ab]+"}, "abba", "c"),
        ({"choice": ["yes", "no"]}, "no", "maybe"),
        ({"grammar": 'start: "a" | "b"'}, "b", "c"),
        ({"json_object": True}, "{}", "[]"),
        ({"json": OSLO, "disable_any_whitespace": True}, '{"city":"Oslo"}', '{"city": "Oslo"}'),
        ({"json": OSLO, "whitespace_pattern": "_?"}, '{_"city":"Oslo"}', '{ "city": "Oslo"}'),
        ({"json_object": True, "disable_additional_properties": True, "disable_fallback": False}, "{}", "[]"),
        ({"regex": "a", "structural_tag": None, "whitespace_pattern": None}, "a", "b"),
    ],
)
def test_vllms_field(field: dict[str, Any], fits: str, fails: str) -> None:
    asked = structured_outputs_of(None, field)
    assert is_response(READER, asked, fits)
    assert not is_response(READER, asked, fails)


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        (3, None, "response_format: must be an object"),
        ({}, None, "response_format: type"),
        ({"type": "structural_tag"}, None, "response_format: type .*structural_tag"),
        ({"type": "json_schema"}, None, "response_format: schema is missing"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, None, "response_format: schema is missing"),
        (_json_schema({}, strict="yes"), None, "response_format: strict"),
        (_json_schema({}) | {"json_schema": {"name": 3, "schema": {}}}, None, "response_format: name"),
        (_json_schema([]), None, "response_format.schema: must be"),
        (_json_schema({"enum": ["a"] * 5000}), None, "response_format.schema: enum"),
        (None, 3, "structured_outputs: must be an object"),
        (None, {}, "structured_outputs: give exactly one"),
        (None, {"json": {}, "regex": "a"}, "structured_outputs: give exactly one"),
        (None, {"choice": []}, "structured_outputs: choice is empty"),
        (None, {"choice": ["a"] * 5000}, "structured_outputs: choice has"),
        (None, {"regex": 3}, "structured_outputs: regex"),
        (None, {"json": {"enum": ["a"] * 5000}}, "structured_outputs: json: enum"),
        (None, {"regex": "a", "whitespace_pattern": 3}, "structured_outputs: whitespace_pattern must be text"),
        (None, {"schemas": {}}, "structured_outputs: schemas is not known"),
        (None, {"field": "a"}, "structured_outputs: field is not known"),
        (None, {"structural_tag": {}}, "structured_outputs: structural_tag is not known"),
        ({"type": "json_object"}, {"regex": "a"}, "structured_outputs: a response has one format"),
    ],
)
def test_formats_are_refused(given: Any, field: Any, said: str) -> None:
    with pytest.raises(RequestError, match=f"^{said}"):
        structured_outputs_of(given, field)
