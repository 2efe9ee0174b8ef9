"""Nodes of growing trees that need candidates. A level of several trees has hundreds, so they are kept in runs.

The nodes of a run are of one tree and differ only in their paths, which few need: one node is made when asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple, TypeVar, overload

from specinfer.core.request import Request

Path = tuple[int, ...]
T = TypeVar("T")


class Node(NamedTuple):
    """A node that needs candidates: `path` leads to it from the root, and at most `width` candidates are wanted.

    Of the first `group` candidates, hybrid draft sampling takes one from the tail of the distribution and the best
    tokens for the others. Each `drafter` draws with its own noise.
    """

    request: Request
    path: Path
    width: int
    group: int = 1
    drafter: str = ""


class Run(NamedTuple):
    """Adjacent nodes of one request that need candidates.

    Attributes:
        depths: Length of the path of each node.
        path_of: Function that returns the path of a node by its index in the run.
        width, group, drafter: As in `Node`.
    """

    request: Request
    depths: list[int]
    path_of: Callable[[int], Path]
    width: int
    group: int
    drafter: str

    def nodes(self) -> Iterator[Node]:
        for i in range(len(self.depths)):
            yield Node(self.request, self.path_of(i), self.width, self.group, self.drafter)


class WantedNodes(Sequence[Node]):
    """Nodes that need candidates, in runs.

    Attributes:
        starts: Index of the first node of each run, and the number of all nodes.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.starts = list(accumulate((len(run.depths) for run in runs), initial=0))

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> "WantedNodes":
        """Return the nodes in runs."""
        if isinstance(nodes, cls):
            return nodes
        runs = []
        for _, adjacent in groupby(nodes, key=lambda node: (id(node.request), *node[2:])):
            group = list(adjacent)
            paths = [node.path for node in group]
            first, depths = group[0], [len(path) for path in paths]
            runs.append(Run(first.request, depths, paths.__getitem__, first.width, first.group, first.drafter))
        return cls(runs)

    def __len__(self) -> int:
        return self.starts[-1]

    def __iter__(self) -> Iterator[Node]:
        for run in self.runs:
            yield from run.nodes()

    @overload
    def __getitem__(self, index: int) -> Node: ...
    @overload
    def __getitem__(self, index: slice) -> list[Node]: ...
    def __getitem__(self, index: int | slice) -> Node | list[Node]:
        return list(self)[index]

    def each(self, value_of: Callable[[Run], T]) -> list[T]:
        """Return the value of each node's run."""
        return [value for run in self.runs for value in [value_of(run)] * len(run.depths)]
