"""Shares of a step's token budget: how many of its known tokens each request computes."""

from collections.abc import Sequence

from specinfer.core.request import Request
from specinfer.policy.slo_planner import SLOPlanner


def token_shares(
    group: Sequence[Request], max_tokens: int, max_prompt_logprobs: int, planner: SLOPlanner | None
) -> list[int]:
    """Return the number of known tokens that each request of a group computes in a step.

    Decoding requests compute one. Half of the remaining budget is for the request that has been prefilling longest,
    so that a long prompt makes progress. The other half goes to the shortest remainders, so that they need not wait
    for it. Each request gets at least one token, because it could starve otherwise.

    Args:
        group: Requests, the oldest first.
        max_tokens: Budget of the step; each request has one token even if that is more.
        max_prompt_logprobs: Tokens of prompts whose log-probabilities are returned.
        planner: Limit by latency targets, or None.
    """
    shares = [1] * len(group)
    tokens_left, logprobs_left = max(max_tokens - len(shares), 0), max_prompt_logprobs
    unread = [request.num_unread - 1 for request in group]
    readers = [i for i, count in enumerate(unread) if count]  # oldest first
    if readers and planner is not None:
        decoding = [request for request, count in zip(group, unread, strict=True) if not count]
        tokens_left = planner.max_tokens(decoding, {group[i]: unread[i] for i in readers}, tokens_left)
    firsts = [(i, tokens_left // 2) for i in readers[:1]]
    for i, most in [*firsts, *((i, tokens_left) for i in sorted(readers, key=lambda i: (group[i].due, unread[i])))]:
        count = min(unread[i], most, tokens_left)
        if group[i].params.prompt_logprobs is not None:
            count = min(count, logprobs_left)
            logprobs_left -= count
        shares[i] += count
        unread[i] -= count
        tokens_left -= count
    return shares
