"""Draft sampling: candidates for a node from a small model's logits, in order, with their distributions.

Coupled verification needs the best tokens under the noise that the target will use ("shared-noise"). A rule that uses
random accept/reject decisions needs real draws with independent noise, and the distribution of each draw. "top-k"
tokens are chosen and have no distribution. Distributions cover the best few tokens and sum to 1 there, so they are
exact and short.

Sources: drawing without replacement as one race of exponentials, Sequoia (arXiv 2402.12374); one draw from the tail in
addition to the best tokens ("hybrid"), Hu et al. (arXiv 2502.18779).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.draws import Distribution, DrawnFrom
from specinfer.core.noise import derive_seed, draws_of
from specinfer.core.request import Request
from specinfer.core.rules import AUTO, RULES
from specinfer.drafters.growth.frontier import Level
from specinfer.drafters.vocabulary.token_map import TokenMap
from specinfer.ops import computing_alone
from specinfer.ops.cpu.choice import SUPPORT, most_probable, noise_for
from specinfer.ops.cpu.transfers import on_host
from specinfer.verify.logits import adjust, is_adjusted, truncate

CHOSEN = ("shared-noise", "top-k")  # with these, tokens are chosen, not drawn: none has a distribution


def sampling_of(draft_sampling: str, request: Request) -> str:
    """Return the kind of draft sampling for a request; "auto" is that of its verification rule."""
    return RULES[request.verification or "coupled"].draft_samplings[0] if draft_sampling == AUTO else draft_sampling


def chooses_for(draft_sampling: str, request: Request) -> bool:
    """Return whether all candidates for a request are chosen, so that none has a distribution."""
    return request.params.is_greedy or sampling_of(draft_sampling, request) in CHOSEN


@dataclass(frozen=True)
class Candidates:
    """The possible children of each of some nodes, in the order in which they were drawn or chosen."""

    tokens: npt.NDArray[np.int64]  # [nodes, width]; -1 where there is none
    confidence: npt.NDArray[np.float32]  # [nodes, width]
    drawn_from: DrawnFrom | None = None  # None if all were chosen
    # [nodes, support] distribution of the draws, or of which parts are drawn; None if all were chosen
    whole_distribution: Tensor | None = None

    @cached_property
    def whole(self) -> npt.NDArray[np.float64] | None:
        """`whole_distribution`, copied to the host on first use."""
        return None if self.whole_distribution is None else np.asarray(self.whole_distribution.cpu().numpy())

    def distribution(self, node: int, rank: int) -> Distribution | None:
        """Return the distribution that this candidate was drawn from, or None if it was chosen."""
        drawn = self.drawn_from
        return None if drawn is None or drawn.places[node, rank] < 0 else drawn[node * drawn.places.shape[1] + rank]


@computing_alone()
def draw(draft_sampling: str, logits: Tensor, level: Level, token_map: TokenMap | None = None) -> Candidates:
    """Return candidates for each node.

    Args:
        draft_sampling: "shared-noise", "top-k", "without-replacement", "iid", "hybrid", or "auto": what the rule of
            each request needs. Greedy requests always get the best tokens, chosen.
        logits: [nodes, vocab] float32.
        level: The nodes.
        token_map: The target tokens of the columns of the logits, or None for all of them.
    """
    if token_map is not None and _is_adjusted(level):
        logits, token_map = token_map.expand(logits), None  # adjustments find tokens by their ids
    width = max(frontier.width for frontier in level.frontiers)
    size = min(logits.shape[-1], max(SUPPORT, width))
    values, ids = most_probable(_adjusted(logits, level), size)
    if token_map is not None:
        ids = token_map.ids[ids]
    scores = _tempered(values, level)
    kinds = (
        {sampling_of(draft_sampling, frontier.request) for frontier in level.frontiers}
        if draft_sampling == AUTO
        else ()
    )
    if len(kinds) > 1:
        chosen, drawn = (
            _candidates(kind, scores, ids, level, width) for kind in sorted(kinds, key=lambda kind: kind not in CHOSEN)
        )
        is_chosen = np.asarray(level.each(lambda frontier: [chooses_for(draft_sampling, frontier.request)]))
        return _by_row(is_chosen, chosen, drawn)
    return _candidates(next(iter(kinds), draft_sampling), scores, ids, level, width)


def _by_row(is_chosen: npt.NDArray[np.bool_], chosen: Candidates, drawn: Candidates) -> Candidates:
    """Return the chosen candidates for some rows and the drawn ones for the others."""
    drawn_from = drawn.drawn_from
    return replace(
        drawn,
        tokens=np.where(is_chosen, chosen.tokens, drawn.tokens),
        confidence=np.where(is_chosen, chosen.confidence, drawn.confidence),
        drawn_from=drawn_from and replace(drawn_from, places=np.where(is_chosen, -1, drawn_from.places)),
    )


def _candidates(draft_sampling: str, scores: Tensor, ids: Tensor, level: Level, width: int) -> Candidates:
    """Return candidates from `scores` [nodes, support], descending before noise, of the tokens `ids`."""
    is_sampled = level.each(lambda frontier: not frontier.request.params.is_greedy)
    if draft_sampling in CHOSEN or not any(is_sampled):
        is_noisy = draft_sampling == "shared-noise" and any(is_sampled)
        if is_noisy:
            noisy = scores + _shared_noise(level, ids)
            scores = noisy if all(is_sampled) else torch.where(_column(is_sampled, scores), noisy, scores)
        return _chosen(scores, ids, width, descend=not is_noisy)
    return _drawn(draft_sampling, scores, ids, _column(is_sampled, scores), level, width)


def _column(values: Sequence[bool], like: Tensor) -> Tensor:
    """Return the values as [rows, 1] on the device of `like`."""
    return torch.tensor(values, device=like.device).unsqueeze(1)


def _parts(level: Level, rows: Tensor) -> list[Tensor]:
    """Return the rows of each frontier."""
    return [rows[a:b] for a, b in pairwise(level.starts)]


def _is_adjusted(level: Level) -> bool:
    return any(is_adjusted(frontier.request, max(frontier.depths, default=0)) for frontier in level.frontiers)


def _adjusted(logits: Tensor, level: Level) -> Tensor:
    if not _is_adjusted(level):
        return logits
    parts = [
        adjust(part, frontier.request, [frontier.path_of(i) for i in range(len(part))])
        for part, frontier in zip(_parts(level, logits), level.frontiers, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _tempered(values: Tensor, level: Level) -> Tensor:
    params = [frontier.request.params for frontier in level.frontiers]
    if all(p.is_greedy or (p.temperature == 1.0 and not p.truncates) for p in params):
        return values
    parts = [truncate(part, own) for part, own in zip(_parts(level, values), params, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _shared_noise(level: Level, ids: Tensor) -> Tensor:
    """Return the noise that the target adds to these tokens at the position after each node."""
    positions = [len(frontier.request.token_ids) + depth for frontier in level.frontiers for depth in frontier.depths]
    return noise_for(level.each(lambda frontier: frontier.request.seed), positions, ids)


def _own_noise(level: Level, ids: Tensor, *, draws: int = 1) -> Tensor:
    """Return noise that nothing else uses, [nodes, draws, support]."""
    numbers, seeds = list[int](), list[int]()
    for frontier in level.frontiers:
        request, count = frontier.request, draws * len(frontier.depths)
        first = request.drafting.num_draws.get(frontier.drafter, 0)
        request.drafting.num_draws[frontier.drafter] = first + count
        numbers += range(first, first + count)
        seeds += [derive_seed(request.seed, draws_of(frontier.drafter))] * count
    noise = noise_for(seeds, numbers, ids if draws == 1 else ids.repeat_interleave(draws, dim=0))
    return noise.view(len(level), draws, -1)


def _chosen(scores: Tensor, ids: Tensor, width: int, *, descend: bool) -> Candidates:
    """Return the best tokens; `descend` is True if the scores of each node descend already."""
    values, tokens = on_host([scores, ids])  # numpy takes a third of the time for so few numbers
    best = values[:, :width]
    if descend:
        tokens = tokens[:, :width]
    else:
        rows, order = np.arange(len(values))[:, None], np.argsort(-values, axis=-1, kind="stable")[:, :width]
        best, tokens = values[rows, order], tokens[rows, order]
    possible = best > -np.inf
    highest = best[:, :1]
    with np.errstate(invalid="ignore"):  # a row without possible tokens
        weights = np.exp(values - highest).sum(axis=-1, keepdims=True)
        confidence = np.where(possible, np.exp(best - highest) / weights, 0.0)
    tokens = np.where(possible, tokens, -1)
    return Candidates(tokens, confidence.astype(np.float32))


def _drawn(draft_sampling: str, scores: Tensor, ids: Tensor, sampled: Tensor, level: Level, width: int) -> Candidates:
    """Return drawn candidates from `scores` [nodes, support], descending before noise, and `sampled` [nodes, 1]."""
    whole = distributions = scores.double().softmax(dim=-1).nan_to_num(0.0)
    width = min(width, scores.shape[-1])
    ranks = torch.arange(width, device=ids.device).expand(len(level), -1)  # indices of the best tokens
    if draft_sampling == "iid":
        places = (scores.unsqueeze(1) + _own_noise(level, ids, draws=width)).argmax(dim=-1)
        drawn = torch.ones_like(places, dtype=torch.bool)
    elif draft_sampling == "without-replacement":
        places = (scores + _own_noise(level, ids)[:, 0]).topk(width, dim=-1).indices
        drawn = torch.ones_like(places, dtype=torch.bool)
    else:
        places, drawn, distributions = _hybrid(scores, ids, level, width)
    places = torch.where(sampled, places, ranks)
    drawn &= sampled
    possible = whole.gather(1, places) > 0
    # Acceptance hardly depends on the drawn token, but on how peaked the distribution is. No confidence may depend on
    # the draw: the confidence of a token chosen next to it would reveal the draw, and so decide whether it is taken.
    sure = whole[:, :1].expand(-1, width)  # scores descend
    confidence = torch.where(drawn, sure, whole.gather(1, ranks))
    chosen, drawn_places = ids.gather(1, places).masked_fill(~possible, -1), places.masked_fill(~drawn, -1)
    tokens, shares, support, probs, indices = on_host([chosen, confidence.float(), ids, distributions, drawn_places])
    drawn_from = DrawnFrom(support, probs, indices, is_replaced=draft_sampling == "iid")
    return Candidates(tokens, shares, drawn_from, whole_distribution=whole)


def _hybrid(scores: Tensor, ids: Tensor, level: Level, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token from the distribution without the group-1 best ones, then choose those, then the next best.

    Returns:
        Indices [nodes, width], whether each was drawn [nodes, width], and distributions [nodes, support] without the
            best tokens.
    """
    best = torch.tensor(level.each(lambda frontier: frontier.group - 1), device=ids.device).unsqueeze(1)
    order = torch.arange(scores.shape[-1], device=ids.device).unsqueeze(0)
    tail = scores.masked_fill(order < best, -torch.inf)
    # If the distribution has no tail, the first token is drawn from all of it.
    tail = torch.where((tail > -torch.inf).any(dim=-1, keepdim=True), tail, scores)
    first = (tail + _own_noise(level, ids)[:, 0]).argmax(dim=-1, keepdim=True)
    others = torch.where(order == first, scores.shape[-1], order.expand_as(scores)).sort(dim=-1).values
    places = torch.cat([first, others[:, : width - 1]], dim=1)
    drawn = torch.zeros_like(places, dtype=torch.bool)
    drawn[:, 0] = True
    return places, drawn, tail.double().softmax(dim=-1).nan_to_num(0.0)
