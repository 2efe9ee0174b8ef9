"""Nodes of growing trees whose candidates come next: a level of several trees has hundreds, kept tree by tree."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from specinfer.core.request import Request

Path = tuple[int, ...]
T = TypeVar("T")


class Frontier(NamedTuple):
    """The nodes of one tree that need candidates. They differ only in their paths, which few need.

    Of the first `group` candidates, hybrid draft sampling takes one from the tail of the distribution and the best
    tokens for the others. Each `drafter` draws with its own noise.

    Attributes:
        depths: Length of the path of each node.
        path_of: Function that returns the path of a node from the root by its index among these.
        width: Largest number of candidates of a node.
    """

    request: Request
    depths: Sequence[int]
    path_of: Callable[[int], Path]
    width: int
    group: int = 1
    drafter: str = ""


class Level:
    """The frontiers of several trees.

    Attributes:
        starts: Index of the first node of each frontier, and the number of all nodes.
    """

    def __init__(self, frontiers: Sequence[Frontier]) -> None:
        self.frontiers = frontiers
        self.starts = list(accumulate((len(frontier.depths) for frontier in frontiers), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def each(self, value_of: Callable[[Frontier], T]) -> list[T]:
        """Return the value of each node's frontier."""
        return [value for frontier in self.frontiers for value in [value_of(frontier)] * len(frontier.depths)]
