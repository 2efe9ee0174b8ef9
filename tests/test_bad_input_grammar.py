"""Grammars, schemas and tools that are none, too large or too deep; templates and their keywords."""

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hostile import BOMBS, CHAT, MESSAGES, PROMPT, TEXT, TOKENIZE, Attack, Attacked
from specinfer import LLM

pytestmark = pytest.mark.usefixtures("small_demo")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Attacked]:
    with Attacked(LLM("demo", tree="2,2,1")) as attacked:
        yield attacked


def structured(kind: str, value: Any, status: int | tuple[int, ...] = 400, **fields: Any) -> Attack:
    return Attack(PROMPT | {"structured_outputs": {kind: value}} | fields, status, "structured_outputs")


def formatted(given: Any, status: int | tuple[int, ...] = 400, path: str = CHAT) -> Attack:
    return Attack((MESSAGES if path == CHAT else PROMPT) | {"response_format": given}, status, "response_format", path)


def schema(given: Any, status: int | tuple[int, ...] = 400) -> Attack:
    return formatted({"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": given}}, status)


def tools(*given: Any, status: int | tuple[int, ...] = 400, names: str = "tools", **fields: Any) -> Attack:
    return Attack(MESSAGES | {"tools": list(given)} | fields, status, names, CHAT)


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": TOOL["function"] | changes}


def nested(levels: int, leaf: Any = 1) -> Any:
    for _ in range(levels):
        leaf = {"properties": {"a": leaf}}
    return leaf


# 21
def test_21_regular_expressions_that_are_none(server: Attacked) -> None:
    wrong: list[Any] = ["(", ")", "[", "a{", "*", "(?P<n", "(?<=a)b", "a{99999}{99999}", "[z-a]"]
    wrong += ["\\p{Nope}", "", 5, ["a"], {"a": 1}, "(?=a)", "\\1", "a" * 200_000, "[^\\s\\S]"]
    server.beside(*(structured("regex", value) for value in wrong))


# 21, 24: what takes others exponential time
def test_24_regular_expressions_that_take_others_long(server: Attacked) -> None:
    start = time.monotonic()
    values = ["(a+)+b", "(a|a)*c", "(a|aa)+$", "(.*)*x", "((a{1,100}){1,100}){1,100}", "(x+x+)+y", ".{5000}"]
    server.beside(*(structured("regex", value, (200, 400)) for value in values))
    assert time.monotonic() - start < 30


# 22
def test_22_schemas_that_are_none(server: Attacked) -> None:
    wrong: list[Any] = [5, "a", [], {"type": "nope"}, {"type": 5}, {"properties": 5}, {"$ref": "#/nope"}]
    wrong += [{"$ref": "http://127.0.0.1/a"}, {"type": "string", "pattern": "("}, {"enum": []}, {"allOf": 5}]
    wrong += [{"not": {}}, {"type": "string", "minLength": 5, "maxLength": 1}, {"items": "a"}]
    wrong += [{"type": "integer", "minimum": 5, "maximum": 1}, {"type": "number", "multipleOf": 0.123456789}]
    server.beside(*map(schema, wrong))
    server.beside(
        *map(
            formatted,
            [
                {"type": "json_schema"}, {"type": "json_schema", "json_schema": None},
                {"type": "json_schema", "json_schema": {}},
                {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}, {"type": "xml"}, {"type": None}, {},
                {"type": "json_schema", "json_schema": {"name": "a", "schema": None}}, {"type": ["text"]},
            ],
        ),
        *(Attack(MESSAGES | {"response_format": value}, 400, "response_format", CHAT) for value in ("json", 5, [])),
        formatted({"type": "grammar", "grammar": "start: /a/"}, path=TEXT),
    )  # fmt: skip


# 23, 29
def test_23_tools_that_are_none(server: Attacked) -> None:
    wrong: list[Any] = [5, "f", [], {}, {"type": "function"}, {"type": "function", "function": 5}]
    wrong += [{"type": "custom", "custom": {"name": 5}}, function(name=5), function(name=""), function(name="a b")]
    wrong += [function(name="a" * 257), function(name="f\n"), function(parameters=5)]
    wrong += [function(parameters={"type": "string"}, strict=True), function(description=5), function(strict="yes")]
    bad_schemas: list[Any] = [{"type": "object", "properties": {"a": {"type": "nope"}}}]
    bad_schemas += [{"properties": {"a": {"type": "string", "pattern": "("}}}, {"properties": {"a": {"type": 5}}}]
    server.beside(*map(tools, wrong))
    server.beside(
        *(tools(function(parameters=parameters, strict=True), tool_choice="required") for parameters in bad_schemas),
        *(tools(TOOL, names="tool_choice", tool_choice=choice) for choice in ("nope", 5, [], {}, {"type": "function"})),
        tools(TOOL, names="tool_choice", tool_choice={"type": "function", "function": {"name": "g"}}),
        tools(names="tool_choice", tool_choice="required"),
        tools(TOOL, names="functions", functions=[TOOL["function"]]),
        Attack(MESSAGES | {"functions": [5]}, 400, "tools|functions", CHAT),
    )


# 25: a stack that overflows would end the process
@pytest.mark.parametrize("levels", [30_000, 60_000])
def test_25_depth(server: Attacked, levels: int) -> None:
    server.beside(
        structured("grammar", "start: " + "(" * levels + '"a"' + ")" * levels),
        structured("regex", "(" * levels + "a" + ")" * levels, (200, 400)),
        structured("regex", "(?:" * levels),
        structured("json", json.dumps({"type": "object"})[:-1] + ',"a":' + "[" * levels),
        structured("grammar", "start: " + "[" * levels),
    )


# 25
def test_25_recursion_and_size(server: Attacked) -> None:
    start = time.monotonic()
    server.beside(
        *(structured("grammar", text) for text in ("start: start", "start: a\na: b\nb: a", "/b/")),
        *(structured("grammar", text) for text in ("start: (", "%", "\x00")),
        structured("grammar", 'start: start "a" | "a"', (200, 400)),
        structured("grammar", "start: /a/" + " | /a/" * 5000),
        structured("regex", "*a"),
        structured("grammar", "start: *"),
        structured("grammar", 'start: "a"{1000000000}', (200, 400)),
        Attack(schema(nested(60)).body, 400, "nested", CHAT),
        schema({"type": "object", "properties": {str(i): {"type": "string"} for i in range(20_000)}}),
        schema({"enum": list(range(3000))}),
        schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, (200, 400)),
        schema({"type": "array", "minItems": 10**9, "items": {"type": "integer"}}, (200, 400)),
        schema({"type": "string", "minLength": 10**9}, (200, 400)),
        schema({"anyOf": [{"type": "string", "pattern": f"(a|b)*{i}c{{50}}"} for i in range(500)]}, (200, 400)),
        tools(function(parameters=nested(60), strict=True), names="nested", tool_choice="required"),
        structured("choice", ["a"] * 3000),
        structured("choice", ["a" * 200_000]),
    )  # fmt: skip
    assert time.monotonic() - start < 30


# 26
def test_26_many_schemas_leave_no_memory_behind(server: Attacked) -> None:
    def body(i: int) -> Attack:
        return schema({"type": "object", "properties": {f"a{i}": {"type": "integer"}}}, 200)

    for i in range(0, 40, 10):
        server.beside(*(body(i + j) for j in range(10)))
    compiler = server.llm.reader._compiler
    assert compiler is not None
    assert compiler._made.cache_info().currsize <= compiler._made.cache_info().maxsize


# 27: guesses that no grammar allows never reach it, and where nothing may follow the request ends by itself
def test_27_grammars_with_speculation(server: Attacked) -> None:
    for temperature in (0, 1.0):
        fields = {"max_tokens": 40, "temperature": temperature, "seed": 5}
        for kind, value in (("regex", "[a-c]{3,30}[xy]"), ("choice", ["true", "false"]), ("json_object", True)):
            plain, guessed = server.beside(
                structured(kind, value, 200, **fields, speculative={"tree": "off"}),
                structured(kind, value, 200, **fields, speculative={"tree": "2,2,1"}),
            )
            assert plain.json()["choices"] == guessed.json()["choices"]
    server.beside(
        Attack(PROMPT | {"structured_outputs": {"regex": "a+"}, "allowed_token_ids": [5]}, 400, "grammar"),
        Attack(PROMPT | {"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, (200, 400), "grammar|bad_words"),
        Attack(PROMPT | {"structured_outputs": {"regex": "ab"}, "min_tokens": 4}, 200),
        Attack(PROMPT | {"structured_outputs": {"regex": "a{50}"}, "logit_bias": {"0": 100}, "ignore_eos": True}, 200),
    )


# 29
def test_29_two_constraints_or_unknown_ones(server: Attacked) -> None:
    both = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    server.beside(
        Attack(PROMPT | both, 400, "structured_outputs"),
        Attack(PROMPT | {"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs"),
        Attack(PROMPT | {"structured_outputs": {}}, 400, "structured_outputs"),
        Attack(PROMPT | {"structured_outputs": {"json_object": False}}, 400, "structured_outputs"),
        Attack(PROMPT | {"structured_outputs": {"guided": 1}}, 400, "structured_outputs"),
        Attack(PROMPT | {"structured_outputs": {"structural_tag": "{}"}}, 400, "structured_outputs"),
        Attack(PROMPT | {"structured_outputs": {"field": "x", "regex": "a"}}, 400, "structured_outputs"),
        Attack(
            PROMPT | {"structured_outputs": {"schemas": {"a": {}}, "grammar": "start: @a"}}, 400, "structured_outputs"
        ),
        *(
            Attack(PROMPT | {name: value}, 400, name)
            for name, value in {"structural_tag": {}, "logits_processors": ["os.system"]}.items()
        ),
        Attack(PROMPT | {"guided_json": {}, "guided_regex": "a"}, 400, "structured_outputs"),
        Attack(PROMPT | {"guided_regex": "("}, 400, "structured_outputs"),
        Attack(PROMPT | {"json_schema": {}, "response_format": {"type": "json_object"}}, 400, "structured_outputs"),
        Attack(PROMPT | {"guided_choice": 5}, 400, "structured_outputs"),
        Attack(PROMPT | {"guided_decoding_backend": "outlines:_is_test"}, 200),
    )


# 30
def test_30_templates_are_not_taken_from_requests(server: Attacked) -> None:
    endless = "{% for i in range(10**9) %}{% for j in range(10**9) %}a{% endfor %}{% endfor %}"
    server.beside(
        Attack(MESSAGES | {"chat_template": endless}, 400, "chat_template", CHAT),
        Attack(MESSAGES | {"chat_template": "{{ ''.__class__.__mro__ }}"}, 400, "chat_template", CHAT),
        Attack({"messages": MESSAGES["messages"], "chat_template": endless}, 400, "chat_template", TOKENIZE),
        Attack(MESSAGES | {"documents": [{"text": "a"}]}, 400, "documents", CHAT),
    )


# 31, on both endpoints alike
@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
def test_31_keywords_of_templates(server: Attacked, path: str) -> None:
    body = MESSAGES if path == CHAT else {"messages": MESSAGES["messages"]}
    wrong: list[Any] = [
        {name: "a"}
        for name in (
            "tokenize", "chat_template", "messages", "tools", "add_generation_prompt", "return_tensors", "padding",
            "self",
            "tokenizer_kwargs", "raise_exception", "strftime_now", "__class__", "eos_token", "range",
            "conversation", "return_dict", "max_length", "truncation", "continue_final_message",
        )
    ]  # fmt: skip
    wrong += [{f"a{i}": 1 for i in range(100)}, 5, "a", [1]]
    server.beside(
        *(Attack(body | {"chat_template_kwargs": value}, 400, "chat_template_kwargs", path) for value in wrong)
    )
    unread: list[Any] = [{name: "a" * 5000} for name in ("enable_thinking", "nope", "", "a b")]
    unread += [{"enable_thinking": value} for value in (False, {"a": 1}, [1])]
    server.beside(*(Attack(body | {"chat_template_kwargs": value}, 200, path=path) for value in unread))


# 32: the model's own template is sandboxed
@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ '%s'|attr('format')|attr('__globals__') }}",
        "{{ ''|attr('__class__') }}",
        "{% set x = messages|map(attribute='__class__')|list %}{{ x[0].__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_32_templates_run_in_a_sandbox(server: Attacked, template: str) -> None:
    reader = server.llm.reader
    reader.chat_template = template
    try:
        (answer,) = server.beside(
            Attack(MESSAGES | {"return_token_ids": True}, (200, 400), "messages|prompt: empty", CHAT)
        )
    finally:
        reader.chat_template = None
    if answer.status_code == 200:
        written = server.llm.tokenizer.decode(answer.json()["prompt_token_ids"])
        assert not any(word in written for word in ("class '", "<built-in", "uid=", "__main__", "Quitter"))


@pytest.fixture(scope="module")
def with_keys() -> Iterator[Attacked]:
    with Attacked(LLM("demo", drafters=None), api_keys=("hostile-key", "honest-key")) as attacked:
        yield attacked


@pytest.mark.covering(1)
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
@pytest.mark.parametrize("place", ["response_format", "tools", "structured_outputs"])
def test_a_bomb_of_one_key_is_answered_soon_and_does_not_delay_another(
    place: str, bomb: dict[str, Any], with_keys: Attacked
) -> None:
    attack = {
        "response_format": Attack(
            MESSAGES | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": bomb}}},
            path=CHAT,
        ),
        "tools": Attack(
            MESSAGES
            | {
                "tools": [function(parameters={"type": "object", "properties": {"x": bomb}, "required": ["x"]})],
                "tool_choice": "required",
            },
            path=CHAT,
        ),
        "structured_outputs": Attack(PROMPT | {"structured_outputs": {"json": bomb}}),
    }[place]
    hostile, honest = ({"authorization": f"Bearer {key}-key"} for key in ("hostile", "honest"))
    text = Attack({"prompt": "def f"}, 200, path=TOKENIZE, headers=honest)
    warm = Attack(PROMPT | {"structured_outputs": {"regex": "[ab]"}}, 200, headers=honest)
    with_keys.send(warm).raise_for_status()

    async def run() -> tuple[list[float], float]:
        start = time.monotonic()
        bombs = [asyncio.create_task(with_keys.deliver(replace(attack, headers=hostile))) for _ in range(3)]
        waits = []
        while not all(task.done() for task in bombs):
            before = time.monotonic()
            (await with_keys.deliver(text)).raise_for_status()
            waits.append(time.monotonic() - before)
            await asyncio.sleep(0.01)
        for task in bombs:
            assert task.result().status_code in (200, 400), task.result().text
        return waits, time.monotonic() - start

    waits, duration = with_keys.run(run())
    assert duration < 30, "each is answered in 2 s of processor time"
    assert statistics.median(waits) < 0.1
