"""Optimiser: the alternatives with the most expected tokens per second for a whole batch.

An alternative is a tree, or some drafters and a tree; the first is plain decoding. What each is expected to yield
follows from the acceptance of ranks (`rank_choice`) or from a network (`learned_choice`).

Example: a pass takes 1 s and 0.1 s more for each row beyond the first. With 2 draft tokens, one request is expected to
emit 2.8 tokens and another 1.1; without, 1 each. Both plain: 2 tokens in 1.1 s, 1.82 tokens/s. Both with draft tokens:
3.9 in 1.5 s, 2.60. Only the first with draft tokens: 3.8 in 1.3 s, 2.92 tokens/s, which is chosen.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer.core.request import Request
from specinfer.drafters.sparse_context import num_to_read
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Floats

Ints = npt.NDArray[np.int64]
_ROUNDS = 3  # rounds in which nodes are priced by the choice of the round before


@dataclass(frozen=True, slots=True)
class ExpectedYield:
    """Expected averages of a step with each alternative: of each request, or of several together.

    Attributes:
        tokens: Emitted tokens, the target's own included.
        nodes: Draft tokens.
        levels: Levels drafted by models.
    """

    tokens: Floats  # each [..., alternatives]
    nodes: Floats
    levels: Floats

    def times(self, num_requests: int) -> "ExpectedYield":
        """Return the yield of this many requests alike."""
        levels = self.levels if num_requests else 0 * self.levels
        return ExpectedYield(num_requests * self.tokens, num_requests * self.nodes, levels)

    def plus(self, others: "ExpectedYield") -> "ExpectedYield":
        """Return the yield together with other requests, with which levels are shared."""
        levels = np.maximum(self.levels, others.levels)
        return ExpectedYield(self.tokens + others.tokens, self.nodes + others.nodes, levels)

    def together(self) -> "ExpectedYield":
        """Return the yield of all requests, which are the first dimension."""
        return ExpectedYield(self.tokens.sum(axis=0), self.nodes.sum(axis=0), self.levels.max(axis=0))

    def __getitem__(self, index: Any) -> "ExpectedYield":
        """Return the yield of some requests or alternatives, by an index as of arrays."""
        return ExpectedYield(self.tokens[index], self.nodes[index], self.levels[index])

    def rates(self, costs: CostModel, num_requests: int) -> Floats:
        """Return the tokens per second of a step of this many requests: [..., alternatives]."""
        return np.asarray(self.tokens / costs.step(num_requests, self.nodes, self.levels))


def clearly_faster(rates: Floats, usual: int, margin: float) -> int:
    """Return the fastest alternative if it is faster than the usual one by this factor, or else the usual one."""
    best = int(rates.argmax())
    return best if rates[best] > margin * rates[usual] else usual


def choose_each(expected: ExpectedYield, costs: CostModel) -> Ints:
    """Return the alternative of each request with the most expected tokens per second for the batch: [requests].

    First the best single alternative for all requests is found, with models and without. Then each request chooses by
    itself, at the token rate and the price of a node and a level that follow from the choice before (Dinkelbach's rule
    for the best ratio), as long as that is better. Finally one request after the other changes its choice, exactly.

    Args:
        expected: Yield of each request, [requests, alternatives].
    """
    num_requests = len(expected.tokens)
    alike = expected.together()
    rates = alike.rates(costs, num_requests)
    best = int(rates.argmax())
    if num_requests == 1:
        return np.full(1, best)
    starts = {best, int(np.where(alike.levels > 0, 0.0, rates).argmax())}
    refined = [_refine(expected, costs, start, float(rates[start])) for start in starts]
    return _improve(expected, costs, max(refined, key=lambda result: result[0])[1])


def _refine(expected: ExpectedYield, costs: CostModel, start: int, rate: float) -> tuple[float, Ints]:
    """Return tokens per second and the choice, starting from one alternative for all requests."""
    num_requests = len(expected.tokens)
    each, chosen = np.arange(num_requests), np.full(num_requests, start)
    for _ in range(_ROUNDS):
        now = expected[each, chosen].together()
        rows = num_requests + now.nodes
        price = float(costs.target(rows + num_requests) - costs.target(rows)) / num_requests
        # Levels are shared: those that another request needs anyway are free, and one request pays for deeper ones.
        level = float(costs.draft_level(num_requests))
        deeper = np.maximum(expected.levels - now.levels, 0.0)
        tried = (expected.tokens - rate * (price * expected.nodes + level * deeper)).argmax(axis=1)
        rate_tried = float(expected[each, tried].together().rates(costs, num_requests))
        if rate_tried <= rate:
            break
        chosen, rate = tried, rate_tried
    return rate, chosen


def _improve(expected: ExpectedYield, costs: CostModel, chosen: Ints) -> Ints:
    """Change the choice of one request at a time, the one that gains the batch most, until none gains."""
    each = np.arange(len(chosen))
    for _ in each:
        batch = expected[each, chosen]
        levels = np.where(np.eye(len(chosen), dtype=np.bool_), 0.0, batch.levels).max(axis=1)
        others = ExpectedYield(batch.tokens.sum() - batch.tokens, batch.nodes.sum() - batch.nodes, levels)
        rates = expected.plus(others[:, None]).rates(costs, len(chosen))
        request, best = np.unravel_index(rates.argmax(), rates.shape)
        if chosen[request] == best:
            break
        chosen[request] = best
    return chosen


# --------------------------------------------------------------------------- reading of prompts


def tokens_to_read(request: Request, costs: CostModel) -> int:
    """Return the number of known tokens that the drafter would read before it drafts."""
    if request.drafting.is_read:
        return 0
    return num_to_read(len(request.token_ids), request.num_cached, costs.window)


def pays_to_read(request: Request, seconds_saved: float, costs: CostModel) -> bool:
    """Return whether saving this much time for each token makes up for reading the prompt with the drafter.

    How long an output becomes is not known, but the lengths of earlier ones are. Reading is put off until those that
    became as long as this one had enough further tokens on average.
    """
    return bool(seconds_saved * tokens_left(request, costs) > costs.read_token * tokens_to_read(request, costs))


def tokens_left(request: Request, costs: CostModel) -> float:
    """Return the further tokens that a request is expected to emit."""
    return min(request.max_new_tokens, costs.lengths.left(request.num_output))
