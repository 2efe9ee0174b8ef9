"""Trees by the rule of steps on a device, written plainly: a level's candidates are all made, then chosen among."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

F32 = np.float32
Path = tuple[int, ...]
# The candidates after a path, in order, with the confidence in each. `place` is that of its node in the frontier.
CandidatesOf = Callable[[Path, int], Sequence[tuple[int, np.float32]]]
ChanceOf = Callable[[int, np.float32], np.float32]  # of a rank and a confidence


class Guess(NamedTuple):
    path_prob: np.float32
    number: int  # in the order in which they were offered
    path: Path
    rank: int
    confidence: float


class Wish(NamedTuple):
    max_nodes: int
    max_depth: int
    min_path_prob: float
    widths: tuple[int, ...]


def slow_tree(
    candidates_of: CandidatesOf,
    chance_of: ChanceOf,
    frontiers: Sequence[int],
    children: Sequence[int],
    num_nodes: int,
    wish: Wish,
) -> tuple[list[Guess], set[Path]]:
    """The guesses taken, and the paths that the drafter computed. Level by level, with lists and sorting."""
    every: list[Guess] = []
    frontier = [Guess(F32(1), -1, (), 0, 0.0)] if wish.max_nodes else []
    computed, first = set(), 0
    for level, width in enumerate(children):
        offered = []
        for place, node in enumerate(frontier):
            chance = F32(1)
            for rank, (token, confidence) in enumerate(candidates_of(node.path, place)):
                if wish.widths and rank >= wish.widths[level]:
                    break
                if not wish.widths:
                    chance = min(chance, chance_of(rank, confidence))
                path_prob = F32(chance * node.path_prob)
                if path_prob < F32(wish.min_path_prob) or level >= wish.max_depth:
                    break
                path = (*node.path, token)
                offered.append(Guess(path_prob, first + place * width + rank, path, rank, float(confidence)))
        every += offered
        if level + 1 < len(children):
            frontier = in_order(best(offered, frontiers[level + 1]))
            computed |= {node.path for node in frontier}
        first += frontiers[level] * width
    return in_order(best(every, min(wish.max_nodes, num_nodes))), computed


def best(guesses: Sequence[Guess], count: int) -> list[Guess]:
    return sorted(guesses, key=lambda guess: (-guess.path_prob, guess.number))[:count]


def in_order(guesses: Sequence[Guess]) -> list[Guess]:
    return sorted(guesses, key=lambda guess: guess.number)


def tree_one_by_one(
    candidates_of: CandidatesOf, chance_of: ChanceOf, frontiers: Sequence[int], children: Sequence[int], max_nodes: int
) -> set[Path]:
    """The paths of a tree whose tokens are drawn one by one: which is next is decided before it is looked at.

    It is the most promising one below the tokens drawn so far. Of each level only the first ones, as many as its
    frontier has nodes, may have children.
    """
    drawn = [Guess(F32(1), -1, (), 0, 0.0)]
    ranks: dict[Path, Path] = {(): ()}  # of the tokens on the way to each node
    while len(drawn) <= max_nodes:
        offered = []
        for level, width in enumerate(frontiers):
            for node in [node for node in drawn if len(node.path) == level][:width]:
                num_drawn = sum(other.path[:-1] == node.path for other in drawn[1:])
                candidates = candidates_of(node.path, 0)[: children[level]]
                if num_drawn < len(candidates):
                    chance = min(F32(1), *(chance_of(i, candidates[i][1]) for i in range(num_drawn + 1)))
                    offered.append((-F32(chance * node.path_prob), level, (*ranks[node.path], num_drawn), node))
        if not offered:
            break
        negative, _, place, node = min(offered, key=lambda one: one[:3])
        token, confidence = candidates_of(node.path, 0)[place[-1]]
        drawn.append(Guess(-negative, len(drawn), (*node.path, token), place[-1], float(confidence)))
        ranks[drawn[-1].path] = place
    return {node.path for node in drawn[1:]}
