"""Limits of a model on its prompts: tokens of the vocabulary, the context, and parameters that fit a prompt."""

import functools
from collections.abc import Sequence
from typing import Any

from specinfer.core.errors import RequestError, too_long
from specinfer.core.sampling import SamplingParams


class PromptLimits:
    """Checks of prompts and parameters against a model.

    Args:
        tokenizer: The target's tokenizer, or None.
        vocab_size: Number of tokens in the target's vocabulary.
        max_model_len: Longest prompt and output together, in tokens.
        eos_token_ids: Tokens that end a text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._eos_token_ids = eos_token_ids

    @property
    def max_characters(self) -> int:
        """Number of characters beyond which no text fits into the context."""
        return self._max_model_len * self._longest_token

    @functools.cached_property
    def _longest_token(self) -> int:
        vocabulary = {} if self._tokenizer is None else self._tokenizer.get_vocab()
        return max(map(len, vocabulary), default=1)

    def check_characters(self, number: int, field: str) -> None:
        """Check the number of characters of a field before they are read.

        Raises:
            ContextLengthError: They cannot fit into the context.
        """
        if number > self.max_characters:
            raise too_long(field, -(-number // self._longest_token), self._max_model_len, is_encoded=False)

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Check the tokens of a prompt.

        Raises:
            RequestError: There are none, one is not in the vocabulary, or they leave no space for output.
        """
        if not ids:
            raise RequestError("prompt: empty; give at least one token")
        if wrong := [i for i in ids if not 0 <= i < self._vocab_size]:
            raise RequestError(f"prompt: token id {wrong[0]} is not in the vocabulary of {self._vocab_size} tokens")
        if len(ids) >= self._max_model_len:
            raise too_long("prompt", len(ids), self._max_model_len)

    def check_params(self, num_prompt: int, params: SamplingParams) -> None:
        """Check parameters with a prompt of this many tokens. A `max_tokens` beyond the context ends at its end.

        Raises:
            RequestError: They need more than the model, its tokenizer or the context has.
        """
        for field, ids in params.named_token_ids().items():
            if ids and max(ids) >= self._vocab_size:
                raise RequestError(
                    f"{field}: token id {max(ids)} is not in the vocabulary of {self._vocab_size} tokens; leave it out"
                )
        num_left = self._max_model_len - num_prompt
        if params.min_tokens > num_left:
            raise RequestError(
                f"min_tokens: {params.min_tokens} do not fit after a prompt of {num_prompt} into the context of "
                f"{self._max_model_len} tokens (max_model_len); use at most {num_left}"
            )
        ends = {*self._eos_token_ids, *params.stop_tokens}
        if params.min_tokens and params.allowed_token_ids is not None and ends.issuperset(params.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids: only tokens that end the output are allowed, and min_tokens forbids those; "
                "allow others or leave min_tokens at 0"
            )
        if params.stop_strings and self._tokenizer is None:
            raise RequestError("stop: this model has no tokenizer; use stop_token_ids")
