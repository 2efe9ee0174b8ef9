"""Batches of training examples: padded tensors, and the parts of long examples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from specinfer.learning.examples import TrainingExample


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples padded at the end to the same length.

    Attributes:
        tokens: [rows, length] int64.
        rows, places: [outputs] the row and position of the logits that predict each output token.
        top_ids: [outputs, top] int64.
        top_logprobs: [outputs, top] float32.
        output_ids: [outputs] int64, the output tokens.
        generated_logprobs: [outputs] float32.
        taps: By layer, [rows, length, width] float32 hidden states of the target, 0 for the last token of each example,
            or None if they are not known.
    """

    tokens: Tensor
    rows: Tensor
    places: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    output_ids: Tensor
    generated_logprobs: Tensor
    taps: Mapping[int, Tensor] | None = None

    def to(self, device: torch.device) -> Self:
        moved = {each.name: getattr(self, each.name).to(device) for each in fields(self) if each.name != "taps"}
        taps = None if self.taps is None else {layer: tap.to(device) for layer, tap in self.taps.items()}
        return replace(self, **moved, taps=taps)


def collate(examples: Sequence[TrainingExample]) -> Batch:
    """Return a batch of these examples."""
    length = max(len(example.tokens) for example in examples)
    tokens = torch.zeros((len(examples), length), dtype=torch.long)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = torch.from_numpy(example.tokens)
    counts = [example.num_output for example in examples]
    # The first output token is predicted at the last position of the prompt.
    places = np.concatenate([np.arange(example.num_prompt - 1, len(example.tokens) - 1) for example in examples])
    return Batch(
        tokens,
        torch.from_numpy(np.repeat(np.arange(len(examples)), counts)),
        torch.from_numpy(places),
        torch.from_numpy(np.concatenate([example.top_ids for example in examples])).long(),
        torch.from_numpy(np.concatenate([example.top_logprobs for example in examples])).float(),
        torch.from_numpy(np.concatenate([example.tokens[example.num_prompt :] for example in examples])).long(),
        torch.from_numpy(np.concatenate([example.generated_logprobs for example in examples])).float(),
        _padded_taps(examples, length),
    )


def _padded_taps(examples: Sequence[TrainingExample], length: int) -> Mapping[int, Tensor] | None:
    """Return `Batch.taps`, or None if those of an example are not known."""
    known = [example.taps for example in examples if example.taps is not None]
    if len(known) < len(examples):
        return None
    padded = {layer: torch.zeros(len(known), length, tap.shape[1]) for layer, tap in known[0].items()}
    for row, taps in enumerate(known):
        for layer, tap in taps.items():
            padded[layer][row, : len(tap)] = tap
    return padded


def last_part(example: TrainingExample, num_tokens: int) -> TrainingExample:
    """Return a copy of the end of an example: at most `num_tokens` tokens, the first of which is prompt."""
    start = max(len(example.tokens) - num_tokens, 0)
    part = _part(example, start, max(example.num_prompt, start + 1), len(example.tokens))
    arrays = {name: getattr(part, name).copy() for name in ("tokens", "top_ids", "top_logprobs", "generated_logprobs")}
    return replace(part, **arrays)


def pieces(example: TrainingExample, num_tokens: int) -> list[TrainingExample]:
    """Split an example into examples of at most `num_tokens` tokens; each output token is trained on in one of them.

    Where a piece continues the text of another one, half of it is context that is not trained on.
    """
    parts, covered = [], example.num_prompt
    while covered < len(example.tokens):
        # A short prompt leaves capacity for more output.
        end = min(covered + max(num_tokens // 2, num_tokens - covered), len(example.tokens))
        parts.append(_part(example, max(end - num_tokens, 0), covered, end))
        covered = end
    return parts


def _part(example: TrainingExample, start: int, covered: int, end: int) -> TrainingExample:
    """Return the tokens [start, end) of an example; those before `covered` count as prompt."""
    rows = slice(covered - example.num_prompt, end - example.num_prompt)
    return replace(
        example,
        tokens=example.tokens[start:end],
        num_prompt=covered - start,
        top_ids=example.top_ids[rows],
        top_logprobs=example.top_logprobs[rows],
        generated_logprobs=example.generated_logprobs[rows],
        taps=None if example.taps is None else {layer: tap[start : end - 1] for layer, tap in example.taps.items()},
    )


def batches(examples: Sequence[TrainingExample], num_tokens: int) -> Iterator[list[TrainingExample]]:
    """Yield lists of examples, in order, that take at most `num_tokens` tokens when padded, but at least one each."""
    batch: list[TrainingExample] = []
    longest = 0
    for example in examples:
        longest = max(longest, len(example.tokens))
        if batch and longest * (len(batch) + 1) > num_tokens:
            yield batch
            batch, longest = [], len(example.tokens)
        batch.append(example)
    if batch:
        yield batch
