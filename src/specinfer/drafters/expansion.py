"""How a tree grows, level by level: the expansion configuration <k1, ..., km>.

Source: expansion-based tree construction, SpecInfer (arXiv 2305.09781), section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specinfer.request import Request
from specinfer.tree import Draw, TokenTree


@dataclass(slots=True)
class Growth:
    """A tree while it grows. Nodes of one level stand together; the last level is the frontier."""

    request: Request
    widths: tuple[int, ...]
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    paths: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    frontier: range = range(1)
    num_computed: int = 1  # nodes whose keys and values are in the cache, from the root on
    ancestry: npt.NDArray[np.bool_] = field(default_factory=lambda: np.ones((1, 1), dtype=np.bool_))

    @property
    def width(self) -> int:
        """Children to give to each frontier node now; 0 when grown."""
        depth = self.depths[self.frontier[0]] if self.frontier else len(self.widths)
        return self.widths[depth] if depth < len(self.widths) else 0

    def extend(self, children: Sequence[Sequence[int]]) -> None:
        """Hangs these tokens on the frontier's nodes; they are the new frontier."""
        start = len(self.tokens)
        for node, tokens in zip(self.frontier, children, strict=True):
            for token in tokens:
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
                self.paths.append((*self.paths[node], token))
        self.frontier = range(start, len(self.tokens))
        grown = np.eye(len(self.tokens), dtype=np.bool_)
        grown[:start, :start] = self.ancestry
        grown[start:, :start] = self.ancestry[self.parents[start:]]
        self.ancestry = grown

    def tree(self, name: str) -> TokenTree:
        draws = tuple(Draw(node, name) for node in range(1, len(self.tokens)))
        return TokenTree(tuple(self.tokens), tuple(self.parents), draws)
