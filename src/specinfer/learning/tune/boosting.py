"""Collective boost-tuning: the training goal of a drafter, given the ones before it.

SpecInfer (arXiv 2305.09781), section 3. Drafters are tuned one after the other, and each learns what those before it do
not predict, so that together they cover more of the target's output than any alone. In the paper, whole prompts that
one predicts are skipped ("prompts"). Here tokens are weighted in addition ("tokens"): merged chains fail where all of
them have failed, so the weight of a token is the part of the chains through it that those before do not cover.

In sampled text a rejected token leaves a residual distribution: multi-step sampling continues with the part of p above
q, norm((p - q)+). Where the chains still run side by side, the next drafter is to learn that distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.noise import gumbel
from specinfer.learning.batches import collate
from specinfer.learning.distillation import overlap
from specinfer.learning.examples import DamagedError, Source, TrainingExample, reading, save_arrays
from specinfer.learning.trainable import TrainableDrafter
from specinfer.ops.cpu.choice import SUPPORT

Floats = npt.NDArray[np.float32]
_LEAST_WEIGHT = 0.5  # weight of a covered token: a chain that breaks there never reaches uncovered ones
_ARRAYS = ("ranks", "accepted", "top_probs")  # of a file of predictions
_LIKELY = 0.7  # probability that a drafter's own chain holds for one more token


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """A drafter's predictions on an example.

    Attributes:
        ranks: [num_output] int16, the rank of the output token among its best tokens, from 0, under the noise that the
            target used, as in coupled drafting.
        accepted: [num_output] float32, the probability that its drafted token would have been accepted where this token
            was emitted. For a text that was read: if the target had sampled a token there.
        top_probs: [num_output, top] float16, its probabilities of the tokens that the example stores.
    """

    ranks: npt.NDArray[np.int16]
    accepted: Floats
    top_probs: npt.NDArray[np.float16]

    @property
    def hits(self) -> npt.NDArray[np.bool_]:
        hits: npt.NDArray[np.bool_] = self.ranks == 0
        return hits


@torch.inference_mode()
def predict(drafter: TrainableDrafter, examples: Sequence[TrainingExample], rows: int = 16) -> list[Predictions]:
    """Return the drafter's predictions on each example, computed for some rows at a time."""
    device = next(drafter.parameters()).device
    predictions: list[Predictions] = []
    for start in range(0, len(examples), rows):
        group = examples[start : start + rows]
        batch = collate(group).to(device)
        logits = drafter.next_logits(batch)
        distribution = logits.softmax(-1)
        counts = [example.num_output for example in group]
        ranks = _ranks(logits, group, counts, batch.places, batch.output_ids)
        q = distribution.gather(1, batch.output_ids[:, None])[:, 0]
        top = distribution.gather(1, batch.top_ids)
        source = torch.tensor(np.repeat([example.source for example in group], counts), device=device)
        accepted = (q / batch.generated_logprobs.exp().clamp_min(1e-6)).clamp(max=1.0)
        accepted = torch.where(source == Source.GREEDY, (ranks == 0).float(), accepted)
        accepted = torch.where(source == Source.READ, overlap(top, batch.top_logprobs), accepted)
        parts = (x.cpu().split(counts) for x in (ranks.short(), accepted, top.half()))
        predictions += [Predictions(*(x.numpy() for x in arrays)) for arrays in zip(*parts, strict=True)]
    return predictions


def _ranks(
    logits: Tensor, examples: Sequence[TrainingExample], counts: Sequence[int], places: Tensor, output_ids: Tensor
) -> Tensor:
    """Return ranks of the output tokens under the target's noise, [outputs]; `SUPPORT` where beyond all."""
    best = logits.topk(min(SUPPORT, logits.shape[-1]), dim=-1)
    seeds = torch.tensor(np.repeat([example.seed for example in examples], counts), device=logits.device)
    # The noise of a token belongs to its own position, one after the position that predicts it.
    noise = gumbel(seeds, places + 1, best.indices)
    source = torch.tensor(np.repeat([example.source for example in examples], counts), device=logits.device)
    scores = torch.where((source == Source.SAMPLED)[:, None], best.values + noise, best.values)
    is_output = best.indices == output_ids[:, None]
    score = scores.masked_fill(~is_output, -torch.inf).amax(-1, keepdim=True)
    ranks = (scores > score).sum(-1)
    return torch.where(is_output.any(-1), ranks, SUPPORT)


def is_predicted(predictions: Sequence[Predictions], share: float = 0.9) -> bool:
    """Return whether one of the drafters predicts at least this share, so that the next need not learn the example."""
    return any(float(prediction.hits.mean()) >= share for prediction in predictions if len(prediction.ranks))


def token_weights(predictions: Sequence[Predictions], depth: int) -> Floats:
    """Return the weight of each token for the next drafter, [num_output]; 1 where nothing is covered.

    A chain from a token r to a token t is worth learning as far as no drafter before has all of it. The weight of a
    token averages this over all chains through it, each weighted by the probability that the next drafter would get
    that far.

    Args:
        predictions: Those of the drafters before on one example.
        depth: The length of the chains that are merged.
    """
    assert predictions
    num = len(predictions[0].accepted)
    weights, most = np.zeros(num), np.zeros(num)
    runs = [np.ones(num) for _ in predictions]  # probability that a drafter has the whole chain from each token
    for lag in range(min(depth, num)):
        width = num - lag
        runs = [run[:width] * prediction.accepted[lag:] for run, prediction in zip(runs, predictions, strict=True)]
        left = np.prod([1.0 - run for run in runs], axis=0)  # probability that none has it
        prob = _LIKELY**lag
        for into, value in ((weights, prob * left), (most, np.full(width, prob))):
            sums = np.concatenate([[0.0], value.cumsum()])
            ends = np.arange(num)
            into += sums[np.minimum(ends + 1, width)] - sums[np.clip(ends - lag, 0, width)]
    return np.asarray(_LEAST_WEIGHT + (1.0 - _LEAST_WEIGHT) * weights / most, dtype=np.float32)


def residual_logprobs(example: TrainingExample, predictions: Sequence[Predictions], depth: int) -> Floats:
    """Return the distribution that the next drafter is to learn, [num_output, top].

    It is the part of the target's that the drafters before leave. Multi-step sampling examines one drafted token after
    the other, and after a rejection the distribution is norm((p - q)+). That holds where the chains still run together;
    where those before have ended it is p itself. Only sampled text has such a residual: greedy chains take the best
    token, and a text that was read was not generated.
    """
    p = np.exp(example.top_logprobs.astype(np.float32))
    if example.source is not Source.SAMPLED:
        return example.top_logprobs.astype(np.float32)
    rest = np.maximum(1.0 - p.sum(axis=1), 0.0)
    residual, reached = p.copy(), np.ones(len(p), dtype=np.float32)
    for prediction in predictions:
        q = prediction.top_probs.astype(np.float32)
        q_rest = np.maximum(1.0 - q.sum(axis=1), 0.0)
        above = np.maximum(residual - q, 0.0)
        above_rest = np.maximum(rest - q_rest, 0.0)
        left = above.sum(axis=1) + above_rest
        is_left = left > 1e-4
        residual = np.where(is_left[:, None], above / np.maximum(left, 1e-4)[:, None], residual)
        rest = np.where(is_left, above_rest / np.maximum(left, 1e-4), rest)
        reached *= np.where(is_left, left, 0.0)
    together = _joint_share(predictions, depth)
    both = (together * reached)[:, None] * residual + (1.0 - together)[:, None] * p
    total = together * reached + (1.0 - together)
    # Where the drafters before leave nothing of the distribution, the distribution itself is learned.
    distribution = np.where((total > 1e-4)[:, None], both / np.maximum(total, 1e-4)[:, None], p)
    return np.asarray(np.log(np.maximum(distribution, 1e-9)), dtype=np.float32)


def _joint_share(predictions: Sequence[Predictions], depth: int) -> Floats:
    """Return the share of the chains reaching a token that run together with a chain of those before, [num_output]."""
    num = len(predictions[0].accepted)
    share, total = np.ones(num), np.ones(num)  # a chain that begins here
    runs = [np.ones(num) for _ in predictions]
    for lag in range(1, min(depth, num)):
        width = num - lag
        # The chain from each r over the tokens before r + lag.
        runs = [
            run[:width] * prediction.accepted[lag - 1 : lag - 1 + width]
            for run, prediction in zip(runs, predictions, strict=True)
        ]
        covered = 1.0 - np.prod([1.0 - run for run in runs], axis=0)
        share[lag:] += _LIKELY**lag * covered
        total[lag:] += _LIKELY**lag
    return np.asarray(share / total, dtype=np.float32)


def save_predictions(predictions: Sequence[Predictions], path: Path) -> None:
    """Write the predictions on some examples to a file, atomically."""
    arrays = {name: np.concatenate([getattr(each, name) for each in predictions]) for name in _ARRAYS}
    save_arrays({"lengths": np.asarray([len(each.ranks) for each in predictions], dtype=np.int64)} | arrays, path)


def load_predictions(path: Path, examples: Sequence[TrainingExample]) -> list[Predictions]:
    """Load the predictions on these examples.

    Raises:
        DamagedError: The file is damaged, or belongs to other examples.
    """
    with reading(path, "predictions") as arrays:
        ends = arrays["lengths"].cumsum()[:-1]
        parts = [np.split(arrays[name], ends) for name in _ARRAYS]
        predictions = [Predictions(*arrays) for arrays in zip(*parts, strict=True)]
    wanted = [{example.num_output} for example in examples]
    if [{len(each.ranks), len(each.accepted), len(each.top_probs)} for each in predictions] != wanted:
        raise DamagedError(f"{path} is about other examples than those of the run; delete it")
    return predictions
