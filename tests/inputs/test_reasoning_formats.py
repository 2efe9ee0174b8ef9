"""Formats of thoughts: found in templates, split from answers in pieces of every size, also before calls."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from call_templates import CALLS, FUNCTIONS, written
from parsing import parse, pieces_of
from specinfer.core.thought import Reasoning
from specinfer.inputs.chat.output_formats import OutputFormats
from specinfer.inputs.formats.calls import HERMES, QWEN3_CODER, SYSTEM_PROMPT_FORMAT
from specinfer.inputs.formats.parser import OutputParser
from specinfer.inputs.formats.reasoning import REASONING_FORMATS, ReasoningFormat, find_reasoning
from talking import make_talker

TAGS = {name: found for name, found in REASONING_FORMATS.items() if not found.has_channels}
DISTINCT = {found: name for name, found in reversed(TAGS.items())}
THINK = REASONING_FORMATS["think"]


def _reasoning(found: ReasoningFormat, *, is_open: bool) -> Reasoning:
    return Reasoning(found.start, found.end, (), is_open, found.has_channels)


def _split(parser: OutputParser, pieces: Sequence[str]) -> tuple[str, str, int]:
    found = parse(parser, pieces)
    return found.thought, found.content, len(found.calls)


@pytest.mark.parametrize("found", DISTINCT, ids=DISTINCT.values())
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("calls", [0, 2])
def test_thoughts_are_split_from_answers_and_calls_in_pieces_of_every_size(
    found: ReasoningFormat, is_open: bool, calls: int
) -> None:
    thought, answer = 'I think {"name": "a"}\n\n<b>', "So it is."
    after = f"\n{written(HERMES, CALLS[:calls])}\n" if calls else ""
    text = f"{'' if is_open else found.start}\n{thought}\n{found.end}\n\n{answer}{after}"
    for size in (*range(1, 12), len(text)):
        parser = OutputParser(HERMES if calls else None, FUNCTIONS, _reasoning(found, is_open=is_open))
        assert _split(parser, pieces_of(text, size)) == (thought, answer, calls)


@pytest.mark.parametrize("found", DISTINCT, ids=DISTINCT.values())
def test_a_thought_that_is_cut_off_is_all_thought_and_an_answer_without_one_all_answer(found: ReasoningFormat) -> None:
    text = f"{found.start}\nI think of <tool_call>"
    for size in (1, 5, len(text)):
        for call_format in (None, HERMES):
            parser = OutputParser(call_format, FUNCTIONS, _reasoning(found, is_open=False))
            assert _split(parser, pieces_of(text, size)) == ("I think of <tool_call>", "", 0)
            parser = OutputParser(call_format, FUNCTIONS, _reasoning(found, is_open=False))
            assert _split(parser, pieces_of(f" So {found.end} ends it. ", size))[1] == f" So {found.end} ends it. "


@given(st.text("</tik nhs>[THINK] \n\\ab", max_size=40), st.text("<think/>\nxy", max_size=20), st.integers(1, 9))
def test_the_split_does_not_depend_on_the_pieces(thought: str, answer: str, size: int) -> None:
    for found in DISTINCT:
        for is_open in (False, True):
            text = f"{found.start}{thought}{found.end}{answer}"
            wanted = _split(OutputParser(None, None, _reasoning(found, is_open=is_open)), [text])
            assert _split(OutputParser(None, None, _reasoning(found, is_open=is_open)), pieces_of(text, size)) == wanted
            if found.end not in thought + answer and found.start not in thought:
                assert wanted[0] == thought.strip()
                assert wanted[1] == answer.lstrip()


def test_whitespace_around_a_thought_is_not_part_of_it_and_that_within_is() -> None:
    text = "\n\n first\n\n  second \n\n</think>\n\n\nAnswer\n"
    for size in (1, 2, len(text)):
        parser = OutputParser(None, None, _reasoning(THINK, is_open=True))
        assert _split(parser, pieces_of(text, size)) == ("first\n\n  second", "Answer\n", 0)


def test_a_model_may_write_the_mark_that_the_prompt_has_already() -> None:
    parser = OutputParser(None, None, _reasoning(THINK, is_open=True))
    assert _split(parser, ["<think>\nHm.</think>Yes."]) == ("Hm.", "Yes.", 0)


# ------------------------------------------------------------------------------------------ finding

_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_START = f"{{% for m in messages %}}{_TURN}{{% endfor %}}<|im_start|>assistant\n"
_KNOWS = "{# <think> </think> #}"
_OPENS = _START + "<think>\n"
_MAY = _START + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


def _found(template: str, text: str, parser: str = "auto") -> Reasoning | None:
    tokenizer = make_talker(template)
    return OutputFormats(tokenizer, parser, "auto").reasoning(template, tokenizer.encode(text))


def test_whether_a_thought_is_open_follows_from_the_prompt() -> None:
    prompt = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    for template in (_OPENS + _KNOWS, _MAY):
        for text, is_open in ((prompt, False), (f"{prompt}<think>\n", True), (f"{prompt}<think>I am", True)):
            found = _found(template, text)
            assert found is not None
            assert (found.start, found.end, found.is_open) == ("<think>", "</think>", is_open)
        assert _found(template, f"{prompt}<think>\n\n</think>\n\n") is None, "the thought is over"
        assert _found(template, f"{prompt}<think>Hm.</think>So") == found.__class__(
            "<think>", "</think>", found.end_ids, False
        )
    assert _found(_START, prompt) is None
    assert _found(_OPENS + _KNOWS, prompt, "none") is None
    assert _found(_START, prompt, "qwen3") is not None


def test_a_users_text_opens_no_thought() -> None:
    tokenizer = make_talker(_MAY)
    formats = OutputFormats(tokenizer, "auto", "auto")
    ids = tokenizer.encode("<|im_start|>user\nWhat is <", add_special_tokens=False)
    ids += tokenizer.encode("think>?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    found = formats.reasoning(_MAY, ids)
    assert found is not None
    assert not found.is_open


def test_a_mark_in_an_earlier_message_opens_no_thought() -> None:
    for text in ("Write <think> first.", "<think>", "<think>\nHm."):
        for role in ("system", "user", "assistant"):
            prompt = f"<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n"
            for more, is_open in (("", False), ("<think>\n", True), ("<think>I am", True), ("Well,", False)):
                found = _found(_MAY, prompt + more)
                assert found is not None
                assert found.is_open is is_open


def test_the_tokens_that_end_a_thought_write_its_mark() -> None:
    for name, found in REASONING_FORMATS.items():
        tokenizer = make_talker(_START)
        made = OutputFormats(tokenizer, name, "auto").reasoning(_START, tokenizer.encode("?"))
        assert made is not None
        assert found.end in tokenizer.decode(made.end_ids)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{{ '<think>' }}{{ '</think>' }}", "think"),
        ("[THINK] [/THINK]", "mistral"),
        ("<seed:think></seed:think>", "seed_oss"),
        ("<|START_THINKING|><|END_THINKING|>", "cohere_command3"),
        ("<|channel>thought <channel|>", "gemma4"),
        ("<|channel|>analysis<|message|>", "openai_gptoss"),
        ("Here is my thought process: Here is my response:", "granite"),
    ],
)
def test_the_format_follows_from_the_template(text: str, name: str) -> None:
    assert find_reasoning(text) is REASONING_FORMATS[name]


def test_a_template_without_thoughts_has_no_format() -> None:
    assert find_reasoning(None) is None
    assert find_reasoning("{{ messages }}") is None


def test_thoughts_come_before_calls_of_other_formats() -> None:
    for call_format in (QWEN3_CODER, SYSTEM_PROMPT_FORMAT):
        text = f"Hm.\n</think>\n\n{written(call_format, CALLS)}"
        for size in (1, 6, len(text)):
            parser = OutputParser(call_format, FUNCTIONS, _reasoning(THINK, is_open=True))
            assert _split(parser, pieces_of(text, size)) == ("Hm.", "", 2)
