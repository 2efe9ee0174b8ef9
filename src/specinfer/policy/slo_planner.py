"""Latency and the cost model: who needs larger trees, how many requests may run, how much of prompts a step reads.

Trees are grown first for requests that would miss their time per output token, then for throughput (AdaServe, arXiv
2501.12162). Example: a step takes 50 ms and emits 1.5 tokens of each request. A request that may take 25 ms for each
token needs 2 tokens a step. So it gets the smallest tree that yields them, and if the step then lasts too long, the
others decode plainly.

A request without a target, or one that cannot meet it any more, is served for throughput. It keeps a tenth of its speed
while the prompts of others are read.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from specinfer.core.clock import epoch_seconds
from specinfer.core.decayed_ratio import DecayedRatio
from specinfer.core.limits import SLO
from specinfer.core.request import Request, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import OFF, TreeBudget
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Floats
from specinfer.policy.optimizer import ExpectedYield, pays_to_read
from specinfer.policy.rank_choice import RankChoice

_HORIZON = 8  # steps in which a request that is late, or early, returns to its target
_MEMORY = 0.95  # weight of the steps before in the pace of tokens, for each further step
_MARGIN = 0.9  # share of a target that a larger batch may take, because prompts are read between
_CHUNKS = 8 << np.arange(24)  # tokens of prompts that a step may read: at least 8, for whatever target
_SLOWEST = 10.0  # steps of plain decoding that a step may take which reads prompts beside requests without targets
_USEFUL_CHUNK = 32  # tokens that it may read in any case: smaller chunks mostly read weights


class SLOPlanner:
    """A planner for latency targets: trees, room in the batch, and the reading of prompts.

    Args:
        costs: Costs of steps.
        ranks: The trees to choose from, and the one chosen for throughput.
    """

    def __init__(self, costs: CostModel, ranks: RankChoice) -> None:
        self._costs, self._ranks = costs, ranks
        self.clock = epoch_seconds
        self._pace = DecayedRatio(_MEMORY)  # seconds of the last steps over the tokens that a request got in them

    def observe(self, step: StepRecord) -> None:
        """Learn from a step at which pace tokens come, the time included in which prompts are read."""
        self._pace.observe(step.time, step.num_generated / step.num_requests)

    # ------------------------------------------------------------------------------------- trees

    def budgets(self, spans: Sequence[Span], budgets: list[TreeBudget]) -> list[TreeBudget]:
        """Return the budgets of a step.

        Args:
            spans: The spans of the step.
            budgets: The budgets with most tokens per second.
        """
        requests, now = [span.request for span in spans], self.clock()
        if not any(_has_target(request) for request in requests):
            return budgets
        tpots = self._tpots(requests, now, len(requests))
        places = np.flatnonzero(np.isfinite(tpots))
        if not len(places):
            return budgets
        tpots = tpots[places]
        late = np.asarray([now + tpot - requests[i].due for i, tpot in zip(places, tpots, strict=True)])  # seconds
        num_left = np.asarray([requests[i].max_new_tokens for i in places])
        behind = late / tpots / np.clip(num_left // 2, 1, _HORIZON)  # tokens to catch up with in each step
        usual = self._ranks.usual()
        seconds = float(self._seconds(len(requests), usual.times(len(requests))))
        is_urgent = seconds / tpots + behind > usual.tokens
        if not is_urgent.any():
            return budgets
        tree, shares = self._choose(len(requests), tpots, behind, is_urgent)
        saved = float(self._plain_seconds(len(requests)) - self._seconds(len(requests), tree) / tree.tokens)
        urgent = {int(i) for i in places[is_urgent] if pays_to_read(requests[i], saved, self._costs)}
        budget = TreeBudget(int(tree.nodes), int(tree.levels))
        plain = set[str]() if shares else {requests[i].tenant for i in urgent}  # others keep their trees
        others = [OFF if request.tenant in plain else own for request, own in zip(requests, budgets, strict=True)]
        return [budget if i in urgent else other for i, other in enumerate(others)]

    def _choose(
        self, num_requests: int, tpots: Floats, behind: Floats, is_urgent: npt.NDArray[np.bool_]
    ) -> tuple[ExpectedYield, bool]:
        """Return the tree of urgent requests, and whether others get trees: most targets met, then most tokens.

        Args:
            num_requests: Number of requests in the step.
            tpots, behind, is_urgent: [targets] seconds for each token, tokens to catch up with, and who needs more.
        """
        trees, num_urgent = self._ranks.expected(), int(is_urgent.sum())
        options: list[tuple[int, float, int, bool]] = []
        for others in (self._ranks.usual(), trees[0]):  # the first is none
            batch = trees.times(num_urgent).plus(others.times(num_requests - num_urgent))
            seconds = self._seconds(num_requests, batch)
            yields = np.where(is_urgent[:, None], trees.tokens, others.tokens)  # [targets, trees]
            num_met = (seconds / tpots[:, None] + behind[:, None] <= yields).sum(axis=0)
            num_met = np.where(self._ranks.fits(num_requests), num_met, -1)
            rates = batch.tokens / seconds
            best = int(np.lexsort((rates, num_met))[-1])
            options.append((int(num_met[best]), float(rates[best]), best, bool(others.nodes > 0)))
        *_, best, shares = max(options)
        return trees[best], shares

    # ------------------------------------------------------------------------- batch and prompts

    def may_admit(self, running: Sequence[Request]) -> bool:
        """Return whether no running request would miss its target because of a further one.

        A minority of requests with targets does not keep others out.
        """
        if not any(_has_target(request) for request in running):
            return True
        tpots = self._tpots(running, self.clock(), len(running))
        has_target = np.isfinite(tpots)
        if 2 * int(has_target.sum()) < len(running):
            return True
        has_trees = np.asarray([_has_trees(request) for request in running])[has_target]
        tpots = tpots[has_target] * _MARGIN
        return self._num_kept(tpots, has_trees, len(running) + 1) >= self._num_kept(tpots, has_trees, len(running))

    def _num_kept(self, tpots: Floats, has_trees: npt.NDArray[np.bool_], num_requests: int) -> int:
        """Return how many of these targets a batch keeps, with trees for those that need them and may have them."""
        trees = self._ranks.expected()
        is_tight = has_trees & (tpots < self._plain_seconds(num_requests))
        seconds = self._seconds(num_requests, trees.times(int(is_tight.sum())))
        num_kept = (seconds <= tpots[:, None] * np.where(is_tight[:, None], trees.tokens, 1.0)).sum(axis=0)
        return int(num_kept[self._ranks.fits(num_requests)].max())

    def max_tokens(self, decoding: Sequence[Request], reading: Mapping[Request, int], most: int) -> int:
        """Return how many tokens of prompts a step may read, at most `most`.

        They are as many as no decoding request is late for, or more if first tokens would otherwise be late. A request
        is late if the tokens that follow, at their usual pace, do not bring it back to its target. One without a target
        is late if the step takes ten times as long as one that only decodes. So is the first token of a short prompt
        beside others. While a single prompt is read, or only long ones, nothing is late.

        Args:
            decoding: Requests that emit tokens in the step.
            reading: Number of tokens that each of the others has still to read.
            most: Largest number.
        """
        if not decoding and (len(reading) == 1 or min(reading.values()) > most // 2):
            return most
        now, num_requests = self.clock(), len(decoding)
        self._costs.follow(sum(request.num_computed for request in decoding), max(num_requests, 1))
        dues, slowest = self._dues(decoding, now), _SLOWEST * self._plain_seconds(max(num_requests, 1))
        trees = self._ranks.usual().times(sum(map(_has_trees, decoding)))
        self._costs.follow(sum(request.num_computed for request in (*decoding, *reading)), num_requests + len(reading))
        chunks = np.unique(np.minimum(_CHUNKS, most))
        # A step that ends in a first token mostly has no trees.
        num_nodes_each = np.where(chunks < sum(reading.values()), trees.nodes, 0)
        drafting = self._costs.draft(num_nodes_each, np.where(num_nodes_each, trees.levels, 0))
        seconds = drafting + self._costs.reading(num_requests + num_nodes_each + chunks) + self._costs.rest
        useful = float(seconds[chunks >= min(_USEFUL_CHUNK, most)].min())
        allowed = min((due - now for due in dues), default=np.inf)
        if len(dues) < num_requests or not decoding:
            allowed = min(allowed, max(slowest, useful))
        in_time = chunks[seconds <= allowed].max(initial=chunks[0])
        rates = chunks / seconds
        fast = chunks[rates >= _reading_rate(reading, now, float(rates.max()))].min(initial=most)
        return min(int(max(in_time, fast)), most)

    def _dues(self, decoding: Sequence[Request], now: float) -> list[float]:
        """Return when the next tokens are due of requests with a target that can be met."""
        if not any(map(_has_target, decoding)):
            return []
        num_requests, usual = len(decoding), self._ranks.usual()
        step = float(self._seconds(num_requests, usual.times(sum(map(_has_trees, decoding)))))
        dues = []
        for request, tpot in zip(decoding, self._tpots(decoding, now, num_requests), strict=True):
            if np.isfinite(tpot):
                pace = max(step / (float(usual.tokens) if _has_trees(request) else 1.0), self._pace.value)
                dues.append(request.due + min(request.max_new_tokens - 1, _HORIZON) * max(tpot - pace, 0.0))
        return dues

    def pass_seconds(self, num_tokens: int) -> float:
        """Return the seconds of a target pass over this many tokens."""
        return float(self._costs.target(num_tokens))

    # ------------------------------------------------------------------------------------- parts

    def _tpots(self, requests: Sequence[Request], now: float, num_requests: int) -> Floats:
        """Return the seconds that each token of a request may take, or infinity without a target that can be met."""
        trees = self._ranks.expected()
        alone = self._seconds(num_requests, trees)  # with a tree for one request
        fastest = float((alone / trees.tokens)[self._ranks.fits(num_requests)].min())
        plain = self._plain_seconds(num_requests)
        return np.asarray([_tpot(request, now, fastest if _has_trees(request) else plain) for request in requests])

    def _seconds(self, num_requests: int, trees: ExpectedYield) -> Floats:
        """Return the seconds of a step with these trees in all."""
        return self._costs.step(num_requests, trees.nodes, trees.levels)

    def _plain_seconds(self, num_requests: int) -> float:
        return float(self._costs.step(num_requests, 0, 0))


def _has_target(request: Request) -> bool:
    return isinstance(request.params.slo, SLO) and request.params.slo.tpot is not None


def _has_trees(request: Request) -> bool:
    """Return whether the policy chooses trees for a request."""
    return request.params.tree in (None, "auto")


def _reading_rate(reading: Mapping[Request, int], now: float, most: float) -> float:
    """Return the tokens of prompts to read in a second so that all first tokens are in time that can be.

    Args:
        most: Tokens that can be read in a second.
    """
    rate, num_tokens = 0.0, 0
    for request in sorted(reading, key=lambda request: request.due):
        wanted = (num_tokens + reading[request]) / max(request.due - now, 1e-9)
        if wanted <= most:
            rate, num_tokens = max(rate, wanted), num_tokens + reading[request]
    return rate


def _tpot(request: Request, now: float, fastest: float) -> float:
    """Return the seconds that each token of a request may take, or infinity without a target that can be met.

    Args:
        fastest: Least seconds of a token: with a tree for the request alone, if it may have one.
    """
    slo = request.params.slo
    if not isinstance(slo, SLO) or slo.tpot is None:
        return np.inf
    tpot, num_left = slo.tpot / 1000, request.max_new_tokens
    if request.times.first_token is None:
        return tpot if tpot > fastest else np.inf
    # The last token is due this much after the next one.
    return tpot if now + num_left * fastest <= request.due + (num_left - 1) * tpot else np.inf
