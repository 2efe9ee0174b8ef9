"""Which of two versions of a drafter guesses better, on examples that none of them learned from.

Both answer the same places, so only those count where they differ: of greedy text, where a place is a hit or none, this
is McNemar's test (McNemar, Psychometrika 12, 1947).
"""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.drafters.vocabulary import TokenMap
from specinfer.learning.training_examples import Source, TrainingExample
from specinfer.model.batch import Piece
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner
from specinfer.tree import TokenTree

Hits = npt.NDArray[np.float32]
_DEVIATIONS = 2.0  # of the difference that chance makes


@dataclass(slots=True)
class Question:
    """A held-out example, and how versions answered it.

    Attributes:
        hits: By the number of a version, [num_output] what `hits_in` makes of its logits.
    """

    example: TrainingExample
    hits: dict[int, Hits] = field(default_factory=dict)


class HeldOutEvaluation:
    """The newest held-out examples.

    Args:
        max_tokens: Said by the target in all of them.
        min_tokens: So many must have been answered by both before two versions are compared.
        margin: Hits a token that a better version has more at least.
    """

    def __init__(self, max_tokens: int, min_tokens: int, margin: float) -> None:
        self._max_tokens, self._min_tokens, self._margin = max_tokens, min_tokens, margin
        self.questions: deque[Question] = deque()

    def add(self, example: TrainingExample) -> None:
        """Takes a new one; the oldest are let go."""
        self.questions.append(Question(example))
        while sum(question.example.num_output for question in self.questions) > self._max_tokens:
            self.questions.popleft()

    def unanswered(self, version: int) -> list[Question]:
        """Those that the version has not answered yet."""
        return [question for question in self.questions if version not in question.hits]

    def forget(self, version: int) -> None:
        """There is no such version any more."""
        for question in self.questions:
            question.hits.pop(version, None)

    def rate(self, version: int) -> float:
        """Hits a token; NaN if it answered nothing."""
        hits = [question.hits[version] for question in self.questions if version in question.hits]
        return float(np.concatenate(hits).mean()) if hits else float("nan")

    def is_better(self, one: int, other: int) -> bool:
        """Whether the first is, beyond chance and by the margin, on what both answered."""
        both = [(q.hits[one], q.hits[other]) for q in self.questions if one in q.hits and other in q.hits]
        if not both:
            return False
        gained = np.concatenate([hits - hits_of_other for hits, hits_of_other in both]).astype(np.float64)
        least = max(self._margin * len(gained), _DEVIATIONS * float((gained**2).sum()) ** 0.5)
        return len(gained) >= self._min_tokens and float(gained.sum()) > least


def hits_in(logits: Tensor, example: TrainingExample, vocab_size: int) -> Hits:
    """[num_output] how likely a guess is to be what the target says, as far as the example knows.

    Of greedy text whether the best guess is the token said; of sampled text what the two distributions have in common
    on the target's best tokens, sum min(p, q).

    Args:
        logits: [num_output, vocab] the drafter's at each place.
        vocab_size: The target's; tokens beyond it are never guessed.
    """
    logits = logits[:, :vocab_size].float()
    if example.source is Source.GREEDY:
        said = torch.from_numpy(example.tokens[example.num_prompt :]).to(logits.device)
        found = (logits.argmax(-1) == said).float()
    else:
        q = logits.softmax(-1).gather(1, torch.from_numpy(example.top_ids).long().to(logits.device))
        p = torch.from_numpy(example.top_logprobs).float().exp().to(logits.device)
        found = torch.minimum(p, q).sum(-1)
    hits: Hits = found.cpu().numpy()
    return hits


def hits_of(loaded: LoadedModel, example: TrainingExample, vocab_size: int) -> Hits:
    """[num_output] the hits of a model in the form in which it serves."""
    read = example.tokens[:-1].tolist()
    runner = ModelRunner(loaded, len(read))
    slots = runner.cache.reserve("example", len(read))
    piece = Piece.of_span(read, TokenTree.root(read[-1]), runner.cache.slots("example"), slots)
    logits = runner.forward([replace(piece, num_logits=example.num_output)])
    runner.cache.free("example")
    if loaded.token_map is not None:
        logits = TokenMap(loaded.token_map, vocab_size).expand(logits)
    return hits_in(logits, example, vocab_size)
