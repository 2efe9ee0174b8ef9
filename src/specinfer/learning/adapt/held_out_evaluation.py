"""Comparison of two versions of a drafter on examples that neither was trained on.

Both are evaluated at the same positions, so only those count where they differ. For greedy text, where a position is a
hit or not, this is McNemar's test (McNemar, Psychometrika 12, 1947).
"""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.tree import TokenTree
from specinfer.drafters.vocabulary.token_map import TokenMap
from specinfer.learning.examples import Source, TrainingExample
from specinfer.model.batch import Piece
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner

Hits = npt.NDArray[np.float32]
_DEVIATIONS = 2.0  # number of standard deviations of the difference


@dataclass(slots=True)
class HeldOutExample:
    """A held-out example and the results of versions on it.

    Attributes:
        hits: By version number, [num_output] the result of `hits_in` for its logits.
    """

    example: TrainingExample
    hits: dict[int, Hits] = field(default_factory=dict)


class HeldOutEvaluation:
    """The newest held-out examples.

    Args:
        max_tokens: The largest number of output tokens in all of them.
        min_tokens: The number of tokens both versions must have been evaluated on before they are compared.
        margin: The hits per token by which a better version must be ahead.
    """

    def __init__(self, max_tokens: int, min_tokens: int, margin: float) -> None:
        self._max_tokens, self._min_tokens, self._margin = max_tokens, min_tokens, margin
        self.held_out: deque[HeldOutExample] = deque()

    def add(self, example: TrainingExample) -> None:
        """Add an example and drop the oldest ones over the limit."""
        self.held_out.append(HeldOutExample(example))
        while sum(one.example.num_output for one in self.held_out) > self._max_tokens:
            self.held_out.popleft()

    def unevaluated(self, version: int) -> list[HeldOutExample]:
        """Return the examples that the version was not evaluated on yet."""
        return [one for one in self.held_out if version not in one.hits]

    def forget(self, version: int) -> None:
        """Drop the results of a version that no longer exists."""
        for one in self.held_out:
            one.hits.pop(version, None)

    def rate(self, version: int) -> float:
        """Return the hits per token, or NaN if the version was not evaluated."""
        hits = [one.hits[version] for one in self.held_out if version in one.hits]
        return float(np.concatenate(hits).mean()) if hits else float("nan")

    def is_better(self, one: int, other: int) -> bool:
        """Return whether the first version is better, significantly and by the margin, where both were evaluated."""
        both = [(q.hits[one], q.hits[other]) for q in self.held_out if one in q.hits and other in q.hits]
        if not both:
            return False
        gained = np.concatenate([hits - hits_of_other for hits, hits_of_other in both]).astype(np.float64)
        least = max(self._margin * len(gained), _DEVIATIONS * float((gained**2).sum()) ** 0.5)
        return len(gained) >= self._min_tokens and float(gained.sum()) > least


def hits_in(logits: Tensor, example: TrainingExample, vocab_size: int) -> Hits:
    """Return the probability that a drafted token is the target's, [num_output], as far as the example shows.

    For greedy text it is 1 where the best token is the output token, else 0. For sampled text it is the overlap of the
    two distributions on the target's best tokens, sum min(p, q).

    Args:
        logits: [num_output, vocab] the drafter's logits at each position.
        vocab_size: The target's vocabulary size; tokens beyond it are never drafted.
    """
    logits = logits[:, :vocab_size].float()
    if example.source is Source.GREEDY:
        output_ids = torch.from_numpy(example.tokens[example.num_prompt :]).to(logits.device)
        found = (logits.argmax(-1) == output_ids).float()
    else:
        q = logits.softmax(-1).gather(1, torch.from_numpy(example.top_ids).long().to(logits.device))
        p = torch.from_numpy(example.top_logprobs).float().exp().to(logits.device)
        found = torch.minimum(p, q).sum(-1)
    hits: Hits = found.cpu().numpy()
    return hits


def hits_of(loaded: LoadedModel, example: TrainingExample, vocab_size: int) -> Hits:
    """Return the hits of a model in the form in which it serves, [num_output]."""
    read = example.tokens[:-1].tolist()
    runner = ModelRunner(loaded, len(read))
    slots = runner.cache.reserve("example", len(read))
    piece = Piece.of_span(read, TokenTree.root(read[-1]), runner.cache.slots("example"), slots)
    logits = runner.forward([replace(piece, num_logits=example.num_output)])
    runner.cache.free("example")
    if loaded.token_map is not None:
        logits = TokenMap(loaded.token_map, vocab_size).expand(logits)
    return hits_in(logits, example, vocab_size)
