"""Growth of trees by a level in numpy: what native code does in one call (growth.h), and draws with replacement.

See expansion.py. All trees of a batch are in common arrays.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import Floats
from specinfer.core.tree import TreeBudget
from specinfer.drafters.growth.calibration import Calibration, places
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.growth.guesses import Guesses
from specinfer.drafters.growth.nodes import Bools, Ints, Nodes
from specinfer.drafters.growth.subtree_size import NUM_BINS, bins_of, count_bins, floors, subtree_size_of
from specinfer.ops.cpu.growth import END, FIRST, LEVELS, START, WIDTH


class PlainGrowth:
    """The growth of trees.

    Args:
        nodes: Their nodes: written to.
        budgets, sources, drafters: Of each tree.
        levels: The candidates of each level so far, to which the caller adds.
        breadth: Most children of a node, best first.
    """

    def __init__(
        self,
        nodes: Nodes,
        budgets: Sequence[TreeBudget],
        sources: Sequence[str],
        drafters: Sequence[str],
        levels: Sequence[Candidates],
        calibration: Calibration,
        breadth: int,
    ) -> None:
        self._nodes, self._budgets, self._sources = nodes, budgets, sources
        self._calibration, self._breadth = calibration, breadth
        by_rank = {name: calibration.by_rank(name) for name in set(sources)}
        self._best_prob = {name: float(probs[0]) for name, probs in by_rank.items()}
        self._subtree_sizes = {name: subtree_size_of(probs) for name, probs in by_rank.items()}
        self.guesses = Guesses(drafters, sum(most_guesses(budget, breadth) for budget in budgets), levels)
        self._min_path_prob = np.asarray([budget.min_path_prob for budget in budgets])

    def extend(self, candidates: Candidates) -> None:
        """Take guesses from these candidates, whose rows are the nodes of the frontiers, and from those left before."""
        growing = [tree for tree, (first, end, _) in enumerate(self._nodes.frontiers) if first < end]
        best_first = [tree for tree in growing if not self._budgets[tree].widths]
        self._offer(growing, candidates)
        # A fixed expansion takes all that it requested.
        wanted = self._above_floor(best_first) if best_first else np.ones(len(self.guesses.open), dtype=np.bool_)
        self._append(self._select(wanted))
        for tree in growing:
            self._advance(tree)
        if best_first:
            self._end(best_first)

    def _advance(self, tree: int) -> None:
        """Finish a level: its nodes become the frontier, unless no node may be added below them."""
        numbers, budget = self._nodes.trees[tree], self._budgets[tree]
        size, num_left = int(self._nodes.sizes[tree]), int(self._nodes.num_left[tree])
        numbers[LEVELS] += 1
        level = int(numbers[LEVELS])
        goes_on = num_left > 0 and level < budget.max_depth
        numbers[FIRST], numbers[END] = numbers[END] if goes_on else size, size
        numbers[WIDTH] = budget.widths[level] if goes_on and budget.widths else min(self._breadth, num_left)

    def _levels_to_come(self, tree: int) -> int:
        return self._budgets[tree].max_depth - self._nodes.num_levels(tree)

    def _offer(self, growing: Sequence[int], candidates: Candidates) -> None:
        """Add the guesses that could be taken below the frontiers of these trees.

        The rows of the candidates belong to the nodes of these frontiers, in order.
        """
        firsts, ends, limits = zip(*[self._nodes.frontiers[tree] for tree in growing], strict=True)
        counts = np.subtract(ends, firsts)
        width = min(candidates.tokens.shape[1], max(limits))
        owners = np.repeat(growing, counts)
        nodes = np.concatenate([np.arange(first, end) for first, end in zip(firsts, ends, strict=True)])
        tokens, confidence = candidates.tokens[:, :width], candidates.confidence[:, :width]
        # A later candidate of a node is never taken before an earlier one.
        path_prob = np.minimum.accumulate(self._acceptance_probs(owners, confidence), axis=1)
        path_prob *= self._nodes.path_prob(owners, nodes)[:, None]
        usable = (tokens >= 0) & (path_prob >= self._min_path_prob[owners][:, None])
        if min(limits) < width:
            usable &= np.arange(width) < np.repeat(limits, counts)[:, None]
        rows, ranks = usable.nonzero()
        path_prob = path_prob[rows, ranks]
        self.guesses.add(
            owners[rows], node=nodes[rows], token=tokens[rows, ranks], row=rows, rank=ranks,
            confidence=confidence[rows, ranks], path_prob=path_prob, bin=bins_of(path_prob),
        )  # fmt: skip

    def _acceptance_probs(self, owners: Ints, confidence: npt.NDArray[np.float32]) -> Floats:
        """Return acceptance probabilities, [rows, width]; all are 1 in a fixed expansion."""
        probs, ranks = np.ones(confidence.shape), np.arange(confidence.shape[1])
        trees = list(zip(self._budgets, self._sources, strict=True))
        for name in self._subtree_sizes:
            rows = np.asarray([not budget.widths and other == name for budget, other in trees])[owners]
            if rows.all():
                return self._calibration.acceptance_prob(name, ranks, confidence)
            if rows.any():
                probs[rows] = self._calibration.acceptance_prob(name, ranks, confidence[rows])
        return probs

    def _above_floor(self, best_first: Sequence[int]) -> Bools:
        """Return whether each open guess is above the floor, that is, better than what is still expected, [open]."""
        bins, owners = self.guesses.bin[self.guesses.open], self.guesses.tree[self.guesses.open]
        counts = count_bins(owners, bins, len(self._budgets))
        limits = np.full(len(self._budgets), NUM_BINS)
        alike: dict[tuple[str, int], list[int]] = {}
        for tree in best_first:
            alike.setdefault((self._sources[tree], self._levels_to_come(tree)), []).append(tree)
        for (name, levels), group in alike.items():
            table = self._subtree_sizes[name].table(levels - 1)
            limits[group] = floors(counts[group], table, self._nodes.num_left[group])
        return np.asarray(bins <= limits[owners])

    def _select(self, wanted: Bools) -> Bools:
        """Return which of these open guesses fit, [open]: all, or of too many for a tree only its best ones."""
        guesses, numbers, num_left = self.guesses, self.guesses.open[wanted], self._nodes.num_left
        owners = guesses.tree[numbers]
        if (np.bincount(owners, minlength=len(num_left)) <= num_left).all():
            return wanted
        # Sorting is slow, so first drop the guesses behind the bin in which the budget is used up.
        bins = guesses.bin[numbers]
        last = (count_bins(owners, bins, len(self._budgets)).cumsum(axis=1) < num_left[:, None]).sum(axis=1)
        chosen = wanted.nonzero()[0][bins <= last[owners]]
        numbers = guesses.open[chosen]
        owners = guesses.tree[numbers]
        order = np.lexsort((-guesses.path_prob[numbers], owners))
        fits = np.zeros_like(wanted)
        fits[chosen[order[places(owners[order]) < num_left[owners[order]]]]] = True
        return fits

    def _append(self, chosen: Bools) -> None:
        """Add these open guesses to the trees; a token drawn twice at a node is one child."""
        guesses, taken = self.guesses, self.guesses.take(chosen)
        owners = guesses.tree[taken]
        if any(level.replaced for level in guesses.levels):
            taken = taken[self._are_new(taken, owners.tolist())]
            owners = guesses.tree[taken]
        else:
            guesses.child[taken] = self._nodes.sizes[owners] + places(owners)
        self._nodes.append(
            owners, guesses.child[taken], guesses.node[taken], guesses.token[taken], guesses.path_prob[taken]
        )

    def _are_new(self, taken: Ints, owners: list[int]) -> Bools:
        """Set the child of each guess, which may exist already, and return which children are new, [taken]."""
        guesses, is_new = self.guesses, np.ones(len(taken), dtype=np.bool_)
        children = {tree: self._children(tree) for tree in set(owners)}
        edges = zip(owners, guesses.node[taken].tolist(), guesses.token[taken].tolist(), strict=True)
        for i, (tree, node, token) in enumerate(edges):
            known = children[tree]
            is_new[i] = (node, token) not in known
            guesses.child[taken[i]] = known.setdefault((node, token), len(known) + 1)
        return is_new

    def _children(self, tree: int) -> dict[tuple[int, int], int]:
        """Return the child of each node and token of a tree, by (node, token)."""
        start, size = self._nodes.starts[tree], int(self._nodes.sizes[tree])
        parents, tokens = (column[start + 1 : start + size].tolist() for column in self._nodes.arrays[1::-1])
        return dict(zip(zip(parents, tokens, strict=True), range(1, size), strict=True))

    def _end(self, best_first: Sequence[int]) -> None:
        """Stop best-first trees where another level does not pay, and fill their budget from the open guesses."""
        nodes, numbers = self._nodes, self._nodes.trees
        # The minimum: a level that one tree continues with anyway costs the others little.
        min_gain = min(self._budgets[tree].min_gain for tree in best_first)
        if min_gain > 0:
            # The accepted tokens expected of another level if each node got only its best guess.
            gain = 0.0
            for tree in best_first:
                start, first, end = numbers[tree, [START, FIRST, END]]
                probs = nodes.arrays.path_prob[start + first : start + end].tolist()
                gain += self._best_prob[self._sources[tree]] * sum(probs)
            if gain < min_gain:
                numbers[best_first, FIRST] = numbers[best_first, END]
        ended = [tree for tree in best_first if numbers[tree, FIRST] == numbers[tree, END] and nodes.num_left[tree] > 0]
        if ended:
            self._append(self._select(np.isin(self.guesses.tree[self.guesses.open], ended)))


def most_guesses(budget: TreeBudget, breadth: int) -> int:
    """Return the largest number of guesses that a tree can be offered; a fixed expansion is offered what it takes."""
    return budget.max_nodes if budget.widths else (budget.max_nodes + 1) * breadth
