"""KVTensors: the keys and values of all slots, and what each layer stores of a token."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.model.kv_cache import Slots
from specinfer.model.recurrent.states import RecurrentStates
from specinfer.ops.kv_types import FLOAT8, NO_SCALES, KVScales, to_stored


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

        self.shapes, self.num_slots, self._device = tuple(shapes), num_slots, device
        self.keys: list[Tensor] = []  # each [slots, kv_heads, key_dim]
        self.values: list[Tensor] = []
        for shape in shapes:
            self.keys.append(pool(shape, self.keys, shape.key_dim))
            self.values.append(pool(shape, self.values, shape.value_dim))
        stored = [shape if shape.shares is None else shapes[shape.shares] for shape in shapes]
        self.scales = [shape.scales if kv_dtype in FLOAT8 and shape.attends else NO_SCALES for shape in stored]
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
        return [self.taps[layer].index_select(0, index) for layer in layers]

    def keep_taps(self, layers: Collection[int]) -> None:
        """Store hidden states after no other layers from now on."""
        for layer in self.taps.keys() - layers:
            del self.taps[layer]

    def num_bytes(self) -> int:
        pools = {pool.data_ptr(): pool for pool in (*self.keys, *self.values, *self.taps.values())}  # shared ones once
        return sum(pool.numel() * pool.element_size() for pool in pools.values())


def put_rows(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write [tokens, width] hidden states to the rows of `slots` [tokens]; slot -1 is the last row.

    On CPUs indexing would wake all threads of PyTorch for a few rows. That takes longer than the copy, and while they
    wait for more they slow native calls down.
    """
    if rows.device.type == "cpu":
        rows.index_copy_(0, slots.remainder(len(rows)), new.to(rows.dtype))
    else:
        rows[slots] = new.to(rows.dtype)


def bytes_per_slot(
    shapes: Sequence[LayerShape],
    dtype: torch.dtype,
    taps: TapShape | None = None,
    kv_dtype: torch.dtype | None = None,
) -> int:
    """Return the bytes that one token's keys and values take in all layers, and its stored hidden states."""
    of_layers = sum(shape.num_values * shape.stored_type(dtype, kv_dtype).itemsize for shape in shapes)
    return of_layers + (taps.num_values if taps else 0) * dtype.itemsize
