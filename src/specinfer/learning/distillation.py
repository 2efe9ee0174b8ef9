"""Distillation: a drafter is drawn to the target's own distributions.

The loss is the forward Kullback-Leibler divergence over the target's best tokens and, as one more outcome, all others
together: what a lesson keeps of a law. It is least where the drafter's law is the target's.
"""

from typing import Any

from torch import Tensor

from specinfer.learning.lessons import Batch

_LEAST = 1e-6  # of the share of all other tokens: in half precision it may come out as nothing


def said_logits(model: Any, batch: Batch) -> Tensor:
    """[said, vocab] float32: what a model foresees at each place of the batch where the target said a token."""
    # Padding stands at the end, where nothing sees it, so no mask is needed.
    hidden = model(input_ids=batch.tokens).logits
    found: Tensor = hidden[batch.rows, batch.places].float()
    return found


def distillation_loss(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean divergence, in nats, from the target's laws to a drafter's.

    Args:
        logits: [places, vocab] float32, the drafter's.
        top_ids: [places, top] the target's best tokens.
        top_logprobs: [places, top] float32.
        weights: [places] what each place counts for; None: all the same.
    """
    q = logits.log_softmax(-1).gather(1, top_ids)
    p = top_logprobs.exp()
    p_rest = (1.0 - p.sum(-1)).clamp_min(_LEAST)
    q_rest = (1.0 - q.exp().sum(-1)).clamp_min(_LEAST)
    inside = (p * (top_logprobs.clamp_min(-60.0) - q)).sum(-1)
    divergence = inside + p_rest * (p_rest.log() - q_rest.log())
    if weights is None:
        return divergence.mean()
    return (divergence * weights).sum() / weights.sum().clamp_min(_LEAST)
