"""JSON schemas: output has an end, objects are closed, and what no grammar can enforce is left to the model."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from specinfer import RequestError, StructuredOutputsParams
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.grammar.limits import MAX_DIGITS
from specinfer.core.grammar.state import Grammar
from specinfer.demo.pair import demo_folders
from specinfer.model.definition import load_tokenizer
from talking import make_talker

TOKENIZER = make_talker()  # a token for each byte
EOS = TOKENIZER.eos_token_id
COMPILER = GrammarCompiler(TOKENIZER, len(TOKENIZER), (EOS,))
LENIENT = {"x-guidance": {"lenient": True}}
NUMBER = {"type": "number"}


def _compile(schema: dict[str, Any], **options: Any) -> Grammar:
    return COMPILER.compile(StructuredOutputsParams(json=schema, field="f", **options))


def _fits(grammar: Grammar, text: str) -> bool:
    grammar = grammar.clone()
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if not grammar.mask(())[token]:
            return False
        grammar.advance(token)
    return bool(grammar.mask(())[EOS])


def _object(*, required: bool = True, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties} | ({"required": list(properties)} if required else {})


# ------------------------------------------------------------------------------------------------- ends

FINITE: list[dict[str, Any]] = [
    _object(z={"type": "null"}, f=NUMBER, b={"type": "boolean"}),
    _object(i={"type": "integer"}, j={"type": "integer", "minimum": 1}),
    _object(n={"type": "number", "minimum": 0, "maximum": 1}),
    _object(n={"type": "number", "exclusiveMinimum": 0}),
    _object(n={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
    _object(n={"type": "number", "exclusiveMaximum": 0}),
    _object(n={"type": "number", "minimum": 2, "exclusiveMinimum": True}),
    _object(n={"type": "number", "minimum": -2.5}),
    _object(n={"type": "number", "maximum": 5}),
    _object(n={"type": "number", "minimum": -90, "maximum": 90}),
    _object(n={"type": ["number", "null"], "minimum": -1, "exclusiveMaximum": 1}),
    _object(n={"type": "number", "multipleOf": 0.25}),
    _object(n={"type": "integer", "maximum": -5}),
    _object(n={"type": ["number", "null"]}),
    _object(e={"enum": ["a", "b", 3, None]}),
    _object(a={"type": "array", "items": NUMBER, "maxItems": 3}),
    _object(t={"type": "array", "prefixItems": [NUMBER, {"type": "boolean"}]}),
    _object(t={"type": "array", "items": [NUMBER, {"type": "boolean"}]}),
    _object(o=_object(x=NUMBER, y={"type": "integer"})),
    _object(a=NUMBER, b=NUMBER, required=False),
    _object(d={"type": "string", "format": "date"}),
    _object(),
    {"anyOf": [_object(k={"const": "a"}, x=NUMBER), _object(k={"const": "b"}, y=NUMBER)]},
    {"allOf": [_object(x=NUMBER), _object(y=NUMBER)]},
    {"$ref": "#/$defs/p", "$defs": {"p": _object(x=NUMBER)}},
    _object(p={"$ref": "#/$defs/p"}) | {"$defs": {"p": _object(q=NUMBER, required=False)}},
    {"type": "integer"},
    NUMBER,
]


@dataclass(frozen=True)
class _Demo:
    """The demo's tokenizer, with tokens of many spaces and digits."""

    compiler: GrammarCompiler
    texts: list[str]
    eos: int


@pytest.fixture(scope="module")
def demo() -> _Demo:
    tokenizer = load_tokenizer(demo_folders().target)
    assert tokenizer is not None
    eos, count = tokenizer.eos_token_id, len(tokenizer)
    return _Demo(GrammarCompiler(tokenizer, count, (eos,)), [tokenizer.decode([token]) for token in range(count)], eos)


@pytest.mark.parametrize(
    "likes", [(str.isspace, str.isdecimal), (str.isdecimal, str.isspace)], ids=["spaces", "digits"]
)
@pytest.mark.parametrize("schema", FINITE, ids=lambda schema: json.dumps(schema)[:60])
def test_a_model_that_never_wants_to_end_has_to(
    schema: dict[str, Any], likes: tuple[Callable[[str], bool], ...], demo: _Demo
) -> None:
    """It takes whitespace and zeros as long as it may, and the end only where nothing else is legal."""

    def dislike(token: int) -> tuple[bool, ...]:
        text = demo.texts[token]
        return token == demo.eos, *(not like(text) for like in likes), set(text) != {"0"}

    order = sorted(range(len(demo.texts)), key=dislike)
    grammar, said = demo.compiler.compile(StructuredOutputsParams(json=schema)), ""
    for _ in range(500):
        legal = grammar.mask(())
        token = next(token for token in order if legal[token])
        if token == demo.eos:
            break
        said += demo.texts[token]
        grammar.advance(token)
    assert token == demo.eos
    json.loads(said)


@pytest.mark.parametrize("schema", [NUMBER, {"type": "integer"}, {}, {"type": "number", "minimum": 1, "maximum": 3}])
def test_numbers_have_as_many_digits_as_an_integer_of_64_bits(schema: dict[str, Any]) -> None:
    grammar = _compile(_object(n=schema))
    digits = "1" + "0" * (MAX_DIGITS - 1) if schema.get("maximum") is None else "1." + "0" * MAX_DIGITS
    assert _fits(grammar, f'{{"n": {digits}}}')
    assert not _fits(grammar, f'{{"n": {digits}0}}')


@pytest.mark.parametrize("limit", [0, 5, -5, 100, 2.5, 1e-5, 1e15])
def test_exclusive_limits_are_exclusive(limit: float) -> None:
    number = repr(limit) if limit != 1e-5 else "0.00001"
    above = _compile(_object(n={"type": "number", "exclusiveMinimum": limit}))
    below = _compile(_object(n={"type": "number", "exclusiveMaximum": limit}))
    assert [_fits(grammar, f'{{"n": {number}}}') for grammar in (above, below)] == [False, False]
    step = max(1, abs(limit) / 2)
    assert [_fits(grammar, f'{{"n": {limit + step:.6f}}}') for grammar in (above, below)] == [True, False]
    assert [_fits(grammar, f'{{"n": {limit - step:.6f}}}') for grammar in (above, below)] == [False, True]


def test_digits_of_texts_and_of_other_constraints_are_not_limited() -> None:
    digits = "1" * (2 * MAX_DIGITS)
    assert _fits(_compile(_object(s={"type": "string"})), f'{{"s": "{digits}"}}')
    assert _fits(_compile(_object(s={"type": "string", "pattern": "^[0-9]{40}$"})), f'{{"s": "{digits}"}}')
    assert _fits(_compile(_object(n={"type": "integer", "minimum": 10**17})), f'{{"n": {digits[:18]}}}')
    assert _fits(COMPILER.compile(StructuredOutputsParams(regex="[0-9]+")), digits)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1,"b":[true]}', True),
        ('{ "a" : 1 , "b" : [ true ] }', True),
        ('{\n\n\t\t"a": 1,\n    "b": [\n' + " " * 20 + "true]}", True),
        ('{  "a":1,"b":[true]}', False),
        ('{\n\n\n"a":1,"b":[true]}', False),
        ('{"a":1,"b":[\n' + " " * 21 + "true]}", False),
    ],
)
def test_whitespace_has_the_limit_of_llama_cpp(text: str, fits: bool) -> None:
    schema = _object(a={"type": "integer"}, b={"type": "array", "items": {"type": "boolean"}})
    assert _fits(_compile(schema), text) is fits
    assert _fits(COMPILER.compile(StructuredOutputsParams(json_object=True)), text) is fits
    named = StructuredOutputsParams(grammar="start: @a", schemas={"a": schema})
    assert _fits(COMPILER.compile(named), text) is fits


def test_options_of_whitespace() -> None:
    schema = _object(a=NUMBER)
    assert _fits(_compile(schema, disable_any_whitespace=True), '{"a":1}')
    assert not _fits(_compile(schema, disable_any_whitespace=True), '{"a": 1}')
    tabs = _compile(schema, whitespace_pattern=r"\t{0,2}")
    assert _fits(tabs, '{\t\t"a":1}')
    assert not _fits(tabs, '{\t\t\t"a":1}')
    assert not _fits(tabs, '{"a": 1}')
    any_object = StructuredOutputsParams(json_object=True, disable_any_whitespace=True, disable_fallback=True)
    assert not _fits(COMPILER.compile(any_object), '{"a": 1}')
    named = {"grammar": "start: @a", "schemas": {"a": schema}, "disable_any_whitespace": True}
    assert not _fits(COMPILER.compile(StructuredOutputsParams(**named)), '{"a": 1}')
    with pytest.raises(RequestError, match="f: json: whitespace_pattern cannot be read, mend it: unclosed group"):
        _compile(schema, whitespace_pattern="(")
    with pytest.raises(ValueError, match="whitespace_pattern must be text"):
        _compile(schema, whitespace_pattern=3)
    assert _fits(COMPILER.compile(StructuredOutputsParams(regex="a +", disable_any_whitespace=True)), "a  ")


# ---------------------------------------------------------------------------------------------- objects

A, B = _object(a={"type": "integer"}), _object(b={"type": "integer"})


@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        (A, ['{"a":1}'], ['{"a":1,"b":2}', "{}"]),
        (A | {"additionalProperties": None}, ['{"a":1}'], ['{"a":1,"b":2}']),
        (A | {"additionalProperties": True}, ['{"a":1,"b":2}'], []),
        (A | {"additionalProperties": B}, ['{"a":1,"c":{"b":2}}'], ['{"a":1,"c":{"b":2,"d":3}}']),
        (A | {"unevaluatedProperties": True} | LENIENT, ['{"a":1,"b":2}'], []),
        (A | {"unevaluatedProperties": False}, ['{"a":1}'], ['{"a":1,"b":2}']),
        (A | {"propertyNames": {"maxLength": 3}} | LENIENT, ['{"a":1,"b":2}'], []),
        (A | {"required": ["a", "c"]}, ['{"a":1,"c":[]}'], ['{"a":1}', '{"a":1,"c":[],"d":1}']),
        (A | {"minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1}']),
        ({"type": "object"}, ['{"a":1}', "{}"], []),
        ({"type": "object", "properties": {}}, ["{}"], ['{"a":1}']),
        ({"type": "object", "properties": []}, ["{}"], ['{"a":1}']),
        ({"type": "object", "patternProperties": {"^x": NUMBER}}, ["{}", '{"xa":1,"xb":2}'], ['{"a":1}', '{"xa":"b"}']),
        ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"a":1,"b":2,"c":3}']),
        ({"allOf": [A]}, ['{"a":1}'], ['{"a":1,"b":2}']),
        (A | {"allOf": [B]}, ['{"a":1,"b":2}', '{"a":1,"b":2}'], ['{"a":1}', '{"a":1,"b":2,"c":3}']),
        (A | {"anyOf": [B, {"required": ["d"]}]}, ['{"a":1,"b":2}', '{"a":1,"d":2}'], ['{"a":1}', '{"a":1,"c":3}']),
        ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', '{"a":1,"c":1}']),
        ({"oneOf": [A, B]} | LENIENT, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}']),
        ({"type": "object", "anyOf": [A, {"additionalProperties": NUMBER}]}, ['{"c":1}'], ['{"c":"a"}']),
        ({"allOf": [A, {"additionalProperties": NUMBER}]}, ['{"a":1,"c":1}'], ['{"a":1,"c":"d"}']),
        (A | LENIENT | {"if": {"required": ["b"]}, "then": B}, ['{"a":1,"b":3}'], ['{"a":1,"d":3}']),
        (
            {"allOf": [{"$ref": "#/$defs/base"}, B], "$defs": {"base": A}},
            ['{"a":1,"b":2}'],
            ['{"b":2}', '{"a":1,"b":2,"c":3}'],
        ),
        (
            _object(x={"$ref": "#/$defs/base"}, y={"allOf": [{"$ref": "#/$defs/base"}, B]}) | {"$defs": {"base": A}},
            ['{"x":{"a":1},"y":{"a":1,"b":2}}'],
            ['{"x":{"a":1,"b":2},"y":{"a":1,"b":2}}', '{"x":{"a":1},"y":{"a":1,"b":2,"c":3}}'],
        ),
        (
            _object(v=NUMBER, next={"$ref": "#"}) | {"required": ["v"]},
            ['{"v":1,"next":{"v":2}}'],
            ['{"v":1,"next":{"v":2,"w":3}}'],
        ),
        ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"a":1,"b":2}]']),
        ({"prefixItems": [A, NUMBER], "items": {"type": "null"}, "type": "array"}, ['[{"a":1},2,null,null]'], ["[1]"]),
        ({"prefixItems": [NUMBER], "minItems": 2, "type": "array"}, ["[1,true,3]"], ["[1]"]),
        ({"const": {"properties": 1}}, ['{"properties":1}'], ["{}"]),
    ],
)  # fmt: skip
def test_objects_are_closed_unless_their_schema_says_otherwise(
    schema: dict[str, Any], fits: list[str], fails: list[str]
) -> None:
    grammar = _compile(schema)
    assert {text: _fits(grammar, text) for text in (*fits, *fails)} == dict.fromkeys(fits, True) | dict.fromkeys(
        fails, False
    )


# ------------------------------------------------------------------------------- what cannot be enforced


@pytest.mark.parametrize(
    ("schema", "ignored", "fits", "fails"),
    [
        ({"type": "string", "pattern": "^(?!x).*$"}, "pattern", ['"ab"'], ["1"]),
        ({"type": "string", "pattern": r"(a)\1", "maxLength": 2}, "pattern", ['"bc"'], ['"abc"']),
        ({"type": "string", "pattern": "("}, "pattern", ['"b"'], ["1"]),
        ({"type": "string", "pattern": 3}, "pattern", ['"b"'], ["1"]),
        ({"type": "string", "format": "credit-card", "minLength": 2}, "format", ['"ab"'], ['"a"']),
        ({"type": "string", "minLength": "2"}, "minLength", ['"a"'], ["1"]),
        ({"type": "any"}, "type", ['"a"', "1"], []),
        ({"type": ["int", "null"]}, "type", ["null"], ["1"]),
        ({"type": "number", "multipleOf": 999983}, "multipleOf", ["1.5"], ["null"]),
        ({"type": "number", "not": {"const": 3}}, "not", ["3"], ["null"]),
        ({"type": "array", "uniqueItems": True, "items": NUMBER}, "uniqueItems", ["[1,1]"], ["[null]"]),
        ({"$ref": "#/$defs/none"}, "$ref", ["1"], []),
        ({"$ref": "https://example.com/a.json"}, "$ref", ["1"], []),
        ({"enum": "abc", "type": "string"}, "enum", ['"d"'], ["1"]),
        ({"required": {"a": True}, "type": "object"}, "required", ["{}"], ["1"]),
        ({"properties": {"a": "text"}, "type": "object"}, "properties.a", ['{"a":1}'], ['{"b":1}']),
        (
            {"type": "object", "patternProperties": {"(?=a)": NUMBER, "^b": NUMBER}, "additionalProperties": False},
            "patternProperties.(?=a)", ['{"b":1,"a":"c"}'], ['{"b":"c"}'],
        ),
    ],
)  # fmt: skip
def test_the_smallest_part_is_left_to_the_model_or_refused_by_name(
    schema: dict[str, Any], ignored: str, fits: list[str], fails: list[str]
) -> None:
    for wrap, text in ((lambda schema: schema, "{}"), (lambda schema: _object(p=schema, q=NUMBER), '{{"p":{},"q":1}}')):
        place = ignored if text == "{}" else f"properties.p.{ignored}"
        grammar = _compile(wrap(schema) | LENIENT)
        assert grammar.ignored == [f"f.{place}"]
        assert all(_fits(grammar, text.format(each)) for each in fits)
        assert not any(_fits(grammar, text.format(each)) for each in fails)
        with pytest.raises(RequestError) as refused:
            _compile(wrap(schema))
        assert str(refused.value).startswith(f"f: json: {place}: ")
        assert str(refused.value).endswith("mend it or leave it out, or do without strict")


@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        (dict.fromkeys(("required", "properties", "enum", "format", "pattern", "$ref")) | NUMBER, ["1"], ["{}"]),
        ({"type": None, "enum": ["a"]}, ['"a"'], ["1"]),
        ({"type": ["string", None]}, ['"a"', "null"], ["1"]),
        ({"anyOf": [None, NUMBER]}, ["1"], ["null"]),
        ({"type": "object", "properties": {"a": None}, "required": ["a", None]}, ['{"a":1}'], ["{}", '{"b":1}']),
        ({"const": None}, ["null"], ["1"]),
        ({"type": "string", "required": {}, "items": 3, "minimum": "a", "uniqueItems": True}, ['"a"'], ["1"]),
        ({"type": ["number", "null"], "pattern": "(", "minLength": -1, "properties": 3}, ["1", "null"], ['"a"']),
        ({"type": "STRING", "$schema": "http://example.com/unknown", "$id": "a b"}, ['"a"'], ["1"]),
        ({"type": "integer", "format": "int64", "uniqueItems": False, "title": 3, "x-order": []}, ["1"], ["null"]),
        ({"type": "string", "required": True, "not": None, "default": None, "readOnly": True}, ['"a"'], ["1"]),
        (_object(a={"$ref": "#/$defs/x~1y%20z"}) | {"$defs": {"x/y z": NUMBER}}, ['{"a":1}'], ['{"a":"b"}']),
        (_object(a={"$ref": "#/$defs/n"}, b={"$defs": {"n": NUMBER}}), ['{"a":1,"b":0}'], ['{"a":"b","b":0}']),
        (_object(a={"$ref": "#n"}) | {"$defs": {"n": NUMBER | {"$anchor": "n"}}}, ['{"a":1}'], ['{"a":"b"}']),
        (_object(a={"$ref": "u:n"}) | {"$defs": {"n": NUMBER | {"$id": "u:n"}}}, ['{"a":1}'], ['{"a":"b"}']),
        (_object(a=NUMBER, b={"$ref": "#/properties/a"}), ['{"a":1,"b":2}'], ['{"a":1,"b":"c"}']),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-1", str(2**63 - 1)], ["null"]),
        ({"type": "number", "minimum": 0, "maximum": 1.7976931348623157e308}, ["1"], ["-1"]),
        ({"type": "string", "minLength": 2.0}, ['"ab"'], ['"a"']),
    ],
)  # fmt: skip
def test_null_is_as_missing_and_harmless_words_are_ignored_even_if_strict(
    schema: dict[str, Any], fits: list[str], fails: list[str]
) -> None:
    grammar = _compile(schema)
    assert grammar.ignored == []
    assert all(_fits(grammar, text) for text in fits)
    assert not any(_fits(grammar, text) for text in fails)


def test_a_schema_that_does_not_compile_is_left_to_the_model_but_for_its_type() -> None:
    impossible = _object(a={"type": "string", "minLength": 3, "maxLength": 2})
    grammar = _compile(impossible | LENIENT)
    assert (grammar.ignored, _fits(grammar, '{"b":1}'), _fits(grammar, "[]")) == (["f"], True, False)
    with pytest.raises(RequestError, match="f: json: cannot be read, mend it: "):
        _compile(impossible)


def test_one_schema_of_a_grammar_does_not_change_the_others() -> None:
    good, bad = _object(a=NUMBER), {"type": "array", "minItems": 2, "maxItems": 1} | LENIENT
    named = {"good": good, "bad": StructuredOutputsParams(json=bad, field="tools[1]")}
    grammar = COMPILER.compile(StructuredOutputsParams(grammar="start: @good @bad", schemas=named, field="tools"))
    assert grammar.ignored == ["tools[1]"]
    assert _fits(grammar, '{"a":1}[1,2,3]')
    assert not _fits(grammar, '{"b":1}[]')


def test_a_lenient_schema_that_takes_too_long_is_left_to_the_model_but_for_its_type() -> None:
    compiler = GrammarCompiler(TOKENIZER, len(TOKENIZER), (EOS,), has_trials=True)
    bomb = {"allOf": [{"type": "string", "pattern": f"a{{{i},}}.*b"} for i in range(1, 23)], "type": "string"}
    try:
        grammar = compiler.compile(StructuredOutputsParams(json=bomb | LENIENT, field="f"))
        assert (list(grammar.ignored), _fits(grammar, '"c"'), _fits(grammar, "1")) == (["f"], True, False)
        with pytest.raises(RequestError, match="f: json: takes more than"):
            compiler.compile(StructuredOutputsParams(json=bomb, field="f"))
    finally:
        compiler.close()
