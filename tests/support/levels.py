"""Levels of growing trees written as lists of nodes."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from specinfer.core.request import Request
from specinfer.drafters.growth import draft_sampling
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.growth.frontier import Frontier, Level
from specinfer.drafters.vocabulary.token_map import TokenMap


class Node(NamedTuple):
    """A node that needs candidates; see `Frontier`."""

    request: Request
    path: tuple[int, ...]
    width: int
    group: int = 1
    drafter: str = ""


def level_of(nodes: Sequence[Node]) -> Level:
    """The level of these nodes; those of one tree are adjacent."""
    frontiers = []
    for _, adjacent in groupby(nodes, key=lambda node: (id(node.request), *node[2:])):
        group = list(adjacent)
        paths = [node.path for node in group]
        frontiers.append(Frontier(group[0].request, list(map(len, paths)), paths.__getitem__, *group[0][2:]))
    return Level(frontiers)


def nodes_of(level: Level) -> list[Node]:
    return [Node(one.request, one.path_of(i), *one[3:]) for one in level.frontiers for i in range(len(one.depths))]


def draw(draft_sampling_: str, logits: Tensor, nodes: Sequence[Node], token_map: TokenMap | None = None) -> Candidates:
    return draft_sampling.draw(draft_sampling_, logits, level_of(nodes), token_map)
