"""Prefixes of past requests, kept for reuse: a radix tree over token ids, whose nodes hold slots.

Each salt has a tree of its own, so that nothing said under one can be met, or timed, under another. Tokens are
compared, not hashes of them. A node that a request uses is locked, with all above it; what is not locked is given
up when slots run out, the least recently used end of a branch first.

Source: RadixAttention, SGLang (Zheng et al., arXiv 2312.07104, section 3).
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_NONE: Ints = np.empty(0, dtype=np.int64)


class PrefixNode:
    """A stretch of tokens that follows its parent's, and the slots of their keys and values."""

    __slots__ = ("children", "last_used", "num_users", "parent", "slots", "tokens")

    def __init__(self, parent: "PrefixNode | None", tokens: Ints, slots: Ints) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[int, PrefixNode] = {}  # by their first token
        self.num_users = 0  # requests that use this node or one below it
        self.last_used = 0

    def path(self) -> "Iterator[PrefixNode]":
        """This node and all above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


_EMPTY = PrefixNode(None, _NONE, _NONE)  # the tree of a salt that nothing was kept under


class PrefixCache:
    """The trees of all salts. It owns the slots in them."""

    def __init__(self) -> None:
        self._roots: dict[str, PrefixNode] = {}
        self._clock = count(1)
        self.num_slots = 0
        self.num_unlocked = 0  # of the slots, those that can be given up

    def match(self, salt: str, tokens: Sequence[int]) -> tuple[PrefixNode, Ints]:
        """The node where the longest known beginning of these tokens ends, and the slots of that beginning."""
        node, found = self._roots.get(salt, _EMPTY), [_NONE]
        for child, length in self._descend(node, np.asarray(tokens, dtype=np.int64)):
            node = child if length == len(child.tokens) else self._split(child, length)
            found.append(node.slots)
        return node, np.concatenate(found)

    def insert(self, salt: str, tokens: Sequence[int], slots: Ints) -> tuple[PrefixNode, int]:
        """Takes over the slots of what is new; the last node, and how many of the tokens were known before.

        The slots of those stay with whoever gave them.
        """
        self._roots.setdefault(salt, PrefixNode(None, _NONE, _NONE))
        node, known = self.match(salt, tokens)
        length = len(known)
        if length < len(tokens):
            rest = np.asarray(tokens[length:], dtype=np.int64)
            node.children[int(rest[0])] = child = PrefixNode(node, rest, slots[length:].copy())
            self.num_slots += len(rest)
            self.num_unlocked += len(rest)
            node = child
        return node, length

    def lock(self, node: PrefixNode) -> None:
        """Keeps the node and all above it until `unlock`."""
        now = next(self._clock)
        for above in node.path():
            self.num_unlocked -= 0 if above.num_users else len(above.slots)
            above.num_users += 1
            above.last_used = now

    def unlock(self, node: PrefixNode) -> None:
        now = next(self._clock)
        for above in node.path():
            above.num_users -= 1
            above.last_used = now
            assert above.num_users >= 0
            self.num_unlocked += 0 if above.num_users else len(above.slots)

    def evict(self, least: int) -> Ints:
        """Gives up at least so many slots, or all that can be."""
        heap = [(node.last_used, id(node), node) for node in self._nodes() if self._can_go(node)]
        heapq.heapify(heap)
        freed: list[Ints] = [_NONE]
        num_freed = 0
        while heap and num_freed < least:
            _, _, node = heapq.heappop(heap)
            freed.append(node.slots)
            num_freed += len(node.slots)
            parent = node.parent
            assert parent is not None
            del parent.children[int(node.tokens[0])]
            if self._can_go(parent):
                heapq.heappush(heap, (parent.last_used, id(parent), parent))
        self.num_slots -= num_freed
        self.num_unlocked -= num_freed
        self._roots = {salt: root for salt, root in self._roots.items() if root.children}
        return np.concatenate(freed)

    def _can_go(self, node: PrefixNode) -> bool:
        return node.parent is not None and not node.children and not node.num_users

    def _nodes(self) -> Iterator[PrefixNode]:
        nodes = list(self._roots.values())
        while nodes:
            node = nodes.pop()
            yield node
            nodes.extend(node.children.values())

    def _descend(self, node: PrefixNode, tokens: Ints) -> Iterator[tuple[PrefixNode, int]]:
        """Each node that goes on with the tokens, and how many of its own agree; only the last may agree in part."""
        start = 0
        while start < len(tokens):
            child = node.children.get(int(tokens[start]))
            if child is None:
                return
            length = min(len(child.tokens), len(tokens) - start)
            differ = np.flatnonzero(child.tokens[:length] != tokens[start : start + length])
            length = int(differ[0]) if len(differ) else length
            whole = length == len(child.tokens)
            yield child, length
            if not whole:
                return
            start, node = start + length, child

    def _split(self, node: PrefixNode, length: int) -> PrefixNode:
        """Makes two of a node; the new one above holds its first tokens, and whoever uses the node goes on doing so."""
        parent = node.parent
        assert parent is not None
        above = PrefixNode(parent, node.tokens[:length], node.slots[:length])
        above.num_users, above.last_used = node.num_users, node.last_used
        parent.children[int(node.tokens[0])] = above
        above.children[int(node.tokens[length])] = node
        node.parent, node.tokens, node.slots = above, node.tokens[length:], node.slots[length:]
        return above
