"""Verification: a tree and the target's logits in, the accepted path and the next token out.

The coupled rule. Each request has seeded noise G_t for every position t. Plain decoding says
argmax(log p(. | prefix) + G_t) at position t. Here the same argmax is taken at every node of the tree,
and the walk goes down while what the target says is one of the children. Whatever was guessed, by whom,
and however the tree was cut, each token said is that same argmax given the same prefix: guesses decide
how many tokens a pass yields, never which. Greedy is the case G = 0.

Sources: greedy tree walk, SpecInfer (arXiv 2305.09781) Algorithm 2, VerifyGreedy; shared noise,
Daliri et al. (arXiv 2408.07978) and GLS (arXiv 2506.05632).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from specinfer.logits import process_logits
from specinfer.noise import gumbel
from specinfer.request import Request
from specinfer.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The nodes kept, from the root (left out) downwards, and the one token that follows them."""

    path: tuple[int, ...]
    next_token: int


def perturb(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> Tensor:
    """Processed logits plus the request's noise: their argmax is what the model says at each node.

    The drafter ranks its guesses by the same sum with its own logits, which is why they are accepted
    more often than independent draws.

    Args:
        logits: [num_nodes, vocab] float32.
        paths: For each row, the guessed tokens from the root (left out) to the node.

    Returns:
        [num_nodes, vocab] float32; -inf where a token cannot be said.
    """
    scores = process_logits(
        logits, request.params, request.prompt_ids, request.output_ids, paths, request.eos_token_ids
    )
    if request.params.is_greedy:
        return scores
    positions = torch.tensor([len(path) for path in paths], device=logits.device) + len(request.token_ids)
    depths, row_depth = torch.unique(positions, return_inverse=True)  # siblings share their noise
    seeds = torch.full_like(depths, request.seed)
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    return scores + gumbel(seeds, depths, tokens)[row_depth]


def verify_coupled(tree: TokenTree, choices: Sequence[int]) -> Acceptance:
    """Walks down while the token chosen at a node is one of its children.

    Args:
        choices: For each node, the token the target says after it.
    """
    children = tree.children()
    node, path = 0, []
    while (child := children[node].get(choices[node])) is not None:
        path.append(child)
        node = child
    return Acceptance(tuple(path), choices[node])


def choose(logits: Tensor, requests: Sequence[Request], trees: Sequence[TokenTree]) -> list[list[int]]:
    """What the target says after every node.

    Args:
        logits: [num_nodes of all trees, vocab] float32, trees one after the other.

    Returns:
        For each tree, a token id for each node; -1 where the model computed NaN, which no child carries.
    """
    sizes = [len(tree) for tree in trees]
    if all(request.params.is_plain_greedy for request in requests):
        chosen = logits.argmax(dim=-1)
    else:
        chosen = torch.cat(
            [
                perturb(rows, request, tree.path_tokens()).argmax(dim=-1)
                for rows, request, tree in zip(logits.split(sizes), requests, trees, strict=True)
            ]
        )
    # NaN wins every argmax, so a NaN anywhere in a row shows at the row's choice.
    said = logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
    every = iter(chosen.masked_fill(said.isnan(), -1).tolist())
    return [list(islice(every, size)) for size in sizes]
