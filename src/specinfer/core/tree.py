"""The token tree: all draft tokens of a request, which the target verifies in one pass.

Node 0 is the root: the last known token. Every other node is a draft token that follows its parent, and
parents come before their children. Two draft tokens with the same parent and token id are one node (a tree
is the union of its paths: SpecInfer, arXiv 2305.09781, Definition 3.2). Every draw is still recorded in draw
order, because stochastic verification rules need each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import lt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import Distribution, Draw, Draws, Ints

__all__ = ["OFF", "Distribution", "Draw", "TokenTree", "TreeArrays", "TreeBudget", "expansion_nodes"]


@dataclass(frozen=True, slots=True)
class TreeBudget:
    """Limits on the draft tree of one request.

    Attributes:
        max_nodes: Maximum number of draft tokens, without the root; 0 is plain decoding.
        max_depth: Maximum depth of a draft token.
        widths: Fixed expansion, SpecInfer's <k1, ..., km> (arXiv 2305.09781, section 3): `widths[i]`
            children for each node of depth i, from each drafter. If empty, the tree grows best first: it takes
            the most promising nodes within the limits.
        num_drafters: Number of drafters that each grow their own expansion.
        min_path_prob: Best first skips nodes that are less likely than this to be accepted.
        min_gain: Best first stops where a further level, over all requests, is expected to yield fewer
            accepted tokens than this.
        row_prices: Expected tokens that 1, 2, ... draft tokens have to yield together, those of all requests of the
            step counted. The number that yields most beyond its price is taken, or none; empty if each draft token is
            judged alone, by `min_path_prob`. Never for models.
        drafters: Names of the drafters that are used; None is all of them.
        with_models: Limits of the tree if models are asked. The other limits are then those of lookups alone, for the
            case that no model repays its levels. If it is None, the other limits hold in both cases.
    """

    max_nodes: int = 0
    max_depth: int = 0
    widths: tuple[int, ...] = ()
    num_drafters: int = 1
    min_path_prob: float = 0.0
    min_gain: float = 0.0
    row_prices: tuple[float, ...] = ()
    drafters: frozenset[str] | None = None
    with_models: "TreeBudget | None" = None

    @classmethod
    def expansion(cls, widths: Sequence[int], num_drafters: int = 1) -> "TreeBudget":
        """Return the budget with which each drafter grows the whole expansion <k1, ..., km>."""
        return cls(num_drafters * expansion_nodes(widths), len(widths), tuple(widths), num_drafters)

    def cut(self, max_depth: int, max_nodes: int) -> "TreeBudget":
        """Return this budget within tighter limits; a fixed expansion loses its deepest levels until it fits."""
        if max_depth >= self.max_depth and max_nodes >= self.max_nodes and self.max_depth and self.max_nodes:
            return self
        max_depth, max_nodes = min(max(max_depth, 0), self.max_depth), min(max(max_nodes, 0), self.max_nodes)
        if not self.widths:
            if not (max_depth and max_nodes):
                return OFF
            beside = self.with_models and self.with_models.cut(max_depth, max_nodes)
            return replace(self, max_depth=max_depth, max_nodes=max_nodes, with_models=beside)
        widths = self.widths[:max_depth]
        while widths and self.num_drafters * expansion_nodes(widths) > max_nodes:
            widths = widths[:-1]
        return replace(TreeBudget.expansion(widths, self.num_drafters), drafters=self.drafters)

    def share(self, max_nodes: int) -> "TreeBudget":
        """Return the budget of one of several drafters: its own expansion, or up to `max_nodes` best first."""
        if self.widths:
            return TreeBudget.expansion(self.widths)
        return self.cut(self.max_depth, max_nodes)

    def with_forced(self, forced: "TreeBudget") -> "TreeBudget":
        """Return the budget in which what grammars force may have as many nodes, if no model is asked beside it."""
        if not self.max_nodes:
            return replace(forced, drafters=frozenset())
        if self.widths or self.row_prices:
            return self
        return replace(
            self,
            max_nodes=max(forced.max_nodes, self.max_nodes),
            max_depth=max(forced.max_depth, self.max_depth),
            min_path_prob=forced.min_path_prob,
            row_prices=forced.row_prices,
            with_models=self.with_models or self,
        )

    def with_drafter(self) -> "TreeBudget":
        """Return the budget with which one more drafter grows the whole expansion."""
        return replace(TreeBudget.expansion(self.widths, self.num_drafters + 1), drafters=self.drafters)

    @property
    def asks_none(self) -> bool:
        """True if no drafter is used but the grammar of the request, and its prediction."""
        return not self.max_nodes or self.drafters == frozenset()

    def asks(self, drafter: str) -> bool:
        """Return whether the drafter of this name is used."""
        return self.drafters is None or drafter in self.drafters


OFF = TreeBudget()


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node; the root's is 0."""
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return depths


def expansion_nodes(widths: Sequence[int]) -> int:
    """Return the number of draft tokens in a full expansion, without the root."""
    total, level = 0, 1
    for width in widths:
        level *= width
        total += level
    return total


class TreeArrays(NamedTuple):
    """A tree as arrays, with one entry for each node or draw."""

    tokens: Ints
    parents: Ints
    depths: Ints
    draws: Draws


_ROOT = np.full(1, -1), np.zeros(1, dtype=np.int64), Draws.from_draws(())  # parents, depths and draws of a root alone


class TokenTree:
    """An immutable tree whose nodes are stored parent before child. Growing it makes a new tree.

    It is made of tuples or of arrays; what it was not made of is made when it is first asked for.

    Args:
        tokens: Token id of each node; `tokens[0]` is the root's, already known.
        parents: Parent of each node; -1 for the root.
        draws: All draws in draw order, duplicates included.
    """

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], draws: Sequence[Draw] = ()) -> None:
        assert len(tokens) == len(parents) >= 1
        assert parents[0] == -1
        assert all(map(lt, parents, range(len(parents))))
        assert min(parents[1:], default=0) >= 0
        self._size = len(tokens)
        vars(self).update(tokens=tuple(tokens), parents=tuple(parents), draws=tuple(draws))

    @classmethod
    def from_arrays(cls, arrays: TreeArrays) -> "TokenTree":
        """Return a tree of arrays, which must not change any more."""
        tree = cls.__new__(cls)
        tree._size = len(arrays.tokens)
        vars(tree)["arrays"] = arrays
        return tree

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.arrays.tokens.tolist())

    @cached_property
    def parents(self) -> tuple[int, ...]:
        return tuple(self.arrays.parents.tolist())

    @cached_property
    def draws(self) -> tuple[Draw, ...]:
        return self.arrays.draws.tuples()

    @cached_property
    def arrays(self) -> TreeArrays:
        if not self.num_guessed:  # as most trees of plain decoding, which takes no time for them
            return TreeArrays(np.array(self.tokens, dtype=np.int64), *_ROOT)
        columns = (self.tokens, self.parents, self.depths)
        tokens, parents, depths = (np.array(column, dtype=np.int64) for column in columns)
        return TreeArrays(tokens, parents, depths, Draws.from_draws(self.draws))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenTree):
            return NotImplemented
        return (self.tokens, self.parents, self.draws) == (other.tokens, other.parents, other.draws)

    def __hash__(self) -> int:
        return hash((self.tokens, self.parents))

    def __repr__(self) -> str:
        return f"TokenTree(tokens={self.tokens}, parents={self.parents}, draws={self.draws})"

    @classmethod
    def root(cls, token: int) -> "TokenTree":
        """Return a tree without draft tokens, as for plain decoding."""
        return cls((token,), (-1,))

    @classmethod
    def chain(cls, root: int, guesses: Sequence[int], drafter: str = "", confidence: float = 1.0) -> "TokenTree":
        """Return a tree with one path, in which each draft token follows the one before."""
        return cls.chosen((root, *guesses), range(-1, len(guesses)), drafter, [confidence] * len(guesses))

    @classmethod
    def chosen(
        cls, tokens: Sequence[int], parents: Sequence[int], drafter: str | Sequence[str], confidence: Sequence[float]
    ) -> "TokenTree":
        """Return a tree of one drafter that chose its nodes one by one; `confidence` of each node but the root.

        `drafter` is its name, or the names of each node but the root, with their sources.
        """
        draws = Draws.chosen(np.array(confidence, dtype=np.float64), drafter)
        columns = (tokens, parents, depths_of(parents))
        ids, above, depths = (np.array(column, dtype=np.int64) for column in columns)
        return cls.from_arrays(TreeArrays(ids, above, depths, draws))

    def __len__(self) -> int:
        return self._size

    @property
    def num_guessed(self) -> int:
        return self._size - 1

    @property
    def is_chosen(self) -> bool:
        """True if all draft tokens were chosen and none was drawn, so that any may be dropped."""
        return self.arrays.draws.numbers is None

    @property
    def drafter_names(self) -> set[str]:
        """The drafters that proposed any node."""
        draws = self.arrays.draws
        return {draws.names[maker] for maker in set(draws.makers.tolist())}

    @property
    def max_depth(self) -> int:
        return max(self.depths)

    @cached_property
    def depths(self) -> list[int]:
        """Depth of each node; the root's is 0."""
        return self.arrays.depths.tolist() if "arrays" in vars(self) else depths_of(self.parents)

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """For each node, its child nodes by token id."""
        children: list[dict[int, int]] = [{} for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            children[self.parents[node]][self.tokens[node]] = node
        return children

    @cached_property
    def candidates(self) -> list[list[Draw]]:
        """For each node, the draws of its children in draw order, duplicates included."""
        candidates: list[list[Draw]] = [[] for _ in self.tokens]
        for draw in self.draws:
            candidates[self.parents[draw.node]].append(draw)
        return candidates

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root (left out) down to `node`."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Return the draft tokens from the root (left out) down to `node`."""
        return tuple(self.tokens[n] for n in self.path(node))

    def ancestry(self) -> npt.NDArray[np.bool_]:
        """Return the ancestor mask: [num_nodes, num_nodes], True in row a, column b if b is a or an ancestor of a."""
        size = len(self.tokens)
        rows = [1]  # bit b of row a; Python integers, because a step needs hundreds of rows
        for node in range(1, size):
            rows.append(rows[self.parents[node]] | 1 << node)
        num_bytes = -(-size // 8)
        packed = np.frombuffer(b"".join([row.to_bytes(num_bytes, "little") for row in rows]), dtype=np.uint8)
        bits = np.unpackbits(packed.reshape(size, num_bytes), axis=1, count=size, bitorder="little")
        return bits.view(np.bool_)

    def drafters(self) -> list[str | None]:
        """Return the drafter that first proposed each node, or None for the root."""
        names: list[str | None] = [None] * len(self)
        if not self.num_guessed:
            return names
        draws = self.arrays.draws
        for node, maker in zip(draws.nodes.tolist()[::-1], draws.makers.tolist()[::-1], strict=True):
            names[node] = draws.names[maker]
        return names

    @classmethod
    def merge(cls, trees: Sequence["TokenTree"]) -> "TokenTree":
        """Return the union of the trees by token path. Every draw is kept, in the order of the trees."""
        first = max(trees, key=len)  # its nodes keep their numbers, so the others have fewer nodes to look up
        tokens, parents = list(first.tokens), list(first.parents)
        children = [dict(known) for known in first.children]
        draws: list[Draw] = []
        for tree in trees:
            assert tree.tokens[0] == tokens[0], "only trees of one root merge"
            if tree is first:
                draws += tree.draws
                continue
            place = [0] * len(tree)  # node of this tree -> node of the union
            for node in range(1, len(tree)):
                parent, token = place[tree.parents[node]], tree.tokens[node]
                known = children[parent].get(token)
                if known is None:
                    known = children[parent][token] = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                    children.append({})
                place[node] = known
            # Not _replace, which takes five times as long for the hundreds of draws of a step.
            draws += [
                Draw(place[node], drafter, distribution, sure) for node, drafter, distribution, sure in tree.draws
            ]
        return cls(tuple(tokens), tuple(parents), tuple(draws))

    def keep(self, nodes: Sequence[int]) -> "TokenTree":
        """Return the tree of these nodes (ascending, with the root and all ancestors) and their draws.

        Leaving out a drawn token would change the output's distribution, so only chosen ones may be left out.
        """
        if len(nodes) == len(self):
            return self
        place = {node: i for i, node in enumerate(nodes)}
        assert all(draw.distribution is None or draw.node in place for draw in self.draws), "a draw must stay on record"
        return TokenTree(
            tuple(self.tokens[node] for node in nodes),
            (-1, *(place[self.parents[node]] for node in nodes[1:])),
            tuple(
                [
                    Draw(place[node], drafter, distribution, sure)
                    for node, drafter, distribution, sure in self.draws
                    if node in place
                ]
            ),
        )
