"""Prefixes of past requests, kept for reuse: a radix tree over token ids whose nodes have slots.

Each salt has its own tree, so a request cannot hit, or detect by timing, prefixes that were cached under another salt.
Tokens are compared directly, not by hash. A node that a request uses is locked, together with all nodes above it. When
slots run out, nodes that are not locked are evicted, starting with the least recently used leaf.

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
    """A run of tokens that follows the parent's tokens, and the slots of their keys and values."""

    __slots__ = ("children", "last_used", "num_users", "parent", "slots", "tokens")

    def __init__(self, parent: "PrefixNode | None", tokens: Ints, slots: Ints) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[int, PrefixNode] = {}  # by their first token
        self.num_users = 0  # requests that use this node or one below it
        self.last_used = 0

    def path(self) -> "Iterator[PrefixNode]":
        """Yield this node and all nodes above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


_EMPTY = PrefixNode(None, _NONE, _NONE)  # the tree of a salt that has nothing cached


class PrefixCache:
    """The trees of all salts. It owns the slots in them."""

    def __init__(self) -> None:
        self._roots: dict[str, PrefixNode] = {}
        self._clock = count(1)
        self.num_slots = 0
        self.num_unlocked = 0  # slots that can be evicted

    def match(self, salt: str, tokens: Sequence[int] | Ints) -> tuple[PrefixNode, Ints]:
        """Return the node where the longest cached prefix of these tokens ends, and the slots of that prefix."""
        node, slots = self._roots.get(salt, _EMPTY), [_NONE]
        for child, length in self._descend(node, np.asarray(tokens, dtype=np.int64)):
            node = child if length == len(child.tokens) else self._split(child, length)
            slots.append(node.slots)
        return node, np.concatenate(slots)

    def insert(self, salt: str, tokens: Sequence[int] | Ints, slots: Ints) -> tuple[PrefixNode, int]:
        """Insert tokens, taking ownership of the slots of those that were not cached yet.

        The slots of tokens that were already cached stay with the caller.

        Returns:
            The last node, and the number of tokens that were already cached.
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
        """Keep the node and all nodes above it until `unlock`."""
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
        """Evict at least `least` slots, or all that can be evicted, and return them."""
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
        """Yield each node that matches the tokens, and how many of its tokens match; only the last may match partly."""
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
        """Split a node in two and return the new upper one, which has the first tokens; users of the node use both."""
        parent = node.parent
        assert parent is not None
        above = PrefixNode(parent, node.tokens[:length], node.slots[:length])
        above.num_users, above.last_used = node.num_users, node.last_used
        parent.children[int(node.tokens[0])] = above
        above.children[int(node.tokens[length])] = node
        node.parent, node.tokens, node.slots = above, node.tokens[length:], node.slots[length:]
        return above
