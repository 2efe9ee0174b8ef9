"""Distillation: training a drafter towards the target's own distributions.

The loss is the forward Kullback-Leibler divergence over the target's best tokens and all others together as one more
outcome, which is what an example stores of a distribution. It is smallest where the drafter's distribution is the
target's.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from specinfer.learning.batches import Batch

LEVEL_SHARE = 0.8  # of the loss of a level in that of the level before
_LEAST = 1e-6  # lower bound of the probability of all other tokens: in half precision it may come out as 0


class HeadLogits(NamedTuple):
    """The logits of a head in training, which predicts tokens of the output from different distances.

    Attributes:
        logits: [predictions, vocab] float32.
        outputs: [predictions] the output of the batch that each is of.
        levels: [predictions] the number of draft tokens before it.
        accepted: [predictions] its own probability that its token is accepted, or None.
    """

    logits: Tensor
    outputs: Tensor
    levels: Tensor
    accepted: Tensor | None


def training_loss(drafted: Tensor | HeadLogits, batch: Batch, weights: Tensor | None) -> Tensor:
    """Return `distillation_loss`, of a head the mean over all levels, of which later ones count less.

    A head that predicts acceptance learns the part of its distribution that is the target's, which is the probability
    that a token drawn from it is accepted (DSpark, arXiv 2607.05147).
    """
    if isinstance(drafted, Tensor):
        return distillation_loss(drafted, batch.top_ids, batch.top_logprobs, weights)
    shares = LEVEL_SHARE**drafted.levels
    weights = shares if weights is None else shares * weights[drafted.outputs]
    ids, logprobs = batch.top_ids[drafted.outputs], batch.top_logprobs[drafted.outputs]
    loss = distillation_loss(drafted.logits, ids, logprobs, weights)
    if drafted.accepted is None:
        return loss
    with torch.no_grad():
        share = overlap(drafted.logits.softmax(-1).gather(1, ids), logprobs)
    confidence = binary_cross_entropy(drafted.accepted, share, reduction="none")
    return loss + (confidence * weights).sum() / weights.sum().clamp_min(_LEAST)


def overlap(probs: Tensor, logprobs: Tensor) -> Tensor:
    """Return the probability that a drawn token is accepted, [places], from both models' [places, top] of one token."""
    return torch.minimum(probs, logprobs.exp()).sum(-1).clamp(max=1.0)


def restrict(batch: Batch, token_map: Tensor, vocab_size: int) -> tuple[Batch, Tensor]:
    """Return a batch whose distributions are over the tokens of a map, and their probability mass there, [outputs].

    `top_ids` become indices into the map. The target's probability of other tokens is distributed in proportion.
    """
    place = torch.full((vocab_size,), -1, device=token_map.device)
    place[token_map] = torch.arange(len(token_map), device=token_map.device)
    ids = place[batch.top_ids]
    missing = ids < 0
    mass = (1.0 - batch.top_logprobs.exp().masked_fill(~missing, 0.0).sum(-1)).clamp_min(_LEAST)
    logprobs = (batch.top_logprobs - mass.log()[:, None]).masked_fill(missing, -torch.inf)
    return replace(batch, top_ids=ids.clamp_min(0), top_logprobs=logprobs), mass


def distillation_loss(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean divergence, in nats, from the target's distributions to a drafter's.

    Args:
        logits: [places, vocab] float32, the drafter's.
        top_ids: [places, top] the target's best tokens.
        top_logprobs: [places, top] float32; -inf where there is no token.
        weights: [places] the weight of each position, or None for equal weights.
    """
    q = logits.log_softmax(-1).gather(1, top_ids)
    p = top_logprobs.exp()
    p_rest = (1.0 - p.sum(-1)).clamp_min(_LEAST)
    q_rest = (1.0 - q.exp().masked_fill(top_logprobs == -torch.inf, 0.0).sum(-1)).clamp_min(_LEAST)
    inside = (p * (top_logprobs.clamp_min(-60.0) - q)).sum(-1)
    divergence = inside + p_rest * (p_rest.log() - q_rest.log())
    if weights is None:
        return divergence.mean()
    return (divergence * weights).sum() / weights.sum().clamp_min(_LEAST)
