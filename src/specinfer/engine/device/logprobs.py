"""Log-probabilities of the tokens that a step emits, computed on the device after its walk, for accepted paths alone.

Places of a request are the root and the nodes of its path, in order: each has the token that follows it. Places after
the path are computed as well, because shapes are fixed, and never read.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.logprob import Logprob, by_token
from specinfer.core.sampling import MAX_LOGPROBS, SamplingParams
from specinfer.kernels.token_scores import TokenScores, score_tokens
from specinfer.model.graphs.sizes import at_least

COUNTS = (0, 20, MAX_LOGPROBS)  # of most probable tokens that steps return


def count_for(params: Iterable[SamplingParams], vocab: int) -> int | None:
    """Return how many of the most probable tokens a step returns for these requests; None if no request asks."""
    asked = [one.logprobs for one in params if one.logprobs is not None]
    if not asked:
        return None
    count = at_least(COUNTS, max(asked))
    assert count is not None
    return min(count, vocab)


def result_shapes(rows: int, num_places: int, count: int | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the results of a step; they are empty if nothing is asked."""
    places = (rows, 0 if count is None else num_places)
    best = (*places, count or 0)
    return {"logprob_float32": places, "rank": places, "best": best, "best_float32": best}


def write_logprobs(
    logits: Tensor, roots: Tensor, walked: tuple[Tensor, Tensor, Tensor], drafted: Tensor, results: Mapping[str, Tensor]
) -> None:
    """Write the log-probabilities of the emitted tokens.

    Args:
        logits: [rows * nodes, vocab], before processing.
        roots: [rows] int64 row of each root in `logits`; its other nodes follow.
        walked: path, lengths and following token, as `walk` returns them.
        drafted: [rows, depth] int64 tokens of the path.
        results: Tensors of `result_shapes`.
    """
    path, lengths, following = walked
    num_places = results["rank"].shape[1]
    nodes = torch.cat([torch.zeros_like(path[:, :1]), path], dim=1)[:, :num_places].clamp(min=0)
    last = following.clamp(min=0).unsqueeze(1)
    tokens = torch.cat([drafted, last], dim=1).scatter(1, lengths.clamp(min=0).long().unsqueeze(1), last)
    places = roots.unsqueeze(1) + nodes
    out = TokenScores(
        results["logprob_float32"].view(-1, 1), results["rank"].view(-1, 1), results["best"].flatten(0, 1),
        results["best_float32"].flatten(0, 1),
    )  # fmt: skip
    score_tokens(logits, places.flatten(), tokens[:, :num_places].reshape(-1, 1), out)


def read_logprobs(
    here: Mapping[str, npt.NDArray[Any]], row: int, tokens: Sequence[int], count: int
) -> list[dict[int, Logprob]]:
    """Return what `top_logprobs` returns for each emitted token of a request, without texts.

    Args:
        here: Results of a step.
        row: The request.
        tokens: The emitted tokens.
        count: Number of most probable tokens that it asks for.
    """
    values, ranks = here["logprob_float32"][row].tolist(), here["rank"][row].tolist()
    best, best_values = here["best"][row, :, :count].tolist(), here["best_float32"][row, :, :count].tolist()
    return [
        by_token([token], values[i : i + 1], ranks[i : i + 1], best[i], best_values[i])
        for i, token in enumerate(tokens)
    ]
