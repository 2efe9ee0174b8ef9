"""The token tree: everything SpecInfer guesses, and everything the target verifies in one pass.

Node 0 is the root: the last known token. Every other node is a guess that follows its parent, which
stands before it. Two guesses with the same parent and token are one node (a tree is the union of its
paths: SpecInfer, arXiv 2305.09781, Definition 3.2), but every draw stays on record in draw order, since
stochastic verification rules need each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """One guess: which node it landed on, who made it, and the law it was drawn from."""

    node: int
    drafter: str
    law: Tensor | None = None  # [vocab]; None: the token was chosen, not drawn


@dataclass(frozen=True, slots=True)
class TreeBudget:
    """How far to guess for one request: `widths[i]` children for each node of depth i.

    This is SpecInfer's expansion configuration <k1, ..., km> (arXiv 2305.09781, section 3).
    """

    widths: tuple[int, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Guessed nodes of the full tree, without the root."""
        total, level = 0, 1
        for width in self.widths:
            level *= width
            total += level
        return total

    def cut(self, max_depth: int, max_nodes: int) -> "TreeBudget":
        """The deepest beginning of this expansion within the limits."""
        widths = self.widths[: max(max_depth, 0)]
        while widths and TreeBudget(widths).num_nodes > max_nodes:
            widths = widths[:-1]
        return TreeBudget(widths)


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Nodes in parent-before-child order. A value: growing makes a new one.

    Attributes:
        tokens: Token id of each node; `tokens[0]` is the root's, already known.
        parents: Parent of each node; -1 for the root.
        draws: Each guess in draw order, duplicates included.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draws: tuple[Draw, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) >= 1
        assert self.parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(self.parents[1:], start=1))

    @classmethod
    def root(cls, token: int) -> "TokenTree":
        """A tree without guesses: plain decoding."""
        return cls((token,), (-1,))

    @classmethod
    def chain(cls, root: int, guesses: Sequence[int], drafter: str = "") -> "TokenTree":
        """One path: each guess follows the one before."""
        nodes = range(1, len(guesses) + 1)
        return cls(
            (root, *guesses),
            (-1, *range(len(guesses))),
            tuple(Draw(node, drafter) for node in nodes),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_guessed(self) -> int:
        return len(self.tokens) - 1

    def depths(self) -> list[int]:
        """Depth of each node; the root's is 0."""
        depths = [0] * len(self.tokens)
        for node, parent in enumerate(self.parents[1:], start=1):
            depths[node] = depths[parent] + 1
        return depths

    def children(self) -> list[dict[int, int]]:
        """For each node: token id -> child node."""
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            children[self.parents[node]][self.tokens[node]] = node
        return children

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root (left out) down to `node`."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def path_tokens(self) -> list[tuple[int, ...]]:
        """For each node, the guessed tokens from the root (left out) to it."""
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(self.tokens)):
            paths.append((*paths[self.parents[node]], self.tokens[node]))
        return paths

    def ancestry(self) -> npt.NDArray[np.bool_]:
        """[num_nodes, num_nodes]: row `a`, column `b`: b is a, or an ancestor of a."""
        matrix = np.eye(len(self.tokens), dtype=np.bool_)
        for node in range(1, len(self.tokens)):
            matrix[node] |= matrix[self.parents[node]]
        return matrix

    def drafters(self) -> list[str | None]:
        """Who first guessed each node; None for the root."""
        names: list[str | None] = [None] * len(self.tokens)
        for draw in reversed(self.draws):
            names[draw.node] = draw.drafter
        return names

    @classmethod
    def merge(cls, trees: Sequence["TokenTree"], max_nodes: int | None = None) -> "TokenTree":
        """The union of the trees by token path; draws keep the order of the trees.

        With `max_nodes`, guesses past that many nodes are left out, so earlier trees come first. Leaving
        drawn guesses out is exact for coupled verification only.
        """
        tokens, parents, draws = [trees[0].tokens[0]], [-1], []
        children: list[dict[int, int]] = [{}]
        for tree in trees:
            assert tree.tokens[0] == tokens[0], "only trees of one root merge"
            place = {0: 0}  # node of this tree -> node of the union
            for node in range(1, len(tree)):
                parent = place.get(tree.parents[node])
                if parent is None:
                    continue
                known = children[parent].get(tree.tokens[node])
                if known is None:
                    if max_nodes is not None and len(tokens) > max_nodes:
                        continue
                    known = len(tokens)
                    tokens.append(tree.tokens[node])
                    parents.append(parent)
                    children[parent][tree.tokens[node]] = known
                    children.append({})
                place[node] = known
            draws += [Draw(place[d.node], d.drafter, d.law) for d in tree.draws if d.node in place]
        return cls(tuple(tokens), tuple(parents), tuple(draws))
