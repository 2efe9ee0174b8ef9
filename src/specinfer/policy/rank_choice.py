"""The choice of one tree size for all requests of a batch, by the observed acceptance of ranks.

Example: a pass takes 1 s and 0.1 s more for each row beyond the first, a draft level 0.1 s, and draft tokens of rank 1
and 2 are right with probability 0.5 and 0.25. For one request,

    plain decoding      1 token in 1 s                         1.00 tokens/s
    1 node, 1 level     1.5 tokens in 1 + 0.1 + 0.1 s          1.25 tokens/s
    2 nodes, 1 level    1.75 tokens in 1 + 0.2 + 0.1 s         1.35 tokens/s
    3 nodes, 2 levels   2 tokens in 1 + 0.3 + 0.2 s            1.33 tokens/s

so the tree of 2 nodes is chosen. At this rate a node must have a path probability of 1.35 * 0.1 to be worth its row.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specinfer.core.request import Request
from specinfer.core.text import counted
from specinfer.core.tree import OFF, TreeBudget
from specinfer.policy.acceptance import AcceptanceModel, expected_tokens
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Floats
from specinfer.policy.optimizer import ExpectedYield, clearly_faster, pays_to_read, tokens_left, tokens_to_read

_LEAST = 1e-3  # share, to divide by
_QUICK = 3.0  # passes that reading a prompt may take without waiting for what lookups find
_REPAID = 0.2  # share of a longer reading that passes without drafts would have repaid
_UNTIL_SEEN = 8.0  # tokens of a text that is hard to predict until no trees are drafted for it


class TreeSizes:
    """Best-first trees to choose from; the first is none.

    Args:
        sizes, depths: Numbers of nodes and depths, ascending; all pairs with at least a node for each level are used.

    Attributes:
        num_nodes, num_levels: [trees] the limits of each tree.
    """

    SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 24, 32, 48, 64)
    # With the root the rows that kernels of GPUs take together; one more may cost as much as another block of them.
    DEVICE_SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
    DEPTHS = tuple(range(1, 13))
    # For slow passes whose time hardly grows with their rows: there large trees are nearly free.
    WIDE_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256)
    WIDE_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
    _SLOW = 0.05  # seconds of a pass that make the evaluation of many sizes negligible
    _FLAT_ROWS, _FLAT = 128, 2.0  # this many rows must cost less than this many passes over one row

    def __init__(self, sizes: Sequence[int] = SIZES, depths: Sequence[int] = DEPTHS) -> None:
        self.max_nodes, self.max_depth = sizes[-1], max(depths, default=0)
        pairs = [(0, 0)] + [(n, d) for n in sizes for d in depths if d <= n]
        self.num_nodes, self.num_levels = np.asarray(pairs).T

    @classmethod
    def none(cls) -> "TreeSizes":
        """Return no trees to choose from."""
        return cls((0,), ())

    @classmethod
    def for_costs(cls, costs: CostModel) -> "TreeSizes":
        """Return the trees that may be worthwhile at these costs."""
        if costs.max_rows is not None:
            return cls(cls.DEVICE_SIZES)
        one, many = costs.target([1, cls._FLAT_ROWS]).tolist()
        is_wide = one >= cls._SLOW and many < cls._FLAT * one
        return cls(cls.WIDE_SIZES, cls.WIDE_DEPTHS) if is_wide else cls()

    def expected(self, tokens: Floats) -> ExpectedYield:
        """Return the yield of a request with each tree, given the tokens, [trees]."""
        return ExpectedYield(tokens, self.num_nodes, self.num_levels)

    @property
    def is_wide(self) -> bool:
        return self.max_nodes > self.SIZES[-1]


class RankChoice:
    """The choice of one tree size for all requests of a batch, or plain decoding.

    Within the chosen limits one lower bound for all requests divides the nodes among them: a node must be worth the
    time it adds to the pass, and a level the time of drafting it, at the current token rate (Dinkelbach's rule for the
    best ratio).
    """

    _ASSUMED = np.asarray([0.7, 0.1, 0.05])  # acceptance by rank of a good drafter, to tell a poor one from high costs
    _HOPED = np.asarray([0.9, 0.05])  # acceptance by rank of an excellent drafter
    _MARGIN = 1.03  # gain needed for a change, because the estimates are noisy
    _CLOSE = 0.97  # share of the best rate that makes a tree as good as the best one, within the noise
    _MOST = 2  # multiple of the average nodes that a request may have, because some are easier to predict than others
    _LEAST_LOST = 0.2  # share of the time of drafting that a test is taken to lose, whatever it is expected to save
    _LIKELY = 0.5  # no node has to be likelier than this
    _BEND = 1.25  # multiple of the average price of a node up to which further nodes are cheap

    def __init__(self, costs: CostModel, acceptance: AcceptanceModel, sizes: TreeSizes | None = None) -> None:
        self._costs, self._acceptance = costs, acceptance
        self.sizes = TreeSizes.for_costs(costs) if sizes is None else sizes
        self._chosen = 0  # off, until something is clearly better
        self._expected_at: tuple[float, ...] = ()  # the last acceptance, and what was expected of it
        self._expected = self.sizes.expected(np.empty(0))

    def expected(self) -> ExpectedYield:
        """Return what a request is expected to yield with each tree, [trees]."""
        seen = (self._acceptance.share, *self._acceptance.by_rank().tolist())
        if seen != self._expected_at:
            self._expected_at = seen
            tokens = self._acceptance.expected_tokens(self.sizes.num_nodes, self.sizes.num_levels)
            self._expected = self.sizes.expected(tokens)
        return self._expected

    def usual(self) -> ExpectedYield:
        """Return what a request is expected to yield with the tree chosen last."""
        return self.expected()[self._chosen]

    def rates(self, num_requests: int) -> Floats:
        """Return the expected tokens per second of the batch with each of the trees for every request: [trees].

        They are 0 for trees that are too large for a step. A drafter that proposes nothing has cost a level: of a
        model that is not sure enough a pass, of a lookup next to nothing.

        Example: a tree yields 2 tokens in 1.2 times the time of a plain step, and a lookup finds one in every second
        step: 3 tokens in 2.2 plain steps, 1.36 times the speed, and not the 1.67 of a step with a tree.
        """
        step, coverage = self.expected().times(num_requests), self._acceptance.coverage
        seconds = self._costs.step(num_requests, step.nodes, step.levels)
        in_vain = seconds[0] + self._costs.draft(num_requests, np.minimum(step.levels, 1))
        tokens = num_requests + coverage * (step.tokens - num_requests)
        rates = tokens / (coverage * seconds + (1.0 - coverage) * in_vain)
        return np.where(self.fits(num_requests), rates, 0.0)

    def _rates(self, expected: ExpectedYield, num_requests: int) -> Floats:
        return expected.times(num_requests).rates(self._costs, num_requests)

    def fits(self, num_requests: int) -> npt.NDArray[np.bool_]:
        """Return whether a step holds each of the trees for every request: [trees]."""
        return np.asarray(self.sizes.num_nodes <= self._costs.most_nodes(num_requests))

    def choose(self, num_requests: int) -> TreeBudget:
        """Return the budget of each request in a batch of this many."""
        rates = self.rates(num_requests)
        best = clearly_faster(rates, self._chosen, self._MARGIN)
        if best != self._chosen:
            self._chosen = self._middle(rates) if best else 0
        num_nodes, num_levels = (int(x[self._chosen]) for x in (self.sizes.num_nodes, self.sizes.num_levels))
        if not num_nodes:
            return OFF
        rate = float(rates[self._chosen])
        additional, node_time = self._price_nodes(num_requests, num_nodes)
        return TreeBudget(
            max_nodes=min(num_nodes + additional, self.sizes.max_nodes, self._costs.most_nodes(num_requests)),
            max_depth=min(self._MOST * num_levels, self.sizes.max_depth),
            min_path_prob=min(rate * node_time, self._LIKELY),
            min_gain=rate * float(self._costs.draft_level(num_requests)),
        )

    def beside(self, num_trees: int, num_requests: int, num_rows: int) -> TreeBudget:
        """Return the budget of each tree in a pass that also reads prompts, or none if trees do not pay there.

        The prompts have to be read in any case, so a tree pays if it takes less time than its tokens would take while
        all requests decode.

        Args:
            num_trees: Number of requests that decode.
            num_requests: Number of requests that will decode together, with the tree chosen last.
            num_rows: Rows of the pass without trees.
        """
        sizes, rate = self.sizes, float(self.rates(num_requests)[self._chosen])
        nodes = num_trees * sizes.num_nodes
        computing = self._costs.target(num_rows + nodes) - float(self._costs.target(num_rows))
        added = computing + self._costs.draft(nodes, sizes.num_levels)
        saved = num_trees * (self.expected().tokens - 1.0) / rate
        best = int((saved - self._MARGIN * added).argmax())
        if not best:
            return OFF
        return TreeBudget(
            int(sizes.num_nodes[best]),
            int(sizes.num_levels[best]),
            min_path_prob=min(rate * float(computing[best] / nodes[best]), self._LIKELY),
            min_gain=rate * float(self._costs.draft_level(num_trees)),
        )

    def _middle(self, rates: Floats) -> int:
        """Return the tree in the middle of those nearly as fast as the fastest, which noise moves less than that one.

        Trees are weighted by what they gain over the slowest that is close enough; the middle is that of the logarithms
        of their nodes and levels.
        """
        weights = np.maximum(rates[1:] / rates.max() - self._CLOSE, 0.0)
        shapes = np.log([self.sizes.num_nodes[1:], self.sizes.num_levels[1:]])
        distances = np.square(shapes - np.average(shapes, axis=1, weights=weights)[:, None]).sum(axis=0)
        return 1 + int(np.where(weights > 0, distances, np.inf).argmin())

    def why_plain(self, num_requests: int) -> str:
        """Return why no tree is chosen for a batch of this many: the batch, the drafter, the pass or the acceptance."""
        one, two = map(float, self._costs.target([num_requests, 2 * num_requests]))
        drafting = float(self._costs.draft(num_requests, 1))
        where = "here" if num_requests == 1 else f"over {num_requests}"
        cause = f"a pass over {2 * num_requests} tokens costs {two / one:.1f} times one {where}"
        if two < drafting + one:  # the drafter adds more to a step than the further rows
            cause = f"drafting {counted(num_requests, 'token')} takes {drafting / one:.1f} times as long as a pass"
        if num_requests > 1 and self._would_pay(self._acceptance.by_rank(), 1):
            return f"in a batch of {num_requests} requests {cause}"
        if self._would_pay(self._ASSUMED, num_requests):
            return f"only {self._acceptance.by_rank()[0]:.0%} of the first draft tokens are accepted, and {cause}"
        return cause

    def gain(self, num_requests: int, number: int | None = None) -> float:
        """Return the expected speed of a tree over that of plain decoding.

        Args:
            number: Index of the tree, or None for the one chosen last.
        """
        rates = self.rates(num_requests)
        return float(rates[self._chosen if number is None else number] / rates[0])

    def _would_pay(self, by_rank: Floats, num_requests: int) -> bool:
        """Return whether a tree would be clearly faster than none, with these acceptance probabilities [ranks]."""
        tokens = expected_tokens(by_rank, self.sizes.num_nodes, self.sizes.num_levels)
        return self._pays(self._rates(self.sizes.expected(tokens), num_requests))

    def _pays(self, rates: Floats) -> bool:
        return clearly_faster(rates, 0, self._MARGIN) != 0

    def _price_nodes(self, num_requests: int, num_nodes: int) -> tuple[int, float]:
        """Return the nodes that a request may have beyond the average, and the seconds that a node adds to the pass.

        The cost bends where computing begins to take longer than reading the weights, or where a kernel needs a
        further block of rows: the last nodes were cheap, and the next are not. There no other request makes up for
        additional nodes of one request, so none may have them.
        """
        most = (self._MOST - 1) * num_nodes
        more = np.arange(most + 1)
        seconds = self._costs.target(num_requests * (1 + np.concatenate([[0], num_nodes + more])))
        price = float(seconds[1] - seconds[0]) / num_nodes
        cheap = seconds[1:] - seconds[1] <= self._BEND * price * more
        if cheap.all():
            price = float(seconds[-1] - seconds[1]) / most
        return int(more[cheap][-1]), price / num_requests

    def pays_to_read(self, request: Request, num_requests: int, *, has_lookups: bool = False) -> bool:
        """Return whether the possible gain is more than the cost of reading the prompt with the drafter.

        All requests of the batch wait for this reading, so that a token saves what it takes of the batch's time.

        Args:
            has_lookups: Whether lookups come first. If they copy the prompt, a model saves little, so that a long
                reading waits until passes in which nothing was accepted would have repaid a part of it.
        """
        if request.drafting.is_read:
            return True
        saved = self._saved_by_a_text(num_requests, tokens_left(request, self._costs))
        if not pays_to_read(request, saved, self._costs):
            return False
        long = self._costs.read_token * tokens_to_read(request, self._costs)
        long -= _QUICK * float(self._costs.target(num_requests))
        return not has_lookups or saved * request.speculation.num_unaided_steps >= _REPAID * max(long, 0.0)

    def _saved_by_a_text(self, num_requests: int, num_tokens: float) -> float:
        """Return the seconds that a token of the next text is expected to save, on the average of the last texts.

        Not on one of the easiest, from which a text begins: a prompt that was read cannot be put back. A text that is
        hard to predict loses until that shows.

        Args:
            num_tokens: Tokens that the text is expected to have.
        """
        usual, coverage = self.usual().times(num_requests), self._acceptance.coverage
        plain, drafted = (
            float(self._costs.step(num_requests, nodes, levels))
            for nodes, levels in ((0, 0), (usual.nodes, usual.levels))
        )
        in_vain = plain + float(self._costs.draft(num_requests, 1))
        seconds = coverage * drafted + (1.0 - coverage) * in_vain
        tokens = 1.0 + coverage * self._acceptance.text_shares * (float(self.usual().tokens) - 1.0) / max(
            self._acceptance.share, _LEAST
        )
        saved = plain - seconds / tokens
        return float(np.where(saved > 0, saved, saved * min(1.0, _UNTIL_SEEN / num_tokens)).mean()) / num_requests

    def seconds_lost(self, num_nodes: int, num_levels: int, num_to_read: int, num_requests: int) -> float:
        """Return the seconds that a tree of this size for one request of a batch is expected to lose.

        Args:
            num_to_read: Tokens that the drafter has to read first.
        """
        plain, tried = map(float, self._costs.target([num_requests, num_requests + num_nodes]))
        drafting = float(self._costs.draft(num_nodes, num_levels))
        expected = self._acceptance.expected_tokens(np.asarray([num_nodes]), np.asarray([num_levels]))
        saved = (float(expected[0]) - 1.0) * plain / num_requests
        lost = max(drafting + tried - plain - saved, self._LEAST_LOST * drafting)
        return self._costs.read_token * num_to_read + lost

    def depends_on_passes(self, num_requests: int) -> bool:
        """Return whether other costs of passes could change the choice.

        They could not where drafting alone takes longer than its tokens save, even if rows cost nothing.
        """
        nodes, levels = self.sizes.num_nodes, self.sizes.num_levels
        seconds = self._costs.draft(num_requests * nodes, levels) + self._costs.target(num_requests) + self._costs.rest
        return bool(self._chosen) or self._pays(self.expected().tokens / seconds)

    def could_pay(self, num_requests: int) -> bool:
        """Return whether an excellent drafter that took no time would be worth the rows that it adds to a pass.

        If it would not, no test of the drafter can change the choice: only the costs of passes can, and all steps show
        these.
        """
        nodes, levels = self.sizes.num_nodes, self.sizes.num_levels
        return self._pays(expected_tokens(self._HOPED, nodes, levels) / self._costs.target(num_requests * (1 + nodes)))
