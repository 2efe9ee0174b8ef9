"""Rows of a pass: the logits of each tree come back whole, whatever else the pass has."""

import torch

from specinfer import SamplingParams
from specinfer.core.request import FinishReason, Request, Span
from specinfer.core.tree import TokenTree
from specinfer.engine.host_step import HostStep, logits_by_tree, pieces_of
from specinfer.engine.timer import StageClock
from specinfer.model.kv_cache import KVCache
from tiny import make_request


def _step(*requests: Request) -> HostStep:
    """Chunk, prompt with log-probabilities and a tree, and a last token with a tree, as far as there are requests."""
    spans = [Span(request, 0, end) for request, end in zip(requests, (2, 3, 1), strict=False)]
    trees = [None, TokenTree.chain(3, [7, 8], "a"), TokenTree.chain(4, [9], "a")]
    step = HostStep(spans, StageClock())
    step.trees = trees[: len(spans)]
    return step


def _requests() -> list[Request]:
    asks = SamplingParams(prompt_logprobs=1)
    return [make_request("0", [1, 2, 3]), make_request("1", [1, 2, 3], asks), make_request("2", [4])]


def test_a_pass_has_the_known_tokens_and_the_draft_tokens_of_each_span() -> None:
    step, cache = _step(*_requests()), KVCache(32)
    pieces = pieces_of(step, cache)
    assert [len(piece.slots) for piece in pieces] == [2, 5, 2]
    assert [piece.num_logits for piece in pieces] == [0, 5, 2]
    assert [len(cache.slots(str(i))) for i in range(3)] == [0, 0, 0]
    assert cache.num_owned == 9


def test_each_tree_has_its_logits_and_prompts_have_theirs() -> None:
    requests = _requests()
    logits = torch.arange(7.0)[:, None].expand(7, 16)
    rows = logits_by_tree(_step(*requests), logits)
    assert [row[:, 0].tolist() for row in rows] == [[2.0, 3.0, 4.0], [5.0, 6.0]]
    assert len(requests[1].prompt_logprobs) == 3


def test_requests_that_ended_have_no_logits() -> None:
    requests = _requests()
    requests[1].finish_reason = FinishReason.ABORT
    rows = logits_by_tree(_step(*requests), torch.arange(7.0)[:, None].expand(7, 16))
    assert [row[:, 0].tolist() for row in rows] == [[5.0, 6.0]]
    assert not requests[1].prompt_logprobs
