"""KVCache: the slots of the key-value cache, without tensors (`kv_tensors` has them).

A slot stores one token's keys and values in every layer. A request's slots are listed in token order and need not be
adjacent. In one step a request reserves slots for the tokens to compute:

    [0, len(slots))                    committed: known tokens, in order
    [0, num_chain) of the reserved     the known tokens computed in this step
    [num_chain, end) of the reserved   guessed nodes, in tree order

`commit` keeps the slots of the accepted path by listing them, in path order, and frees the rest. No keys or values are
moved. After every step free + cached + own = total.

With prefix caching, a request may begin with shared slots:

    [0, num_shared)                    owned by the prefix cache; locked while the request uses them
    [num_shared, len(slots))           owned by the request

`attach` begins a request with its cached prefix. `share` hands computed tokens to the cache and goes on using them.

With a `store`, blocks of tokens also outlast the process: `save` keeps those that a request has computed, and `restore`
reads those of a prompt into the prefix cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specinfer.model.prefix_cache import PrefixCache, PrefixNode

Slots = npt.NDArray[np.int64]
NO_SLOTS: Slots = np.empty(0, dtype=np.int64)
_RESTORED = "\0restored"  # owns the slots of blocks while they are read


class OutOfSlotsError(Exception):
    """Error for a lack of free slots: another request must free its slots first."""


class BlockStore(Protocol):
    """A store of blocks of prefixes, see `PrefixStore`."""

    block_size: int

    def keys(self, salt: str, tokens: Sequence[int] | Slots, known: Sequence[bytes] = ()) -> list[bytes]: ...

    def write(self, chain: Sequence[bytes], slots: Slots) -> bool: ...

    def will_read(self, keys: Sequence[bytes], most: int | None = None) -> int: ...

    def read(self, key: bytes, slots: Slots) -> bool: ...

    def use(self, chain: Sequence[bytes]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Shared:
    """The first tokens of a request, whose slots belong to the prefix cache."""

    node: PrefixNode
    num_tokens: int


class KVCache:
    """Slot bookkeeping: reserve slots for a span and its tree, keep the accepted path, and free the rest.

    Args:
        keeps_prefixes: Whether slots of finished requests are kept for requests with the same prefix.

    Attributes:
        store: Store of prefixes that outlast the process, or None.
    """

    def __init__(self, num_slots: int, *, keeps_prefixes: bool = False) -> None:
        self.num_slots = num_slots
        self.keeps_prefixes = keeps_prefixes
        self._prefixes = PrefixCache()
        self._shared: dict[str, _Shared] = {}
        # A stack with low slots on top, so that a server with few requests touches little memory.
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int64)
        self._num_free = num_slots
        self._committed: dict[str, Slots] = {}
        self._reserved: dict[str, Slots] = {}
        self.store: BlockStore | None = None
        self._saved: dict[str, list[bytes]] = {}  # keys of blocks of running requests that were offered to the store

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_available(self) -> int:
        """Number of slots that `reserve` can return: free ones, and cached ones that no request uses."""
        return self._num_free + self._prefixes.num_unlocked

    @property
    def usage(self) -> float:
        """Share of the slots that requests hold, those of cached prefixes that they use included."""
        return 1 - self.num_available / self.num_slots

    @property
    def num_cached(self) -> int:
        """Number of slots kept for reuse, whether or not a request uses them now."""
        return self._prefixes.num_slots

    @property
    def num_owned(self) -> int:
        """Number of slots that belong to single requests."""
        num_shared = sum(shared.num_tokens for shared in self._shared.values())
        committed = sum(len(s) for s in self._committed.values()) - num_shared
        return committed + sum(len(s) for s in self._reserved.values())

    def is_balanced(self) -> bool:
        return self.num_free + self.num_cached + self.num_owned == self.num_slots

    def num_shared(self, request_id: str) -> int:
        """Return how many of a request's slots, from the first, belong to the prefix cache."""
        shared = self._shared.get(request_id)
        return shared.num_tokens if shared else 0

    def slots(self, request_id: str) -> Slots:
        """Return the [num_tokens] slots of the committed tokens, in token order."""
        return self._committed.get(request_id, NO_SLOTS)

    def reserved(self, request_id: str) -> Slots:
        """Return the [num_reserved] slots that are reserved and not yet committed."""
        return self._reserved.get(request_id, NO_SLOTS)

    def reserve(self, request_id: str, count: int) -> Slots:
        """Reserve [count] more slots for this step.

        Raises:
            OutOfSlotsError: Fewer slots are available. Nothing was reserved.
        """
        if count > self.num_available:
            raise OutOfSlotsError(f"{count} slots requested, {self.num_available} available")
        if count > self._num_free:
            # Evict some more than needed now, because the search for evictable slots takes time.
            self._free_slots(self._prefixes.evict(count - self._num_free + self.num_slots // 64))
        top = self._num_free
        taken = self._free[top - count : top][::-1].copy()
        self._num_free -= count
        self._reserved[request_id] = np.concatenate([self.reserved(request_id), taken])
        return taken

    def commit(self, request_id: str, kept: Sequence[int], of: int | None = None) -> None:
        """Keep these of the reserved slots, in this order, and free the others.

        Args:
            kept: Indices into the reserved slots.
            of: Number of reserved slots, from the first, to commit or free; the others stay reserved. None for all.
        """
        reserved = self._reserved.pop(request_id, NO_SLOTS)
        if of is not None and of < len(reserved):
            self._reserved[request_id] = reserved[of:]
            reserved = reserved[:of]
        if not len(reserved):
            assert not len(kept)
            return  # a request without slots has no entry
        index = np.asarray(kept, dtype=np.int64)
        self._committed[request_id] = np.concatenate([self.slots(request_id), reserved[index]])
        rejected = np.ones(len(reserved), dtype=np.bool_)
        rejected[index] = False
        self._free_slots(reserved[rejected])

    def give_back(self, request_id: str, kept: int) -> None:
        """Free all but the first `kept` of the reserved slots."""
        reserved = self.reserved(request_id)
        if kept < len(reserved):
            self._reserved[request_id] = reserved[:kept]
            self._free_slots(reserved[kept:])

    def truncate(self, request_id: str, length: int) -> None:
        """Drop all but the first `length` committed tokens."""
        slots, num_shared = self.slots(request_id), self.num_shared(request_id)
        if length < len(slots):
            self._committed[request_id] = slots[:length]
            self._free_slots(slots[max(length, num_shared) :])
            if self.store is not None and request_id in self._saved:
                del self._saved[request_id][length // self.store.block_size :]
            if length < num_shared:
                self._shared[request_id] = replace(self._shared[request_id], num_tokens=length)

    def attach(self, request_id: str, salt: str | None, tokens: Sequence[int]) -> int:
        """Begin a request that has no slots with the longest cached prefix of its tokens, and return its length.

        What is to be read from the store has been restored before.
        """
        assert not len(self.slots(request_id))
        if not self.keeps_prefixes or salt is None:
            return 0
        node, slots = self._prefixes.match(salt, tokens)
        if len(slots):
            self._prefixes.lock(node)
            self._shared[request_id] = _Shared(node, len(slots))
            self._committed[request_id] = slots
        return len(slots)

    def share(self, request_id: str, salt: str | None, tokens: Sequence[int]) -> None:
        """Add a request's committed tokens to the prefix cache, up to the length of `tokens`, their ids."""
        self.save(request_id, salt, tokens)
        slots, num_shared = self.slots(request_id), self.num_shared(request_id)
        length = min(len(slots), len(tokens))
        if not self.keeps_prefixes or salt is None or length <= num_shared:
            return
        node, known = self._prefixes.insert(salt, tokens[:length], slots[:length])
        self._prefixes.lock(node)
        if request_id in self._shared:
            self._prefixes.unlock(self._shared[request_id].node)
        self._shared[request_id] = _Shared(node, length)
        if known > num_shared:  # another request has cached the same tokens in the meantime: use its slots
            self._free_slots(slots[num_shared:known])
            cached = [above.slots for above in node.path()]
            self._committed[request_id] = np.concatenate([*cached[::-1], slots[length:]])

    def release(self, request_id: str, salt: str | None, tokens: Sequence[int]) -> None:
        """Free a request, as `free` does, but keep its committed tokens in the prefix cache."""
        self.share(request_id, salt, tokens)
        if self.store is not None and (saved := self._saved.get(request_id)):
            self.store.use(saved)
        self.free(request_id)

    def save(self, request_id: str, salt: str | None, tokens: Sequence[int]) -> None:
        """Offer the blocks that a request has completed to the store, as far as it takes them now.

        Args:
            tokens: Token ids of the request, with those that are not computed yet.
        """
        store, slots = self.store, self.slots(request_id)
        if store is None or salt is None:
            return
        size, saved = store.block_size, self._saved.setdefault(request_id, [])
        count = min(len(slots), len(tokens)) // size
        if count <= len(saved):
            return
        keys = store.keys(salt, tokens[: count * size], saved)
        for block in range(len(saved), count):
            if not store.write(keys[: block + 1], slots[block * size : (block + 1) * size]):
                break
            saved.append(keys[block])

    def restore(self, salt: str | None, tokens: Sequence[int], most: int | None = None) -> tuple[int, bool]:
        """Read the blocks that follow the cached prefix of these tokens from the store into the prefix cache.

        Args:
            most: Most blocks to read now, or None for all.

        Returns:
            The number of blocks that were read, and whether nothing is left that could be read.
        """
        store = self.store
        if store is None or salt is None:
            return 0, True
        size, ids = store.block_size, np.asarray(tokens, dtype=np.int64)
        node, slots = self._prefixes.match(salt, ids)
        num_cached, first = len(slots), len(slots) // size
        keys = store.keys(salt, ids) if len(ids) // size > first else []
        count = store.will_read(keys[first:], most)
        num_read = count if most is None else min(most, count)
        self._prefixes.lock(node)
        try:
            for block in range(first, first + num_read):
                num_new = (block + 1) * size - len(slots)
                if num_new > self.num_available or not store.read(keys[block], self.reserve(_RESTORED, num_new)):
                    count = 0  # what follows is of no use
                    break
                slots = np.concatenate([slots, self.reserved(_RESTORED)[len(slots) - num_cached :]])
        finally:
            self._prefixes.unlock(node)
            self.give_back(_RESTORED, len(slots) - num_cached)
            self._reserved.pop(_RESTORED, None)
            if len(slots) > num_cached:
                self._prefixes.insert(salt, ids[: len(slots)], slots)
        return num_read, num_read >= count

    def free(self, request_id: str) -> None:
        """Free all slots that the request owns or reserved; do nothing for an unknown request."""
        shared = self._shared.pop(request_id, None)
        if shared is not None:
            self._prefixes.unlock(shared.node)
        num_shared = shared.num_tokens if shared else 0
        self._free_slots(self._committed.pop(request_id, NO_SLOTS)[num_shared:])
        self._free_slots(self._reserved.pop(request_id, NO_SLOTS))
        self._saved.pop(request_id, None)

    def _free_slots(self, slots: Slots) -> None:
        end = self._num_free + len(slots)
        assert end <= self.num_slots, "a slot was freed twice"
        self._free[self._num_free : end] = slots[::-1]
        self._num_free = end
