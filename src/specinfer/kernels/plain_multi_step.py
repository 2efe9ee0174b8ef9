"""The walk of the multi-step rule in plain PyTorch, the counterpart of `kernels/triton/multi_step.py`.

The rule is that of verify/multi_step.py. Here its trees, distributions and random numbers are tensors. Unlike the other
plain versions, this one reads tensor contents on the way: it is for CPUs and for tests.
"""

import torch
from torch import Tensor

from specinfer.core.noise import next_uniform
from specinfer.kernels.plain_tree import NAN, NO_VALID_TOKEN, Walk

Kept = tuple[list[int], int]  # a path and the token after it


def walk_multi_step(
    logits: Tensor,
    starts: Tensor,
    temperatures: Tensor,
    tokens: Tensor,
    parents: Tensor,
    sizes: Tensor,
    draws: Tensor,
    distribution_tokens: Tensor,
    distribution_probs: Tensor,
    uniforms: Tensor,
    *,
    max_depth: int,
    out: Walk | None = None,
    left: Tensor | None = None,
) -> Walk:
    """Try the draws of a node in draw order; each rejected one subtracts its distribution from the target's residual.

    SpecInfer (arXiv 2305.09781), section 4.3, as `verify.verify_multi_step`. The decisions are the same unless a random
    number is within about 1e-13 of the number it is compared with, because sums are computed in another order.

    Args:
        logits: [rows, vocab].
        starts: [requests] row of each request's root in `logits`; its other nodes follow.
        temperatures: [requests] float32, above 0.
        tokens, parents: [requests, max_nodes] of the trees, the root first.
        sizes: [requests] nodes in use, or 0 for no tree.
        draws: [requests, max_draws] node that each draw produced, in draw order; -1 after the last.
        distribution_tokens: [requests, max_draws, support] tokens that the draw could have produced; -1 for padding. A
            guess that was chosen deterministically has only its own token.
        distribution_probs: [requests, max_draws, support] float64 probabilities, which sum to 1.
        uniforms: [requests] int64 states of the requests' random numbers (`noise.UniformStream`), advanced in place.
        max_depth: Longest possible path.
        out: Tensors to write to.
        left: [requests, vocab] float64 scratch memory of the Triton kernel, -1 everywhere before and after. None to
            allocate it there; not used here.

    Returns:
        The same tensors as `plain_tree.walk`; a request whose logits allow no token has an empty path.
    """
    requests = len(tokens)
    path = torch.full((requests, max_depth), -1, dtype=torch.int32)
    lengths = torch.full((requests,), -1, dtype=torch.int32)
    following = torch.full((requests,), NO_VALID_TOKEN, dtype=torch.int64)
    for request, size in enumerate(sizes.tolist()):
        if size == 0:
            continue
        rows = logits[int(starts[request]) :][:size].float() / temperatures[request]
        distributions = distribution_tokens[request].long(), distribution_probs[request]
        tree = tokens[request].tolist(), parents[request].tolist()
        kept, token = _walk(
            rows.double(), tree, draws[request].tolist(), distributions, uniforms[request : request + 1], max_depth
        )
        path[request, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        lengths[request], following[request] = len(kept), token
    found = (path, lengths, following)
    if out is None:
        device = tokens.device
        return path.to(device), lengths.to(device), following.to(device)
    for place, result in zip(out, found, strict=True):
        place.copy_(result)
    return out


def _walk(
    rows: Tensor,
    tree: tuple[list[int], list[int]],
    draws: list[int],
    distributions: tuple[Tensor, Tensor],
    uniforms: Tensor,
    max_depth: int,
) -> Kept:
    (tokens, parents), node, kept = tree, 0, list[int]()
    while True:
        highest = rows[node].max()
        if highest.isnan():
            return [], NAN
        if highest == -torch.inf:
            return (kept[:-1], tokens[kept[-1]]) if kept else ([], NO_VALID_TOKEN)
        left = rows[node].softmax(dim=0)
        for draw, child in enumerate(draws):
            if child < 0 or parents[child] != node or len(kept) == max_depth:
                continue
            could = distributions[0][draw] >= 0
            ids, weights = distributions[0][draw][could], distributions[1][draw][could]
            q = weights[ids == tokens[child]].sum()
            rest = left.clone()
            rest[ids] = (left[ids] - weights).clamp(min=0)
            if _next_uniform(uniforms) * q < left[tokens[child]] or not rest.sum() > 0:
                kept.append(child)
                node = child
                break
            left = rest / rest.sum()
        else:
            mass = left.cumsum(dim=0)
            token = int(torch.searchsorted(mass, _next_uniform(uniforms) * mass[-1], right=True))
            return kept, token if token < len(left) else int(left.nonzero()[-1])


def _next_uniform(uniforms: Tensor) -> float:
    state, uniform = next_uniform(int(uniforms) % 2**64)
    uniforms.fill_(state - 2**64 if state >= 2**63 else state)
    return uniform
