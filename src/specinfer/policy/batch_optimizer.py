"""Optimiser of the learned speculation policy: a configuration for each request, fastest for the whole batch.

Example: a pass takes 1 s and 0.1 s more for each row beyond the first. With 2 draft tokens, one request is expected to
emit 2.8 tokens and another 1.1; without, 1 each. Both plain: 2 tokens in 1.1 s, 1.82 tokens/s. Both with draft tokens:
3.9 in 1.5 s, 2.60. Only the first with draft tokens: 3.8 in 1.3 s, 2.92 tokens/s, which is chosen.
"""

import numpy as np
import numpy.typing as npt

from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Floats
from specinfer.policy.network import ExpectedYield

Ints = npt.NDArray[np.int64]
_ROUNDS = 3  # rounds in which nodes are priced by the choice of the round before


def choose_configurations(expected: ExpectedYield, costs: CostModel) -> Ints:
    """Return the configurations with the most expected tokens per second for the whole batch: [requests].

    First the best single configuration for all requests is found, with models and without. Then each request chooses by
    itself, at the token rate and the price of a node and a level that follow from the choice before (Dinkelbach's rule
    for the best ratio), as long as that is better. Finally each request chooses once more exactly, with the others
    fixed.
    """
    num_requests = len(expected.tokens)
    nodes, levels = expected.nodes.sum(axis=0), expected.levels.max(axis=0)
    rates = expected.tokens.sum(axis=0) / _seconds(num_requests, nodes, levels, costs)
    best = int(rates.argmax())
    if num_requests == 1:
        return np.full(1, best)
    starts = {best, int(np.where(levels > 0, 0.0, rates).argmax())}
    refined = [_refine(expected, costs, start, float(rates[start])) for start in starts]
    return _choose_each_again(expected, costs, max(refined, key=lambda result: result[0])[1])


def _choose_each_again(expected: ExpectedYield, costs: CostModel, chosen: Ints) -> Ints:
    """Let each request choose once more, exactly: the best for the whole batch with the other choices fixed."""
    each = np.arange(len(chosen))
    tokens, nodes = expected.tokens[each, chosen].sum(), expected.nodes[each, chosen].sum()
    levels = expected.levels[each, chosen]
    for i in range(len(chosen)):
        tokens_left, nodes_left = tokens - expected.tokens[i, chosen[i]], nodes - expected.nodes[i, chosen[i]]
        levels[i] = 0.0
        deepest = np.maximum(expected.levels[i], levels.max())
        rates = (tokens_left + expected.tokens[i]) / _seconds(
            len(chosen), nodes_left + expected.nodes[i], deepest, costs
        )
        best = int(rates.argmax())
        chosen[i], levels[i] = best, expected.levels[i, best]
        tokens, nodes = tokens_left + expected.tokens[i, best], nodes_left + expected.nodes[i, best]
    return chosen


def _refine(expected: ExpectedYield, costs: CostModel, start: int, rate: float) -> tuple[float, Ints]:
    """Return tokens per second and the choice, starting from one configuration for all requests."""
    num_requests = len(expected.tokens)
    each = np.arange(num_requests)
    chosen = np.full(num_requests, start)
    for _ in range(_ROUNDS):
        rows = num_requests + expected.nodes[each, chosen].sum()
        price = float(costs.target(rows + num_requests) - costs.target(rows)) / num_requests
        # Levels are shared: those that another request needs anyway are free, and one request pays for deeper ones.
        level = float(costs.draft_level(num_requests))
        deeper = np.maximum(expected.levels - expected.levels[each, chosen].max(), 0.0)
        tried = (expected.tokens - rate * (price * expected.nodes + level * deeper)).argmax(axis=1)
        nodes, deepest = expected.nodes[each, tried].sum(), expected.levels[each, tried].max()
        rate_tried = float(expected.tokens[each, tried].sum() / _seconds(num_requests, nodes, deepest, costs))
        if rate_tried <= rate:
            break
        chosen, rate = tried, rate_tried
    return rate, chosen


def rates_alone(expected: ExpectedYield, costs: CostModel) -> Floats:
    """Return the expected tokens per second of each request alone: [requests, configurations]."""
    return np.asarray(expected.tokens / costs.step(1, expected.nodes, expected.levels))


def _seconds(num_requests: int, nodes: npt.ArrayLike, levels: npt.ArrayLike, costs: CostModel) -> Floats:
    """Return the seconds of a step with this many draft tokens and levels in all."""
    nodes = np.asarray(nodes)
    return np.asarray(costs.target(num_requests + nodes) + costs.draft(nodes, levels) + costs.rest)
