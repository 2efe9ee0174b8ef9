"""What one request asks of sampling: the parameters, checked where they enter.

Names, defaults and meanings are vLLM's, so that a caller can move a `SamplingParams` over unchanged.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
        n: How many outputs to make for the prompt.
        temperature: 0 is greedy.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least this.
        top_k: Keep the k most probable tokens; 0 or -1 keeps all.
        min_p: Drop tokens less probable than this fraction of the most probable one.
        presence_penalty: Subtracted from the logit of each token already in the output.
        frequency_penalty: Subtracted once per occurrence in the output.
        repetition_penalty: Divides positive (multiplies negative) logits of tokens in prompt or output.
        logit_bias: Added to the logits of the given token ids, each from -100 to 100.
        allowed_token_ids: Only these tokens can be said.
        seed: The output is a function of the prompt, the parameters and this number.
        stop: Strings that end the output; they are not part of the text unless asked for.
        stop_token_ids: Tokens that end the output.
        max_tokens: Tokens to make at most; None goes on to the end of the context.
        min_tokens: No end-of-text or stop token is said before this many.
        ignore_eos: Go on after the end-of-text token.
        logprobs: Log-probabilities (before processing) of this many best tokens, and of the one said.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Keep the stop string in the text.

    Raises:
        ValueError: A field is out of range; the message names it and its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_sets()

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1, 128)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_int("top_k", self.top_k, -1, None)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def _check_sets(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError("stop must hold non-empty strings; leave an empty one out")
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: nothing could be said; leave it out to allow all")
        bias = {}
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        for token, value in (self.logit_bias or {}).items():
            if isinstance(token, str) and token.isdecimal():  # JSON keys are strings
                token = int(token)
            _check_int("logit_bias", token, 0, None)
            _check_float(f"logit_bias[{token}]", value, -100.0, 100.0)
            bias[token] = float(value)
        object.__setattr__(self, "logit_bias", bias)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """`stop_token_ids`, always a tuple."""
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids

    @property
    def is_greedy(self) -> bool:
        # Below this logits divided by it would overflow; vLLM draws the line at the same place.
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the logits as they are."""
        return (
            self.is_greedy
            and not self.has_penalties
            and not self.logit_bias
            and self.allowed_token_ids is None
            and not self.min_tokens
        )

    def largest_token_id(self) -> int:
        """The largest token id named in any field, or -1: to be checked against the vocabulary."""
        ids = [*self.stop_tokens, *(self.logit_bias or ()), *(self.allowed_token_ids or ())]
        return max(ids, default=-1)


def _as_tuple(name: str, values: Iterable[Any] | None) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list, not {values!r}")
    return tuple(values)


def _token_ids(name: str, values: Iterable[Any] | None) -> tuple[int, ...]:
    ids = _as_tuple(name, values)
    for token in ids:
        _check_int(name, token, 0, None)
    return ids


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {span}, not {value}")


def _check_float(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if value < low or value > high or (low_open and value == low):
        start = "above" if low_open else "from"
        raise ValueError(f"{name} must be {start} {low:g} and at most {high:g}, not {value:g}")
