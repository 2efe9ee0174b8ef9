"""A request: when it ends, what it counts."""

import pytest

from specinfer.core.request import FinishReason, Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.speculation import SpeculationStats
from specinfer.core.text import TextBuffer
from specinfer.core.tree import TokenTree
from tiny import make_request, make_tokenizer

TOKENIZER = make_tokenizer()


def _push(request: Request, tokens: list[int]) -> int:
    """Appends until the request ends; how many were taken."""
    for i, token in enumerate(tokens):
        request.append(token, None)
        if request.is_finished:
            return i + 1
    return len(tokens)


def _with_text(text: str, **fields: object) -> tuple[Request, int]:
    params = SamplingParams(**({"max_tokens": 50} | fields))
    request = make_request("0", [5], params, eos_token_ids=(1,))
    request.text = TextBuffer(TOKENIZER.decode, params.stop_strings, include_stop=params.include_stop_str_in_output)
    return request, _push(request, TOKENIZER.encode(text))


def test_ends_by_length_of_output_or_of_context() -> None:
    request = make_request("0", [1, 2], SamplingParams(max_tokens=3))
    assert request.max_new_tokens == 3
    assert _push(request, [9] * 5) == 3
    assert (request.finish_reason, request.stop_reason) == (FinishReason.LENGTH, None)
    request = make_request("0", [1, 2], SamplingParams(max_tokens=None), max_model_len=6)
    assert request.max_new_tokens == 4
    assert _push(request, [9] * 5) == 4
    assert request.finish_reason == FinishReason.LENGTH
    assert request.output_ids == [9] * 4
    assert request.token_ids == [1, 2, 9, 9, 9, 9]


@pytest.mark.parametrize(
    ("fields", "taken", "reason", "stop_reason"),
    [
        ({}, 2, FinishReason.STOP, None),
        ({"ignore_eos": True}, 4, FinishReason.LENGTH, None),
        ({"stop_token_ids": [9]}, 1, FinishReason.STOP, 9),
        ({"stop_token_ids": [8], "ignore_eos": True}, 3, FinishReason.STOP, 8),
        ({"stop_token_ids": [1], "ignore_eos": True}, 2, FinishReason.STOP, 1),
        ({"min_tokens": 3}, 4, FinishReason.LENGTH, None),
    ],
)
def test_ends_by_token(fields: dict[str, object], taken: int, reason: FinishReason, stop_reason: int | None) -> None:
    request = make_request("0", [1, 9], SamplingParams(max_tokens=4, **fields), eos_token_ids=(1,))
    assert _push(request, [9, 1, 8, 7, 6]) == taken
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)


def test_ends_by_stop_string() -> None:
    request, taken = _with_text("the story of", stop=[" st"])
    assert request.text is not None
    assert request.text.text == "the"
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, " st")
    assert taken < len(TOKENIZER.encode("the story of"))
    request, _ = _with_text("the story of", stop=[" st"], include_stop_str_in_output=True)
    assert request.text is not None
    assert request.text.text == "the st"


def test_a_stop_string_before_min_tokens_stays_in_the_text() -> None:
    """It does not end the output there, so it is a part of it like any other."""
    request, taken = _with_text("a, b, c", stop=[","], min_tokens=3)
    assert request.text is not None
    assert request.text.text == "a, b"
    assert request.stop_reason == ","
    assert taken == 4
    request, _ = _with_text("a, b", stop=[","], min_tokens=40)
    assert request.text is not None
    request.text.finish()
    assert request.text.text == "a, b"


def test_held_back_bytes_are_shown_when_it_ends() -> None:
    tokens = TOKENIZER.encode("a\u20ac")[:-1]
    request = make_request("0", [5], SamplingParams(max_tokens=len(tokens)))
    request.text = TextBuffer(TOKENIZER.decode)
    _push(request, tokens)
    assert request.text.text == "a\ufffd"


def test_the_end_token_is_not_in_the_text() -> None:
    request, _ = _with_text("a cat</s>and")
    assert request.text is not None
    assert request.finish_reason == FinishReason.STOP
    assert request.text.text == "a cat"
    assert request.output_ids[-1] == 1


def test_every_token_has_an_origin() -> None:
    request = make_request("0", [1], SamplingParams(max_tokens=9))
    request.append(3, "ngram")
    request.append(4, None)
    assert list(zip(request.output_ids, request.origins, strict=True)) == [(3, "ngram"), (4, None)]


def test_spans() -> None:
    request = make_request("0", [4, 5, 6, 7])
    chunk, last = Span(request, 0, 2), Span(request, 2, 4)
    assert (chunk.tokens, chunk.produces_token, chunk.tree()) == ([4, 5], False, None)
    assert (last.tokens, last.produces_token, last.tree()) == ([6, 7], True, TokenTree.root(7))


def test_counters_by_hand() -> None:
    first, second = SpeculationStats(), SpeculationStats()
    for num_guessed, depth, accepted in ((0, 0, 0), (4, 2, 2), (4, 2, 0)):
        first.record(num_guessed, depth, accepted, accepted + 1)
    second.record(3, 3, 3, 4)
    total = first + second
    assert total.as_dict() == {
        "mean_acceptance_length": pytest.approx(1 + 5 / 3),
        "draft_acceptance_rate": pytest.approx(5 / 11),
        "acceptance_histogram": [1, 0, 1, 1],
        "acceptance_histogram_by_draft_length": {"2": [1, 0, 1], "3": [0, 0, 0, 1]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 11,
        "num_spec_tokens": 3,
        "num_target_passes": 4,
        "tokens_per_pass": pytest.approx(9 / 4),
        "reason": None,
    }
    assert first.num_draft_tokens == 8, "a sum changes neither"
    assert first.acceptance_histogram == {2: 1, 0: 1}


def test_counters_of_a_request_without_output() -> None:
    empty = SpeculationStats().as_dict()
    assert (empty["tokens_per_pass"], empty["mean_acceptance_length"]) == (0.0, 1.0)
    assert empty["draft_acceptance_rate"] == 0.0
    assert empty["acceptance_histogram"] == [0]


class Counted:
    """A grammar of exactly so many tokens."""

    def __init__(self, length: int) -> None:
        self._left = length

    def advance(self, token: int) -> None:
        self._left -= 1

    @property
    def is_finished(self) -> bool:
        return self._left == 0


@pytest.mark.parametrize(
    ("fields", "tokens", "taken", "reason", "stop_reason"),
    [
        ({}, [7, 8, 9, 9], 3, FinishReason.STOP, None),
        ({"min_tokens": 5}, [7, 8, 9, 9], 3, FinishReason.STOP, None),  # the grammar has the last word
        ({"min_tokens": 5}, [7, 8, 1, 9], 3, FinishReason.STOP, None),
        ({"stop_token_ids": [9]}, [7, 8, 9, 9], 3, FinishReason.STOP, 9),
        ({"ignore_eos": True}, [1, 1, 1, 1], 3, FinishReason.STOP, None),
        ({"max_tokens": 2}, [7, 8, 9], 2, FinishReason.LENGTH, None),
        ({"max_tokens": 3}, [7, 8, 9], 3, FinishReason.STOP, None),
    ],
)
def test_ends_where_its_grammar_does(
    fields: dict[str, object], tokens: list[int], taken: int, reason: FinishReason, stop_reason: int | None
) -> None:
    params = SamplingParams(**({"max_tokens": 9} | fields))  # type: ignore[arg-type]
    request = make_request("0", [5], params, eos_token_ids=(1,), grammar=Counted(3))
    assert _push(request, tokens) == taken
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)


def test_plain_greedy_is_the_argmax_of_bare_logits() -> None:
    greedy = SamplingParams(temperature=0.0)
    assert make_request("0", [5], greedy).is_plain_greedy
    assert not make_request("0", [5], SamplingParams()).is_plain_greedy
    assert not make_request("0", [5], SamplingParams(temperature=0.0, frequency_penalty=0.5)).is_plain_greedy
    assert not make_request("0", [5], greedy, bad_words_ids=((3, 4),)).is_plain_greedy
    assert not make_request("0", [5], greedy, grammar=Counted(3)).is_plain_greedy


def test_random_numbers_are_those_of_the_seed() -> None:
    request, same, different = (make_request("0", [5], seed=seed) for seed in (4, 4, 5))
    assert request.uniforms.next_uniform() == same.uniforms.next_uniform() != different.uniforms.next_uniform()
