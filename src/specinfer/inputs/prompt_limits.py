"""Limits of a model on its prompts: tokens of the vocabulary, the context, and parameters that fit a prompt."""

import functools
from collections.abc import Sequence
from typing import Any

from specinfer.core.errors import ContextLengthError, RequestError
from specinfer.core.sampling import SamplingParams
from specinfer.core.text import counted


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

    @functools.cached_property
    def max_characters(self) -> int:
        """Number of characters from which on no text fits into the context."""
        vocabulary = {} if self._tokenizer is None else self._tokenizer.get_vocab()
        return self._max_model_len * max(map(len, vocabulary), default=1)

    def check_text(self, text: str, field: str) -> None:
        """Check the length of a text before it is read.

        Raises:
            ContextLengthError: It cannot fit into the context; the message begins with `field`.
        """
        if len(text) > self.max_characters:
            raise ContextLengthError(
                f"{field}: {len(text)} characters do not fit into a context of {self._max_model_len} tokens "
                "(max_model_len); shorten it"
            )

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
            raise ContextLengthError(
                f"prompt: {len(ids)} tokens leave no space for output in a context of {self._max_model_len} "
                "(max_model_len); shorten it"
            )

    def check_params(self, num_prompt: int, params: SamplingParams) -> None:
        """Check parameters with a prompt of this many tokens.

        Raises:
            RequestError: They need more than the model, its tokenizer or the context has.
        """
        for field, ids in params.named_token_ids().items():
            if ids and max(ids) >= self._vocab_size:
                raise RequestError(
                    f"{field}: token id {max(ids)} is not in the vocabulary of {self._vocab_size} tokens; leave it out"
                )
        num_left = self._max_model_len - num_prompt
        if params.max_tokens is not None and params.max_tokens > num_left:
            raise ContextLengthError(
                f"max_tokens: a prompt of {counted(num_prompt, 'token')} and {params.max_tokens} more do not fit into "
                f"the context of {self._max_model_len} (max_model_len); use at most {num_left}"
            )
        ends = {*self._eos_token_ids, *params.stop_tokens}
        if params.min_tokens and params.allowed_token_ids is not None and ends.issuperset(params.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids: only tokens that end the output are allowed, and min_tokens forbids those; "
                "allow others or leave min_tokens at 0"
            )
        if params.stop_strings and self._tokenizer is None:
            raise RequestError("stop: this model has no tokenizer; use stop_token_ids")
