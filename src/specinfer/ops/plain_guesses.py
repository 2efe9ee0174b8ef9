"""Merging of guesses of lookups with candidates of a draft loop, in plain PyTorch; triton/draft.py has the kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.ops.plain_draft import Candidates


@dataclass(frozen=True, slots=True)
class Guesses:
    """Trees of lookups, parents before children, no two children of a node alike. All are [requests, guesses]."""

    tokens: Tensor  # int32
    parents: Tensor  # int32 numbers of guesses; -1 for the root
    path_prob: Tensor  # float32, never above the parent's; -1 where there is none


def merge_guesses(guesses: Guesses, candidates: Candidates, first: int) -> None:
    """Add the guesses of lookups to the candidates; one that is a candidate already raises its path probability.

    Args:
        candidates: Written to, from `first` on, and path probabilities before it.
        first: Number of the first guess among the candidates; no candidate before it is a guess.
    """
    tokens, parents = candidates.tokens[:, :first], candidates.parents[:, :first]
    numbers = torch.full_like(guesses.parents, -1, dtype=torch.int64)  # of each guess, among the candidates
    for guess in range(guesses.tokens.shape[1]):
        above, token = guesses.parents[:, guess : guess + 1].long(), guesses.tokens[:, guess : guess + 1].long()
        path_prob = guesses.path_prob[:, guess : guess + 1]
        parent = torch.where(above >= 0, numbers.gather(1, above.clamp(min=0)), -1)
        is_same = (parents == parent) & (tokens == token)
        is_known, place = is_same.any(dim=1, keepdim=True), is_same.to(torch.int8).argmax(dim=1, keepdim=True)
        known = candidates.path_prob.gather(1, place)
        raised = torch.where(is_known, torch.maximum(known, path_prob), known)
        candidates.path_prob.scatter_(1, place, raised)
        numbers[:, guess : guess + 1] = torch.where(is_known, place, first + guess)
        at = slice(first + guess, first + guess + 1)
        candidates.tokens[:, at] = token
        candidates.parents[:, at] = parent.int()
        candidates.path_prob[:, at] = torch.where(is_known, -1.0, path_prob)
    candidates.confidence[:, first:].fill_(-1.0)
    candidates.columns[:, first:].fill_(-1)
