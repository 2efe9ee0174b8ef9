"""Messages as clients send them: what has no place in a template is left out, and what was sent out comes back."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from parsing import reader_of
from specinfer.core.errors import RequestError
from specinfer.inputs.chat.messages import unread_keys
from specinfer.inputs.prompts import PromptReader
from talking import HERMES, LLAMA, MISTRAL, PLAIN, make_talker

USER = {"role": "user", "content": "Rome?"}
ANSWER = {"role": "assistant", "content": "Yes."}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
ITERATING = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": { '
    "{% for name, value in call.function.arguments.items() %}"
    '"{{ name }}": {{ value | tojson }}{% if not loop.last %}, {% endif %}{% endfor %} }}</tool_call>'
    "{% endfor %}{% endfor %}" + TOOLS
)
CALL = (
    '{{ call.id }}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>"
)
# A later message of the system is refused, and turns of the user and answers alternate, as Mistral's and Gemma's do.
ALTERNATING = (
    "{% set ns = namespace(turn='assistant') %}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('the system comes first') }}{% endif %}"
    "{% if message.role in ('user', 'assistant') and not message.tool_calls %}"
    "{% if message.role == ns.turn or not message.content %}{{ raise_exception('take turns') }}{% endif %}"
    "{% set ns.turn = message.role %}{% endif %}{{ message.role }}: {{ message.content }}{% if message.tool_calls %}"
    "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% set call = message.tool_calls[0] %}" + CALL + "{% endif %}{{ '\\n' }}{% endfor %}" + TOOLS
)


def make_reader(template: str) -> PromptReader:
    return reader_of(make_talker(template), 1 << 16)


READERS = {text: make_reader(text) for text in (PLAIN, HERMES, LLAMA, MISTRAL, ITERATING, ALTERNATING)}


def text_of(template: str, messages: Sequence[Any], **options: Any) -> str:
    reader = READERS.get(template) or make_reader(template)
    return str(reader.tokenizer.decode(reader.read_chat(messages, **options)))


def without_calls(text: str) -> str:
    return re.sub(r"<tool_call>.*?</tool_call>", "", text)


def system(text: Any) -> dict[str, Any]:
    return {"role": "system", "content": text}


def calling(arguments: Any, call_id: Any = "call_1", **fields: Any) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **fields}


# ------------------------------------------------------------------------------------------- extras


@pytest.mark.parametrize(
    "extra",
    [
        {"thinking_blocks": []}, {"reasoning_details": [{"type": "x"}]}, {"cache_control": {"type": "ephemeral"}},
        {"timestamp": 5}, {"metadata": {}}, {"foo": None}, {"annotations": []}, {"audio": None}, {"tool_calls": []},
        {"function_call": None}, {"refusal": None}, {"name": None}, {"name": 5}, {"prefix": True}, {"partial": True},
        {"provider_specific_fields": {"a": 1}}, {"parsed": {"a": 1}}, {"tool_call_id": None}, {"reasoning": ""},
        {"tool_calls": None, "images": []},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("message", [USER, ANSWER], ids=["user", "assistant"])
def test_keys_that_have_no_meaning_are_ignored(message: dict[str, Any], extra: dict[str, Any]) -> None:
    assert text_of(HERMES, [USER, message | extra]) == text_of(HERMES, [USER, message])


def test_keys_that_are_ignored_are_named_once() -> None:
    messages = [USER | {"timestamp": 1, "foo": None}, ANSWER | {"timestamp": 2, "id": "x", "annotations": []}]
    assert unread_keys([*messages, ANSWER | {"cache_control": {}}]) == ["cache_control", "timestamp"]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_that_is_null_is_empty(role: str) -> None:
    empty = text_of(PLAIN, [{"role": role, "content": ""}, USER])
    assert text_of(PLAIN, [{"role": role, "content": None}, USER]) == empty
    assert text_of(PLAIN, [{"role": role}, USER]) == empty
    assert text_of(PLAIN, [{"role": role, "content": [{"type": "text", "text": None}]}, USER]) == empty


@pytest.mark.parametrize(
    "content",
    [["a", "b"], [{"text": "a"}, {"type": None, "text": "b"}], [{"type": "text", "text": "a", "x": 1}, "b"]],
    ids=str,
)
def test_parts_of_text_have_many_forms(content: Any) -> None:
    assert "user\na\nb<|im_end|>" in text_of(PLAIN, [{"role": "user", "content": content}])
    assert "user\na<|im_end|>" in text_of(PLAIN, [{"role": "user", "content": {"type": "text", "text": "a"}}])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"degrees": 20, "sky": "\u20ac"}, '{"degrees": 20, "sky": "\u20ac"}'),
        ([{"id": 1}, {"id": 2}], '[{"id": 1}, {"id": 2}]'),
        ([1, "a", None], '[1, "a", null]'),
        (20.5, "20.5"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "json", "json": {"b": 1}}], 'a\njson: {"b": 1}'),
        (
            [{"type": "image_url", "image_url": {"url": "data:x"}}, "b"],
            "[image_url: not shown, this model reads text only]\nb",
        ),
    ],
)
def test_results_of_tools_may_be_of_any_type(content: Any, text: str) -> None:
    assert f"<tool_response>\n{text}\n</tool_response>" in text_of(
        HERMES, [USER, calling("{}"), RESULT | {"content": content}]
    )


IMAGE = {"type": "image_url", "image_url": {"url": "data:x"}}
SHEET = {"type": "document", "title": "Sheet", "source": {"type": "text", "data": "a,b"}}


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_images_of_earlier_messages_are_a_note(role: str) -> None:
    turns = [{"role": role, "content": [IMAGE, SHEET]}, USER]
    assert "[image_url: not shown, this model reads text only]\nSheet\na,b<|im_end|>" in text_of(PLAIN, turns)
    with_images = [{"role": role, "content": "a", "images": ["x"]}, USER]
    assert "a\n[image: not shown, this model reads text only]<|im_end|>" in text_of(PLAIN, with_images)
    assert "Sheet\na,b<|im_end|>" in text_of(PLAIN, [USER, {"role": role, "content": [SHEET]}])
    for newest in ([IMAGE], [{"type": "odd"}], [5]):
        with pytest.raises(RequestError, match=r"messages\[1\]\.content\[0\]\.type: only text is served"):
            text_of(PLAIN, [USER, {"role": role, "content": newest}])


# -------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize("arguments", ["null", None, "", "  ", {}, "{}"], ids=repr)
@pytest.mark.parametrize("template", [PLAIN, HERMES, LLAMA, MISTRAL, ITERATING], ids=range(5))
def test_calls_without_arguments_have_an_empty_object(template: str, arguments: Any) -> None:
    assert text_of(template, [USER, calling(arguments), RESULT]) == text_of(template, [USER, calling({}), RESULT])


CUT = [
    '{"city": "Ro',
    '{"',
    "[]",
    "3",
    '"text"',
    "not JSON",
    '{"a":' * 300 + "1" + "}" * 300,
    "[" * 99_999,
    '{"a": "\\ud800"}',
]


@pytest.mark.parametrize("arguments", CUT, ids=lambda text: text[:20])
def test_a_call_that_was_cut_off_is_accepted_back(arguments: str) -> None:
    assert f'"arguments": {arguments}}}' in text_of(PLAIN, [USER, calling(arguments), RESULT])
    for template in (HERMES, LLAMA, MISTRAL):
        assert json.dumps(arguments, ensure_ascii=False) in text_of(template, [USER, calling(arguments), RESULT])
    assert '"arguments": {  }}' in text_of(ITERATING, [USER, calling(arguments), RESULT]), (
        "the template needs an object"
    )
    assert '"arguments": { "a": 1 }}' in text_of(ITERATING, [USER, calling('{"a": 1}'), RESULT])


def test_ids_of_calls_are_text_or_are_made() -> None:
    of_call = "{% for call in message.tool_calls or [] %}" + CALL + "{% endfor %}"
    shows_ids = "{% for message in messages %}" + of_call + "{{ message.tool_call_id }}{% endfor %}" + TOOLS
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": None, "function": function}, {"function": function}, {"id": 7, "type": None, "function": function}]
    results = [{"role": "tool", "content": "a", "tool_call_id": one} for one in (None, "call_1", 7)]
    asked = [USER, {"role": "assistant", "tool_calls": calls}, *results]
    assert without_calls(text_of(shows_ids, asked)) == "call_0call_17call_0call_17"
    old = {"role": "assistant", "tool_calls": calls[:1], "function_call": function}
    assert without_calls(text_of(shows_ids, [USER, old])) == "call_0"
    named = [{"id": i, "function": {"name": i, "arguments": {}}} for i in "ab"]
    results = [{"role": "tool", "content": i, "name": i} for i in "ba"]
    names = (
        "{% for message in messages %}" + of_call + "{{ message.name }}{{ message.tool_call_id }} {% endfor %}" + TOOLS
    )
    text = text_of(names, [USER, {"role": "assistant", "tool_calls": named}, *results])
    assert without_calls(text).split() == ["ab", "bb", "aa"]
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    assert '"*** Begin"' in text_of(HERMES, [USER, {"role": "assistant", "tool_calls": [custom]}])


# ------------------------------------------------------------------------------------------- system


@pytest.mark.parametrize(
    "messages",
    [
        [USER, system("Be brief.")],
        [system("Be"), system("brief."), USER],
        [USER, ANSWER, system("Be brief."), USER],
        [system("Be"), USER, ANSWER, {"role": "developer", "content": "brief."}, USER],
    ],
    ids=range(4),
)
def test_messages_of_the_system_may_stand_anywhere(messages: list[dict[str, Any]]) -> None:
    text = text_of(ALTERNATING, messages)
    assert text.startswith("system: Be")
    assert "brief." in text.split("user: ")[0]
    assert text.count("system: ") == 1


def test_a_template_that_takes_messages_of_the_system_anywhere_gets_them_there() -> None:
    assert text_of(PLAIN, [USER, system("Be brief.")]).index("Rome?") < text_of(
        PLAIN, [USER, system("Be brief.")]
    ).index("brief")


@pytest.mark.parametrize(
    "ignores", ["{% if message.role != 'system' %}", "{% if message.role != 'system' or loop.first %}"]
)
def test_what_the_system_says_is_not_lost_in_a_template_that_leaves_it_out(ignores: str) -> None:
    template = (
        "{% for message in messages %}" + ignores + "{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}"
    )
    text = text_of(template, [system("Be brief."), USER, system("Be kind.")])
    assert "Be brief." in text
    assert "Be kind." in text


def test_a_template_without_a_system_gets_its_text_in_the_first_message() -> None:
    assert text_of(MISTRAL, [system("Be brief."), USER]).startswith("user: Be brief.\n\nRome?")
    assert text_of(MISTRAL, [system("Be brief.")]).startswith("user: Be brief.")


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([USER, USER], "user: Rome?\n\nRome?\n"),
        ([ANSWER, USER], "user:  \nassistant: Yes.\nuser: Rome?\n"),
        (
            [USER, calling("{}"), RESULT, USER],
            "user: Rome?\nassistant: call_1\ntool: sunny\nassistant:  \nuser: Rome?\n",
        ),
        (
            [USER, ANSWER, calling("{}"), RESULT, ANSWER],
            "user: Rome?\nassistant: Yes.call_1\ntool: sunny\nassistant: Yes.\n",
        ),
    ],
    ids=range(4),
)
def test_turns_that_a_template_needs_are_made(messages: list[dict[str, Any]], text: str) -> None:
    assert without_calls(text_of(ALTERNATING, messages)) == text


def test_calls_of_one_message_are_taken_apart_for_a_template_that_needs_it() -> None:
    calls = [{"id": i, "function": {"name": "f", "arguments": "{}"}} for i in "abc"]
    results = [RESULT | {"tool_call_id": i, "content": f"of {i}"} for i in "bac"]
    asked = [USER, {"role": "assistant", "content": "So.", "tool_calls": calls}]
    text = without_calls(text_of(ALTERNATING, [*asked, *results]))
    assert text == "user: Rome?\nassistant: So.a\nassistant: b\nassistant: c\ntool: of b\ntool: of a\ntool: of c\n"


def test_a_refusal_is_about_the_messages_as_they_were_sent() -> None:
    template = "{% for message in messages %}{{ raise_exception('not ' ~ messages | length) }}{% endfor %}"
    with pytest.raises(RequestError, match=r"^messages: the chat template refuses them: not 3$"):
        text_of(template, [USER, USER, system("a")])


# ----------------------------------------------------------------------------------------- thoughts


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["message.reasoning_content", "message.reasoning", "message['thinking']"])
def test_thoughts_have_the_name_that_the_template_reads(read: str, sent: str) -> None:
    template = "{% for message in messages %}({{ " + read + " }}){{ message.content }}{% endfor %}"
    assert text_of(template, [USER, ANSWER | {sent: "hm"}]) == "()Rome?(hm)Yes."
    assert text_of(template, [USER | {sent: "hm"}, ANSWER]) == "()Rome?()Yes."
    assert text_of(PLAIN, [USER, ANSWER | {sent: "hm"}]) == text_of(PLAIN, [USER, ANSWER])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "hm"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "reasoning", "text": "hm"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    ],
    ids=str,
)
def test_thoughts_may_be_parts_of_an_answer(part: dict[str, Any]) -> None:
    template = "{% for message in messages %}({{ message.reasoning_content }}){{ message.content }}{% endfor %}"
    answer = {
        "role": "assistant",
        "content": [part, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Yes."}],
    }
    assert text_of(template, [USER, answer]) == "()Rome?(hm)Yes."


def test_thoughts_that_a_template_refuses_are_left_out() -> None:
    template = (
        "{% for message in messages %}{% if message.thinking and message.content %}{{ raise_exception('not both') }}"
        "{% endif %}{{ message.content }}{% endfor %}"
    )
    assert text_of(template, [USER, ANSWER | {"reasoning": "hm"}]) == "Rome?Yes."


@pytest.mark.parametrize(
    ("content", "end"),
    [("<think>hm</think>It is", "It is"), ("It is ", "It is"), ("", "")],
    ids=["thought", "space", "empty"],
)
@pytest.mark.parametrize("filters", ["", " | trim"])
def test_a_last_message_goes_on_in_a_template_that_drops_its_thoughts(content: str, end: str, filters: str) -> None:
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content.split('</think>')[-1]"
        + filters
        + " }}<|im_end|>{% endfor %}"
    )
    text = text_of(
        template,
        [USER, {"role": "assistant", "content": content}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    kept = content.split("</think>")[-1]
    assert text == "user: Rome?<|im_end|>assistant: " + (end if filters else kept)


def test_a_last_message_that_the_template_leaves_out_cannot_go_on() -> None:
    with pytest.raises(RequestError, match=r"^continue_final_message: the chat template leaves the last message out"):
        text_of("{{ messages[0].content }}", [USER, ANSWER], add_generation_prompt=False, continue_final_message=True)


# ----------------------------------------------------------------------------------------- keywords


def test_keywords_that_the_template_does_not_read_are_ignored_and_named() -> None:
    reader = make_reader(PLAIN + "{{ xml_tools[0] if xml_tools }}")
    kwargs = {"thinking": True, "add_vision_id": 1, "enable_thinking": False, "xml_tools": ["f"], "": 1}
    assert reader.unread_kwargs(kwargs) == ["", "add_vision_id", "thinking"]
    assert reader.unread_kwargs(None) == []
    text = str(reader.tokenizer.decode(reader.read_chat([USER], template_kwargs=kwargs)))
    assert text.endswith("<think></think>f")
