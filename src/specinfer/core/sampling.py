"""Sampling parameters of one request, validated when they are created.

Names, defaults and meanings are vLLM's, so that a caller can move a `SamplingParams` over unchanged.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from specinfer.core.errors import as_python, as_tuple, check_float, check_int
from specinfer.core.limits import SLO
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.core.tree_shape import parse_tree
from specinfer.core.vllm_names import accepts_vllm_names


class Effect(Enum):
    """The effect of a sampling parameter on the distribution of the next token."""

    TRUNCATES = "temperature, or tokens that are dropped by their scores alone: `verify.logits.truncate`"
    ADJUSTS = "logits are changed as the text demands: `verify.logits.adjust`"
    NONE = "none"


# The effect of each field of `SamplingParams`.
EFFECTS = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"), Effect.TRUNCATES),
    **dict.fromkeys(
        (
            "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids",
            "stop_token_ids", "min_tokens", "ignore_eos", "bad_words", "thinking_token_budget", "structured_outputs",
        ),
        Effect.ADJUSTS,
    ),
    **dict.fromkeys(
        (
            "n", "seed", "stop", "max_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids", "tree",
            "prediction", "slo", "skip_special_tokens", "include_stop_str_in_output", "output_kind",
        ),
        Effect.NONE,
    ),
}  # fmt: skip
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 100
MAX_LOGPROB_TOKEN_IDS = 128


class RequestOutputKind(Enum):
    """The outputs that `AsyncLLM.generate` yields: with all tokens so far, with the new ones, or only the last."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@accepts_vllm_names
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings that control how the tokens of one request are chosen, and when the request ends.

    Attributes:
        n: Number of outputs to generate for the prompt.
        temperature: Softmax temperature; 0 is greedy.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least this; 0 is greedy, as temperature 0.
        top_k: Keep the k most probable tokens; 0 or -1 keeps all.
        min_p: Drop tokens less probable than this fraction of the most probable one.
        presence_penalty: Subtracted from the logit of each token already in the output.
        frequency_penalty: Subtracted once per occurrence in the output.
        repetition_penalty: Divides positive (multiplies negative) logits of tokens in prompt or output; 0.01 to 100.
        logit_bias: Added to the logits of the given token ids, each from -100 to 100.
        allowed_token_ids: The only tokens that can be emitted, or None for all.
        seed: Under coupled and target-only verification, and greedy, the output is a function of the prompt, the
            parameters and this number. Under multi-step and traversal verification it also depends on the draft tokens:
            on the drafters, the tree and what they have learned. None and -1 leave the choice to the engine.
        stop: Strings that end the output; they are not part of the text unless asked for. They do not
            count in a thought. Empty ones are ignored.
        stop_token_ids: Tokens that end the output.
        max_tokens: Maximum number of tokens to generate; None continues to the end of the context.
        min_tokens: Number of tokens before which no end-of-text or stop token is emitted.
        ignore_eos: Continue after the end-of-text token.
        logprobs: Return log-probabilities (before processing) of this many best tokens, and of the emitted one.
        prompt_logprobs: The same for each token of the prompt but the first.
        logprob_token_ids: Tokens whose log-probabilities are also returned with each emitted token; 128 at most.
        bad_words: Strings that are not emitted; only the token that would complete one is forbidden.
        thinking_token_budget: Maximum number of tokens of a thought; then those that end it follow, whatever else but a
            grammar forbids them. None or -1 is no limit.
        structured_outputs: Constraint on the output: a `StructuredOutputsParams`, or a dict of its fields.
        tree: Tree for this request, in the format of `LLM(tree=...)`, or None for the engine's.
        prediction: Text, or its token ids, that the output is likely to resemble; it affects only the speed.
        slo: Latency targets: an `SLO`, or a dict of its fields; they affect only the order and the speed. None is the
            engine's.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Keep the stop string, or the text of the stop token, in the text.
        output_kind: What `AsyncLLM.generate` yields; it has no effect elsewhere.

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
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = ()
    bad_words: Sequence[str] | None = ()
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    tree: str | None = None
    prediction: str | Sequence[int] | None = None
    slo: SLO | Mapping[str, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_sets()
        self._check_texts()

    def _check_numbers(self) -> None:
        check_int("n", self.n, 1, 128)
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "top_p", 1.0)
        check_int("top_k", self.top_k, -1, None)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
            object.__setattr__(self, "seed", None if self.seed == -1 else self.seed & MAX_SEED)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, None)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.thinking_token_budget is not None:
            check_int("thinking_token_budget", self.thinking_token_budget, -1, None)
            if self.thinking_token_budget == -1:
                object.__setattr__(self, "thinking_token_budget", None)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {value!r:.60}")
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)

    def _check_sets(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else as_tuple("stop", self.stop)
        if not all(isinstance(stop, str) for stop in stops):
            raise ValueError(f"stop must be text or a list of texts, not {self.stop!r:.60}")
        object.__setattr__(self, "stop", tuple(filter(None, stops)))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logprob_token_ids", _token_ids("logprob_token_ids", self.logprob_token_ids))
        if len(self.scored_tokens) > MAX_LOGPROB_TOKEN_IDS:
            raise ValueError(
                f"logprob_token_ids holds {len(self.scored_tokens)}; at most {MAX_LOGPROB_TOKEN_IDS} may be"
            )
        if self.scored_tokens and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        if self.allowed_token_ids is not None:
            allowed = dict.fromkeys(_token_ids("allowed_token_ids", self.allowed_token_ids))
            object.__setattr__(self, "allowed_token_ids", tuple(allowed))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: no token could be generated; leave it out to allow all")
        bias = {}
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        for token, value in (self.logit_bias or {}).items():
            token, value = as_python(token), as_python(value)
            if isinstance(token, str) and len(token) < 20 and token.isascii() and token.isdecimal():
                token = int(token)  # JSON keys are strings
            check_int("logit_bias: a token id", token, 0, None)
            check_float(f"logit_bias[{token}]", value, -100.0, 100.0)
            bias[token] = float(value)
        object.__setattr__(self, "logit_bias", bias)

    def _check_texts(self) -> None:
        object.__setattr__(self, "bad_words", as_tuple("bad_words", self.bad_words))
        if not all(isinstance(word, str) for word in self.bad_words or ()):
            raise ValueError(f"bad_words must be a list of texts, not {self.bad_words!r:.60}")
        object.__setattr__(self, "bad_words", tuple(filter(None, self.bad_words or ())))
        if self.prediction is not None and not isinstance(self.prediction, str):
            object.__setattr__(self, "prediction", _token_ids("prediction", self.prediction))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, not {self.output_kind!r:.60}")
        if self.tree is not None:
            parse_tree(self.tree)
        if self.slo is not None:
            object.__setattr__(self, "slo", SLO.parse(self.slo))
        asked = self.structured_outputs
        if isinstance(asked, Mapping):
            if unknown := sorted(set(map(str, asked)) - set(StructuredOutputsParams.__slots__)):
                raise ValueError(
                    f"structured_outputs: key {unknown[0]!r} is not known; use json, regex, choice, grammar or "
                    "json_object"
                )
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams(**asked))
        elif asked is not None and not isinstance(asked, StructuredOutputsParams):
            raise ValueError(f"structured_outputs must be a StructuredOutputsParams or a dict, not {asked!r:.60}")

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Return parameters of which those that are None have their defaults, as in vLLM."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    def clone(self) -> Self:
        """Return parameters that a change does not affect, as in vLLM: these, which never change."""
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings of `stop`, always as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids of `stop_token_ids`, always as a tuple."""
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids

    @property
    def scored_tokens(self) -> tuple[int, ...]:
        """Token ids of `logprob_token_ids`, always as a tuple."""
        assert isinstance(self.logprob_token_ids, tuple)
        return self.logprob_token_ids

    @property
    def is_greedy(self) -> bool:
        # Below this temperature the division of the logits would overflow; vLLM uses the same limit.
        return self.temperature < 1e-5

    @property
    def is_seeded(self) -> bool:
        """True if tokens are drawn with random numbers that another request with the same seed has, too."""
        return self.seed is not None and not self.is_greedy

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def is_plain_greedy(self) -> bool:
        """True if the next token is the argmax of the unprocessed logits."""
        return self.is_greedy and not self.adjusts_logits

    @property
    def truncates(self) -> bool:
        """True if improbable tokens are dropped."""
        return self.min_p > 0.0 or self.top_k > 0 or self.top_p < 1.0

    @property
    def adjusts_logits(self) -> bool:
        """True if constraints, biases or penalties change the logits before the temperature is applied."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.min_tokens
            or self.bad_words
            or self.structured_outputs is not None
        )

    def named_token_ids(self) -> dict[str, tuple[int, ...]]:
        """Return the token ids in each field that has some, to be checked against the vocabulary."""
        return {
            "stop_token_ids": self.stop_tokens,
            "logprob_token_ids": self.scored_tokens,
            "logit_bias": tuple(self.logit_bias or ()),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
        }


def _token_ids(name: str, values: Iterable[Any] | None) -> tuple[int, ...]:
    ids = as_tuple(name, values)
    for token in ids:
        check_int(name, token, 0, None)
    return ids
