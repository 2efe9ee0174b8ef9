"""Growth of trees by a level, written plainly: what `GrowthCall` does natively, tree by tree and with lists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from specinfer.core.draws import Floats
from specinfer.core.tree import TreeBudget
from specinfer.drafters.growth.calibration import MIDDLE, RANKS
from specinfer.ops.cpu.growth import bins_of

Path = tuple[int, ...]
# The candidates after a path, in draw order, with the confidence in each.
World = Callable[[Path], Sequence[tuple[int, float]]]
NUM_BINS = 64


class Guess(NamedTuple):
    node: int  # below which it is
    token: int
    confidence: float
    path_prob: float
    bin: int


@dataclass
class SlowTree:
    """A tree while it grows; node 0 is the root."""

    budget: TreeBudget
    world: World
    paths: list[Path] = field(default_factory=lambda: [()])
    path_prob: list[float] = field(default_factory=lambda: [1.0])
    draws: list[tuple[int, float]] = field(default_factory=list)  # node and confidence of each, in draw order
    open: list[Guess] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [0])
    num_levels: int = 0

    @property
    def num_left(self) -> int:
        return self.budget.max_nodes + 1 - len(self.paths)

    def offer(self, acceptance_prob: Callable[[int, float], float], breadth: int) -> None:
        widths = self.budget.widths
        most = widths[self.num_levels] if widths else min(breadth, self.num_left)
        for node in self.frontier:
            least = float("inf")
            for rank, (token, chance) in enumerate(self.world(self.paths[node])[:most]):
                confidence = float(np.float32(chance))
                least = min(least, 1.0 if widths else acceptance_prob(rank, confidence))
                path_prob = least * self.path_prob[node]
                if path_prob >= self.budget.min_path_prob:
                    guess_bin = int(bins_of(np.array([path_prob]))[0])
                    self.open.append(Guess(node, token, confidence, path_prob, guess_bin))

    def take(self, wanted: Sequence[Guess]) -> list[int]:
        """Make nodes of these guesses, or of too many only the best; a token drawn twice at a node is one child."""
        best = sorted(range(len(wanted)), key=lambda i: (-wanted[i].path_prob, i))[: self.num_left]
        taken = [wanted[i] for i in sorted(best)]
        self.open = [guess for guess in self.open if not any(guess is one for one in taken)]
        first = len(self.paths)
        for guess in taken:
            path = (*self.paths[guess.node], guess.token)
            if path not in self.paths:
                self.paths.append(path)
                self.path_prob.append(guess.path_prob)
            self.draws.append((self.paths.index(path), guess.confidence))
        return list(range(first, len(self.paths)))


def floor(open_guesses: Sequence[Guess], by_rank: Floats, num_left: int, num_levels: int) -> int:
    """The last bin up to which everything present, and everything expected below it, fits; the best one in any case.

    Args:
        num_levels: The number of levels still to come below the guesses.
    """
    steps = [step for step in bins_of(by_rank).tolist() if step < NUM_BINS - 1]

    @cache
    def subtree(room: int, levels: int) -> int:
        """Nodes of a subtree down to this many bins below its root."""
        return 1 + sum(subtree(room - step, levels - 1) for step in steps if levels and step <= room)

    fitting = min((guess.bin for guess in open_guesses), default=0)
    for last in range(fitting, NUM_BINS):
        if sum(subtree(last - guess.bin, num_levels) for guess in open_guesses if guess.bin <= last) > num_left:
            break
        fitting = last
    return fitting


def grow(
    budgets: Sequence[TreeBudget], worlds: Sequence[World], lines: tuple[Floats, Floats], by_rank: Floats, breadth: int
) -> tuple[list[SlowTree], int]:
    """The trees of several requests, grown together, and the number of levels."""

    def acceptance_prob(rank: int, confidence: float) -> float:
        line = int(np.searchsorted(MIDDLE, confidence)) + min(rank, RANKS - 1) * (len(MIDDLE) + 1)
        return float(lines[0][line] + lines[1][line] * confidence)

    trees, num_levels = [SlowTree(*pair) for pair in zip(budgets, worlds, strict=True)], 0
    while growing := [tree for tree in trees if tree.frontier]:
        num_levels += 1
        for tree in growing:
            tree.offer(acceptance_prob, breadth)
            to_come = tree.budget.max_depth - tree.num_levels - 1
            last = NUM_BINS if tree.budget.widths else floor(tree.open, by_rank, tree.num_left, to_come)
            new = tree.take([guess for guess in tree.open if guess.bin <= last])
            tree.num_levels += 1
            tree.frontier = new if tree.num_left and to_come else []
        best_first = [tree for tree in growing if not tree.budget.widths]
        # A level that one tree continues with anyway costs the others little.
        gain = sum(float(by_rank[0]) * sum(tree.path_prob[node] for node in tree.frontier) for tree in best_first)
        if gain < min((tree.budget.min_gain for tree in best_first), default=0.0):
            for tree in best_first:
                tree.frontier = []
        for tree in best_first:
            if not tree.frontier:
                tree.take(tree.open)
    return trees, num_levels
