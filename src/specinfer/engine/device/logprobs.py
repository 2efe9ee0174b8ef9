"""Log-probabilities of the tokens that a step emits, computed on the device after its walk, for accepted paths alone.

Places of a request are the root and the nodes of its path, in order: each has the token that follows it. Places after
the path are computed as well, because shapes are fixed, and never read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.logprob import Logprob, by_token
from specinfer.core.sampling import MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS, SamplingParams
from specinfer.model.graphs.sizes import at_least
from specinfer.ops.token_scores import TokenScores, score_tokens
from specinfer.ops.trees import DeviceTrees

BEST = (0, 20, MAX_LOGPROBS)  # numbers of most probable tokens that steps return
OTHERS = (0, 16, MAX_LOGPROB_TOKEN_IDS)  # numbers of further tokens


@dataclass(frozen=True, slots=True)
class Asked:
    """The tokens whose log-probabilities a step returns, in addition to the emitted ones.

    Attributes:
        best: Number of most probable tokens, at most the vocabulary.
        others: Number of tokens that each request may name.
    """

    best: int
    others: int = 0

    @classmethod
    def from_params(cls, params: Iterable[SamplingParams], vocab: int) -> "Asked | None":
        """Return the least that includes what each of these requests asks for, or None if none asks."""
        asked = [wanted for wanted in params if wanted.logprobs is not None]
        if not asked:
            return None
        best = at_least(BEST, max(wanted.logprobs or 0 for wanted in asked))
        others = at_least(OTHERS, max(len(wanted.scored_tokens) for wanted in asked))
        assert best is not None
        assert others is not None
        return cls(min(best, vocab), others)

    def holds(self, other: "Asked") -> bool:
        return self.best >= other.best and self.others >= other.others


def result_shapes(rows: int, num_places: int, asked: Asked | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the results of a step; they are empty if nothing is asked."""
    best, others = (asked.best, 1 + asked.others) if asked else (0, 0)
    places = (rows, num_places)
    return {
        "logprob_float32": (*places, others),  # of the emitted token, then of the tokens that the request names
        "rank": (*places, others),
        "best": (*places, best),
        "best_float32": (*places, best),
    }


def write_logprobs(
    logits: Tensor,
    roots: Tensor,
    walked: tuple[Tensor, Tensor, Tensor],
    drafted: Tensor,
    others: Tensor,
    results: Mapping[str, Tensor],
) -> None:
    """Write the log-probabilities of the emitted tokens.

    Args:
        logits: [rows * nodes, vocab], before processing.
        roots: [rows] int64 row of each root in `logits`; its other nodes follow.
        walked: path, lengths and following token, as `walk` returns them.
        drafted: [rows, depth] int64 tokens of the path.
        others: [rows, n] int64 tokens that requests name, at least as many as are returned.
        results: Tensors of `result_shapes`.
    """
    path, lengths, following = walked
    num_places, num_tokens = results["rank"].shape[1:]
    nodes = torch.cat([torch.zeros_like(path[:, :1]), path], dim=1)[:, :num_places].clamp(min=0)
    last = following.clamp(min=0).unsqueeze(1)
    tokens = torch.cat([drafted, last], dim=1).scatter(1, lengths.clamp(min=0).long().unsqueeze(1), last)
    tokens = tokens[:, :num_places].unsqueeze(2)
    if num_tokens > 1:
        named = others[:, : num_tokens - 1].unsqueeze(1).expand(-1, num_places, -1)
        tokens = torch.cat([tokens, named], dim=2)
    places = roots.unsqueeze(1) + nodes
    out = TokenScores(*(results[name].flatten(0, 1) for name in ("logprob_float32", "rank", "best", "best_float32")))
    score_tokens(logits, places.flatten(), tokens.reshape(-1, num_tokens), out)


def write_node_logprobs(
    logits: Tensor,
    roots: Tensor,
    trees: DeviceTrees,
    walked: tuple[Tensor, Tensor, Tensor],
    results: Mapping[str, Tensor],
) -> None:
    """Write the log-probability of each node's token, and in the root's place that of the token after the path.

    Arguments are as for `write_logprobs`.
    """
    path, lengths, following = walked
    ends = path.gather(1, (lengths - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1)
    parents, tokens = trees.parents.long().clamp(min=0), trees.tokens.long()
    parents[:, 0], tokens[:, 0] = torch.where(lengths > 0, ends, 0).long(), following.clamp(min=0)
    values = results["node_logprob_float32"].view(-1, 1)
    none = tokens.view(-1, 1)[:, :0]
    out = TokenScores(values, none, none, values[:, :0])
    score_tokens(logits, (roots.unsqueeze(1) + parents).flatten(), tokens.view(-1, 1), out)


def read_logprobs(
    results: Mapping[str, npt.NDArray[Any]], row: int, tokens: Sequence[int], params: SamplingParams
) -> list[dict[int, Logprob]]:
    """Return what `top_logprobs` returns for each emitted token of a request.

    Args:
        results: Those of a step.
        row: The request.
        tokens: The emitted tokens.
        params: What it asks for.
    """
    num_tokens, count = 1 + len(params.scored_tokens), params.logprobs
    values, ranks = (results[name][row, :, :num_tokens].tolist() for name in ("logprob_float32", "rank"))
    best, best_values = (results[name][row, :, :count].tolist() for name in ("best", "best_float32"))
    return [
        by_token([token, *params.scored_tokens], values[i], ranks[i], best[i], best_values[i])
        for i, token in enumerate(tokens)
    ]
