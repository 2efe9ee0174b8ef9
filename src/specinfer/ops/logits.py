"""Parameters of many requests' logits as tensors: truncation, biases and penalties.

Operations apply what `verify.logits` applies for one request: `mask_logits` and `adjust_logits` the constraints, biases
and penalties of `adjust`, and `least_kept` the limit of `truncate`.
"""

from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

from specinfer.core.sampling import EFFECTS, Effect, SamplingParams

MAX_ENDS = 16  # tokens of a request that end its output, and that are held back

# The sampling parameters that `Truncation`, `Adjustments` and masks of tokens apply.
DEVICE_FIELDS = frozenset({
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "stop_token_ids", "min_tokens", "ignore_eos", "bad_words",
    "thinking_token_budget", "structured_outputs",
})  # fmt: skip


@cache
def _host_defaults() -> dict[str, object]:
    """Return the defaults of the fields that only the host applies: those without a stated effect, too."""
    names = {field.name for field in fields(SamplingParams) if EFFECTS.get(field.name) is not Effect.NONE}
    defaults = SamplingParams()
    return {name: getattr(defaults, name) for name in names - DEVICE_FIELDS}


def host_fields(params: SamplingParams) -> list[str]:
    """Return the fields that are set and that change the distribution, but that no device applies."""
    return [name for name, default in _host_defaults().items() if getattr(params, name) != default]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which improbable tokens are dropped. All are [requests]."""

    temperatures: Tensor  # float32; 0 is greedy, for which nothing is dropped
    log_min_p: Tensor  # float32; -inf keeps all
    top_k: Tensor  # int32; 0 keeps all
    top_p: Tensor  # float64; 1 keeps all

    def first(self, count: int) -> "Truncation":
        """Return that of the first requests."""
        return Truncation(*(getattr(self, field.name)[:count] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Biases and penalties of requests, and the tokens that they count."""

    is_adjusted: Tensor  # [requests] int32, 1 where anything applies
    bias: Tensor  # [requests, vocab] float32; -inf forbids a token
    seen: Tensor  # [requests, vocab] int32, twice the count in the output, and 1 more if it is in the prompt
    repeated_positive: Tensor  # [requests] float32, factor of logits above 0 of tokens seen
    repeated_negative: Tensor  # [requests] float32, factor of the other logits of tokens seen
    frequency: Tensor  # [requests] float32, subtracted once for each occurrence in the output
    presence: Tensor  # [requests] float32, subtracted once
    num_early: Tensor  # [requests] int32 tokens still to be emitted before the output may end; 0 or less: it may
    ends: Tensor  # [requests, MAX_ENDS] int32 tokens that end it; -1 after the last

    @classmethod
    def empty(cls, num_requests: int, vocab: int, device: torch.device) -> "Adjustments":
        with torch.inference_mode(mode=False):
            bias = torch.zeros((num_requests, vocab), dtype=torch.float32, device=device)
            seen = torch.zeros((num_requests, vocab), dtype=torch.int32, device=device)
            is_adjusted = torch.zeros(num_requests, dtype=torch.int32, device=device)
            numbers = torch.zeros((4, num_requests), dtype=torch.float32, device=device)
            num_early = torch.zeros_like(is_adjusted)
            ends = torch.full((num_requests, MAX_ENDS), -1, dtype=torch.int32, device=device)
        positive, negative, frequency, presence = numbers
        return cls(is_adjusted, bias, seen, positive, negative, frequency, presence, num_early, ends)

    def first(self, count: int) -> "Adjustments":
        """Return those of the first requests."""
        return Adjustments(*(getattr(self, field.name)[:count] for field in fields(self)))

    def move(self, source: int, row: int) -> None:
        """Copy those of one request to another row."""
        for field in fields(self):
            column: Tensor = getattr(self, field.name)
            column[row].copy_(column[source])


@dataclass(frozen=True, slots=True)
class Paths:
    """Nodes of trees, as the draft tokens between each of them and the root."""

    numbers: Tensor  # [requests, nodes] int32 number of each node in `tokens`; below `first` for the root
    tokens: Tensor  # [requests, n] integers
    parents: Tensor  # [requests, n] int32 numbers of parents
    first: int  # lowest number of a node that is not the root
    max_depth: int
