"""Traces of the draft tree and the result of each step, for requests that ask for them."""

import time

import torch
from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.step_record import StepRecord
from specinfer.core.step_trace import StepTrace, TracedNode
from specinfer.core.tree import TokenTree
from specinfer.verify import Acceptance


class Tracer:
    """An observer that records the trees of traced requests in `Request.trace`."""

    reads_logits = False  # traced requests are served off the device

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        if request.trace is not None:
            request.trace.append(trace_step(request, tree, acceptance, logits, num_generated))

    def on_step(self, record: StepRecord) -> None:
        pass


def trace_step(
    request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
) -> StepTrace:
    """Return the trace of a step of a request that just emitted `num_generated` tokens; `logits` [len(tree), vocab]."""
    parents = torch.tensor([max(parent, 0) for parent in tree.parents], device=logits.device)
    tokens = torch.tensor(tree.tokens, device=logits.device)
    distributions = torch.log_softmax(logits.float(), -1)
    probs = distributions[parents, tokens].exp().tolist()
    makers: list[list[str]] = [[] for _ in tree.tokens]
    confidence = [0.0] * len(tree)
    for draw in tree.draws:
        if draw.drafter not in makers[draw.node]:
            makers[draw.node].append(draw.drafter)
        confidence[draw.node] = max(confidence[draw.node], draw.confidence)
    path = acceptance.path[:num_generated]
    ended_inside = num_generated <= len(acceptance.path)
    last = (0, *acceptance.path)[len(path)]
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
        next_p=None if ended_inside else float(distributions[last, acceptance.next_token].exp()),
    )
