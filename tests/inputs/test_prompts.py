"""What goes with a prompt beside its tokens: bad words, a prediction, a cache salt, a grammar; and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from specinfer.core.errors import RequestError
from specinfer.core.sampling import SamplingParams
from specinfer.core.thought import Reasoning
from specinfer.inputs.arguments import as_list
from specinfer.inputs.jobs import JobReader
from specinfer.inputs.prompts import PromptReader
from tiny import EOS, VOCAB, make_tokenizer

TOKENIZER = make_tokenizer()
READER = PromptReader(TOKENIZER, VOCAB, 64, [EOS])
BARE = PromptReader(None, VOCAB, 64, [EOS])
JOBS, BARE_JOBS = (JobReader(reader, None, None, 0) for reader in (READER, BARE))


def _ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def test_bad_words_are_read_with_and_without_a_space_before() -> None:
    assert JOBS.bad_words_ids(SamplingParams()) == ()
    assert JOBS.bad_words_ids(SamplingParams(bad_words=["the", " cat"])) == (
        *(_ids("the"), _ids(" the"), _ids("cat"), _ids(" cat")),
    )
    assert _ids(" the") != (*_ids(" "), *_ids("the")), "a token of its own"
    assert JOBS.bad_words_ids(SamplingParams(bad_words=[" "])) == (_ids(" "),)
    assert JOBS.bad_words_ids(SamplingParams(bad_words=["a", "a"])) == (_ids("a"), _ids(" a"))


def test_a_prediction_is_text_or_tokens() -> None:
    def read(prediction: Any) -> tuple[int, ...]:
        return JOBS.prediction_ids(SamplingParams(prediction=prediction))

    assert read(None) == read("") == read([]) == ()
    assert read("the cat") == read(list(_ids("the cat"))) == _ids("the cat")
    assert BARE_JOBS.prediction_ids(SamplingParams(prediction="")) == ()
    assert BARE_JOBS.prediction_ids(SamplingParams(prediction=[3])) == (3,)
    assert len(read("a" * 64)) == len(read("a" * 10**6)) == 64
    for wrong in ([VOCAB], "\ud800"):
        with pytest.raises(RequestError, match="prediction: "):
            read(wrong)


def test_a_cache_salt_is_text() -> None:
    for prompt in ("the", [3, 4], {"prompt": "the"}, {"prompt": "the", "cache_salt": None}):
        assert JOBS.cache_salt(prompt) == ""
    salted = {"prompt_token_ids": [3, 4], "cache_salt": "mine"}
    assert JOBS.cache_salt(salted) == "mine"
    assert READER.read(salted, SamplingParams()) == [3, 4]
    for wrong in ("", 3, ["a"], "\0adapter-1"):
        with pytest.raises(RequestError, match="cache_salt: "):
            JOBS.cache_salt({"prompt": "the", "cache_salt": wrong})


def test_a_prompt_may_say_what_thought_its_outputs_have() -> None:
    thought = Reasoning("<think>", "</think>", (5,), is_open=True)
    plain = SamplingParams()
    (request,) = JOBS.read("a", {"prompt": "the", "reasoning": thought}, plain, 0).requests
    assert request.thought is not None
    assert request.thought.reasoning is thought
    for prompt in ("the", [3, 4], {"prompt": "the"}, {"prompt": "the", "reasoning": None}):
        assert JOBS.read("a", prompt, plain, 0).requests[0].thought is None
    for jobs, prompt, message in (
        (JOBS, {"prompt": "the", "reasoning": "deepseek_r1"}, "reasoning: give a Reasoning"),
        (BARE_JOBS, {"prompt_token_ids": [3], "reasoning": thought}, "reasoning: this model has no tokenizer"),
    ):
        with pytest.raises(RequestError, match=message):
            jobs.read("a", prompt, plain, 0)


def test_a_grammar_is_read_for_the_request_it_belongs_to() -> None:
    assert READER.grammar(SamplingParams()) is None
    params = SamplingParams(structured_outputs={"regex": "the"})
    first, second = READER.grammar(params), READER.grammar(params)
    assert first is not None
    assert second is not None
    first.advance(_ids("the")[0])
    assert first.mask(()).nonzero().flatten().tolist() == [EOS]
    assert second.mask(()).nonzero().flatten().tolist() == [*_ids("the")]


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("bad_words", ["a"], BARE_JOBS.bad_words_ids),
        ("prediction", "a", BARE_JOBS.prediction_ids),
        ("structured_outputs", {"regex": "a"}, BARE.grammar),
    ],
)
def test_what_needs_a_tokenizer_is_refused_without_one(name: str, value: Any, read: Callable[..., Any]) -> None:
    params = SamplingParams(**{name: value})
    with pytest.raises(RequestError, match=f"{name}: this model has no tokenizer"):
        read(params)


def test_bad_words_that_are_no_text_are_refused() -> None:
    with pytest.raises(RequestError, match="bad_words: the text is not valid Unicode"):
        JOBS.bad_words_ids(SamplingParams(bad_words=["\ud800"]))


@pytest.mark.parametrize("prompts", [b"def main", bytearray(b"x"), 3, None])
def test_bytes_are_no_token_ids(prompts: Any) -> None:
    with pytest.raises(RequestError, match=r"^prompts: give text, token ids, or a list of them, not "):
        as_list(prompts)
