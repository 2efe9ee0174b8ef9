"""Limits of a model on prompts and parameters; each refusal begins with the field."""

from typing import Any

import pytest

from specinfer.core.errors import ContextLengthError, RequestError
from specinfer.core.sampling import SamplingParams
from specinfer.inputs.prompt_limits import PromptLimits
from tiny import EOS, VOCAB, make_tokenizer

LIMITS = PromptLimits(make_tokenizer(), VOCAB, 64, [EOS])
BARE = PromptLimits(None, VOCAB, 64, [EOS])


def test_a_text_is_refused_that_even_the_longest_tokens_do_not_fit_into_the_context() -> None:
    longest = max(map(len, make_tokenizer().get_vocab()))
    assert (LIMITS.max_characters, BARE.max_characters) == (64 * longest, 64)
    LIMITS.check_characters(64 * longest, "prompt")
    with pytest.raises(ContextLengthError, match=r"your messages resulted in at least 65 tokens\.") as refused:
        LIMITS.check_characters(64 * longest + 1, "messages")
    assert (refused.value.field, refused.value.num_tokens, refused.value.max_model_len) == ("messages", 65, 64)


@pytest.mark.parametrize(
    ("ids", "kind", "part"),
    [
        ([], RequestError, "^prompt: empty"),
        ([0, VOCAB], RequestError, f"^prompt: token id {VOCAB} is not in the vocabulary"),
        ([-1], RequestError, "^prompt: token id -1"),
        ([0] * 64, ContextLengthError, "^This model's .* resulted in 64 tokens and leave no space for output"),
    ],
)
def test_a_prompt_has_tokens_of_the_vocabulary_and_leaves_space(
    ids: list[int], kind: type[RequestError], part: str
) -> None:
    with pytest.raises(kind, match=part):
        LIMITS.check_prompt(ids)
    LIMITS.check_prompt([0] * 63)


@pytest.mark.parametrize(
    ("limits", "params", "field"),
    [
        (LIMITS, {"max_tokens": 9, "min_tokens": 5}, "min_tokens"),
        (LIMITS, {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        (LIMITS, {"min_tokens": 1, "allowed_token_ids": [EOS]}, "allowed_token_ids"),
        (BARE, {"stop": ["a"]}, "stop"),
    ],
)
def test_parameters_must_fit_the_model_and_the_prompt(limits: PromptLimits, params: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field}: "):
        limits.check_params(60, SamplingParams(**{"max_tokens": 4} | params))
    LIMITS.check_params(60, SamplingParams(max_tokens=5, min_tokens=4, stop=["a"]))
