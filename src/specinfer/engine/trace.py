"""Traces of the draft tree and the result of a step."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.speculation import StepTrace, TracedNode
from specinfer.core.tree import TokenTree
from specinfer.verify import Acceptance


def target_probs(tree: TokenTree, acceptance: Acceptance, logits: Tensor) -> list[float]:
    """Return the target's probabilities of each node's token after its parent; the first is that of the next token.

    Args:
        logits: [len(tree), vocab] before processing.
    """
    parents, tokens = list(tree.parents), list(tree.tokens)
    parents[0], tokens[0] = (0, *acceptance.path)[-1], acceptance.next_token
    places, chosen = (torch.tensor(ids, device=logits.device) for ids in (parents, tokens))
    probs: list[float] = torch.log_softmax(logits.float(), -1)[places, chosen].exp().tolist()
    return probs


def trace_step(
    request: Request, tree: TokenTree, acceptance: Acceptance, probs: Sequence[float], num_generated: int
) -> StepTrace:
    """Return the trace of a step of a request that just emitted `num_generated` tokens.

    Args:
        probs: What `target_probs` returns.
    """
    makers: list[list[str]] = [[] for _ in tree.tokens]
    confidence = [0.0] * len(tree)
    for draw in tree.draws:
        if draw.drafter not in makers[draw.node]:
            makers[draw.node].append(draw.drafter)
        confidence[draw.node] = max(confidence[draw.node], draw.confidence)
    path = acceptance.path[:num_generated]
    ended_inside = num_generated <= len(acceptance.path)
    nodes = [
        TracedNode(tree.tokens[i], tree.parents[i], tuple(makers[i]), confidence[i], probs[i], i in path)
        for i in range(1, len(tree))
    ]
    return StepTrace(
        time=time.time(),
        position=len(request.token_ids) - num_generated - 1,
        root=tree.tokens[0],
        nodes=tuple(nodes),
        path=tuple(path),
        next_token=None if ended_inside else acceptance.next_token,
        next_p=None if ended_inside else probs[0],
    )
