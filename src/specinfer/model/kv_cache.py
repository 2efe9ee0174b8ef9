"""The key-value cache: slot management without tensors, and the tensors themselves.

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
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.kernels.kv_types import FLOAT8, NO_SCALES, KVScales, to_stored
from specinfer.model.prefix_cache import PrefixCache, PrefixNode
from specinfer.model.recurrent.states import RecurrentStates

Slots = npt.NDArray[np.int64]
NO_SLOTS: Slots = np.empty(0, dtype=np.int64)


class OutOfSlotsError(Exception):
    """Error for a lack of free slots: another request must free its slots first."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """The first tokens of a request, whose slots belong to the prefix cache."""

    node: PrefixNode
    num_tokens: int


class KVCache:
    """Slot bookkeeping: reserve slots for a span and its tree, keep the accepted path, and free the rest.

    Args:
        keeps_prefixes: Whether slots of finished requests are kept for requests with the same prefix.
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

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_available(self) -> int:
        """Number of slots that `reserve` can return: free ones, and cached ones that no request uses."""
        return self._num_free + self._prefixes.num_unlocked

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
        own, num_shared = self.slots(request_id), self.num_shared(request_id)
        if length < len(own):
            self._committed[request_id] = own[:length]
            self._free_slots(own[max(length, num_shared) :])
            if length < num_shared:
                self._shared[request_id] = replace(self._shared[request_id], num_tokens=length)

    def attach(self, request_id: str, salt: str | None, tokens: Sequence[int]) -> int:
        """Begin a request that has no slots with the longest cached prefix of its tokens, and return its length."""
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
        own, num_shared = self.slots(request_id), self.num_shared(request_id)
        length = min(len(own), len(tokens))
        if not self.keeps_prefixes or salt is None or length <= num_shared:
            return
        node, known = self._prefixes.insert(salt, tokens[:length], own[:length])
        self._prefixes.lock(node)
        if request_id in self._shared:
            self._prefixes.unlock(self._shared[request_id].node)
        self._shared[request_id] = _Shared(node, length)
        if known > num_shared:  # another request has cached the same tokens in the meantime: use its slots
            self._free_slots(own[num_shared:known])
            cached = [above.slots for above in node.path()]
            self._committed[request_id] = np.concatenate([*cached[::-1], own[length:]])

    def release(self, request_id: str, salt: str | None, tokens: Sequence[int]) -> None:
        """Free a request, as `free` does, but keep its committed tokens in the prefix cache."""
        self.share(request_id, salt, tokens)
        self.free(request_id)

    def free(self, request_id: str) -> None:
        """Free all slots that the request owns or reserved; do nothing for an unknown request."""
        shared = self._shared.pop(request_id, None)
        if shared is not None:
            self._prefixes.unlock(shared.node)
        num_shared = shared.num_tokens if shared else 0
        self._free_slots(self._committed.pop(request_id, NO_SLOTS)[num_shared:])
        self._free_slots(self._reserved.pop(request_id, NO_SLOTS))

    def _free_slots(self, slots: Slots) -> None:
        end = self._num_free + len(slots)
        assert end <= self.num_slots, "a slot was freed twice"
        self._free[self._num_free : end] = slots[::-1]
        self._num_free = end


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of what one layer stores for one token, as observed in the model's attention calls.

    Attributes:
        attends: Whether it stores keys and values, not the inputs of a convolution or a recurrence.
        scales: Scales of the checkpoint for keys and values of 8 bits.
        shares: Number of the earlier layer whose keys and values it reads, or None if it stores its own.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    attends: bool = True
    scales: KVScales = NO_SCALES
    shares: int | None = None

    @property
    def num_values(self) -> int:
        return 0 if self.shares is not None else self.num_kv_heads * (self.key_dim + self.value_dim)

    def stored_type(self, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> torch.dtype:
        """Return the type that it stores numbers of type `dtype` in, if the cache's own is `kv_dtype`."""
        return kv_dtype if kv_dtype is not None and self.attends else dtype


@dataclass(frozen=True, slots=True)
class TapShape:
    """The hidden states that are stored for each token.

    Attributes:
        layers: Numbers of layers after which they are taken, ascending; 0 is the embedding.
        width: Size of a hidden state.
    """

    layers: tuple[int, ...]
    width: int

    @property
    def num_values(self) -> int:
        return len(self.layers) * self.width


class KVTensors:
    """The keys and values of every slot, layer by layer, and hidden states of some layers.

    Hidden states are stored by slot, so they follow accepted paths, cached prefixes and preempted requests as keys and
    values do.

    Args:
        taps: The layers after which hidden states are stored, or None for none.
        states: States of recurrent layers, or None to keep none.
        kv_dtype: Type of keys and values, or None for `dtype`.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        taps: TapShape | None = None,
        states: RecurrentStates | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        def pool(shape: LayerShape, pools: list[Tensor], dim: int) -> Tensor:
            if shape.shares is not None:
                return pools[shape.shares]
            # Not zeros: memory pages that are never written take no memory, and a slot is written before it is read.
            kind = shape.stored_type(dtype, kv_dtype)
            return torch.empty(num_slots, shape.num_kv_heads, dim, dtype=kind, device=device)

        self.num_slots, self._device = num_slots, device
        self.keys: list[Tensor] = []  # each [slots, kv_heads, key_dim]
        self.values: list[Tensor] = []
        for shape in shapes:
            self.keys.append(pool(shape, self.keys, shape.key_dim))
            self.values.append(pool(shape, self.values, shape.value_dim))
        own = [shape if shape.shares is None else shapes[shape.shares] for shape in shapes]
        self.scales = [shape.scales if kv_dtype in FLOAT8 and shape.attends else NO_SCALES for shape in own]
        self.states = RecurrentStates({}, 0, num_slots, device) if states is None else states
        # Padding has slot -1, and writes to the last row.
        size = () if taps is None else (num_slots + 1, taps.width)
        layers = () if taps is None else taps.layers
        self.taps = {layer: torch.empty(size, dtype=dtype, device=device) for layer in layers}

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value, each [tokens, kv_heads, dim], to `slots` [tokens]."""
        pools = self.keys[layer], self.values[layer]
        for pool, new, inverse in zip(pools, (key, value), self.scales[layer].inverses, strict=True):
            pool[slots] = to_stored(new, pool.dtype, inverse)

    def read_taps(self, layers: Sequence[int], slots: Slots) -> list[Tensor]:
        """Return the [tokens, width] hidden states after each of these layers for the tokens in these slots."""
        index = torch.from_numpy(slots).to(self._device)
        return [self.taps[layer][index] for layer in layers]

    def keep_taps(self, layers: Collection[int]) -> None:
        """Store hidden states after no other layers from now on."""
        for layer in self.taps.keys() - layers:
            del self.taps[layer]

    def num_bytes(self) -> int:
        pools = {pool.data_ptr(): pool for pool in (*self.keys, *self.values, *self.taps.values())}  # shared ones once
        return sum(pool.numel() * pool.element_size() for pool in pools.values())


def bytes_per_slot(
    shapes: Sequence[LayerShape],
    dtype: torch.dtype,
    taps: TapShape | None = None,
    kv_dtype: torch.dtype | None = None,
) -> int:
    """Return the bytes that one token's keys and values take in all layers, and its stored hidden states."""
    of_layers = sum(shape.num_values * shape.stored_type(dtype, kv_dtype).itemsize for shape in shapes)
    return of_layers + (taps.num_values if taps else 0) * dtype.itemsize
