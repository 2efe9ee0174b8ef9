"""PrefixStore: what one model's cache has of each token, to and from blocks of prefixes in a folder.

A block is `block_size` tokens: the keys and values of all layers, what recurrent layers store of a token, and the
hidden states for heads, as bytes and in the order of the cache's tensors. The last state of the recurrent layers within
the block that is in memory follows them. The key of a block is a hash of the model, the salt (of tenant, request and
adapter) and all tokens from the first, so a chain of keys names a prefix and no two prefixes share a file.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.model.kv_cache import Slots
from specinfer.model.kv_tensors import KVTensors
from specinfer.model.prefix_file import Block
from specinfer.model.prefix_folder import PrefixFolder
from specinfer.ops.kv_types import NOT_FINITE

_LEAST, _MOST = 16, 128  # tokens of a block: what follows the last whole block of a prompt is computed again
_BLOCK_BYTES = 8 << 20  # about, so that little memory waits to be written


class PrefixStore:
    """The blocks of one model in a folder.

    Args:
        identity: All that the stored numbers depend on besides the tokens.
        tensors: Tensors of the model's cache, on any device.
    """

    def __init__(self, folder: PrefixFolder, identity: Mapping[str, object], tensors: KVTensors) -> None:
        self.folder, self._states = folder, tensors.states
        pools = {pool.data_ptr(): pool for pool in (*tensors.keys, *tensors.values, *tensors.taps.values())}
        pools = {place: pool for place, pool in pools.items() if pool.numel()}  # those that layers share once
        self._pools = [pool.view(torch.uint8).flatten(1) for pool in pools.values()]  # [slots, bytes of a token]
        self._state_pools = [pool.view(torch.uint8).flatten(1) for pool in self._states.pools.values()]
        token_bytes = sum(pool.shape[1] for pool in self._pools)
        self.block_size = _LEAST
        while self.block_size < _MOST and 2 * self.block_size * token_bytes <= _BLOCK_BYTES:
            self.block_size *= 2
        self._sizes = self.block_size * token_bytes, sum(pool.shape[1] for pool in self._state_pools)
        self._body: Tensor | None = None  # what is read
        kinds = [pool.dtype for pool in pools.values()]
        ends = np.cumsum([0, *(self.block_size * pool.shape[1] for pool in self._pools)]).tolist()
        self._parts = list(zip(kinds, ends, ends[1:], strict=False))  # type and place of each pool in a block
        layout = [(str(pool.dtype), *pool.shape[1:]) for pool in (*pools.values(), *self._states.pools.values())]
        text = json.dumps([dict(identity), layout, self.block_size], sort_keys=True)
        self._identity = hashlib.sha256(text.encode()).digest()

    def keys(
        self, salt: str, tokens: Sequence[int] | npt.NDArray[np.int64], known: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Return the keys of the whole blocks of a prefix, of which the first may be known."""
        keys = [*known]
        salted = self._identity + salt.encode("utf-8", "surrogatepass")
        key = keys[-1] if keys else hashlib.sha256(salted).digest()
        ids = np.asarray(tokens[len(keys) * self.block_size :], dtype="<i8")
        for start in range(0, len(ids) - self.block_size + 1, self.block_size):
            key = hashlib.sha256(key + ids[start : start + self.block_size].tobytes()).digest()
            keys.append(key)
        return keys

    def write(self, chain: Sequence[bytes], slots: Slots) -> bool:
        """Keep the last block of a chain, unless it is kept; return False if it should be offered again later.

        Args:
            slots: Slots of its tokens.
        """
        folder, (size, state_size) = self.folder, self._sizes
        *before, key = chain
        if folder.has(key) or folder.is_paused or (before and not folder.has(before[-1])):
            return True
        if not folder.has_room(size + state_size):
            return False
        state_end, row = self._states.latest(slots)
        body = torch.empty(size + (state_size if state_end else 0), dtype=torch.uint8)
        for pool, (_, start, end) in zip(self._pools, self._parts, strict=True):
            _take_rows(pool, slots, body[start:end].view(self.block_size, -1))
        for pool, part in zip(self._state_pools, self._split_states(body), strict=True) if state_end else ():
            part.copy_(pool[row])
        numbers = body.numpy()
        is_sound = partial(self._is_finite, numbers)
        folder.put(Block(key, before, self.block_size, state_end, numbers.data, is_sound))
        return True

    def will_read(self, chain: Sequence[bytes], most: int | None = None) -> int:
        """Return how many blocks from the first are there, and let the system begin to read them.

        Args:
            most: Most blocks that are read now, or None for all; as many are begun for the next time.
        """
        count = next((i for i, key in enumerate(chain) if not self.folder.has(key)), len(chain))
        self.folder.will_read(chain[: count if most is None else min(2 * most, count)])
        return count

    def use(self, chain: Sequence[bytes]) -> None:
        """Note that a chain was used, so that it stays longer."""
        self.folder.use(chain)

    def read(self, key: bytes, slots: Slots) -> bool:
        """Read the last tokens of a block into these slots; return False if the block is not there or damaged."""
        if self._body is None:
            self._body = torch.empty(sum(self._sizes), dtype=torch.uint8)
        body = self._body
        state_end = self.folder.read(key, self.block_size, body.numpy().data, self._sizes)
        if state_end is None:
            return False
        for pool, (_, start, end) in zip(self._pools, self._parts, strict=True):
            _put_rows(pool, slots, body[start:end].view(self.block_size, -1)[self.block_size - len(slots) :])
        self._states.drop(slots)  # of the tokens that were there before
        place = state_end - 1 - self.block_size + len(slots)
        if state_end and place >= 0 and (row := self._states.take_row(int(slots[place]))) >= 0:
            for pool, part in zip(self._state_pools, self._split_states(body), strict=True):
                pool[row].copy_(part)
        self.folder.num_read_tokens += len(slots)
        return True

    def _split_states(self, body: Tensor) -> tuple[Tensor, ...]:
        sizes = [pool.shape[1] for pool in self._state_pools]
        return torch.split(body[self._sizes[0] : sum(self._sizes)], sizes)

    def _is_finite(self, numbers: npt.NDArray[np.uint8]) -> bool:
        """Return whether no number is infinite or NaN: a prompt that has them would fail again after each start."""
        parts = [*self._parts, (torch.float32, self._sizes[0], len(numbers))]
        for dtype, start, end in parts:
            kind, mask = NOT_FINITE[dtype]
            if np.any((numbers[start:end].view(kind) & mask) == mask):
                return False
        return True


# On CPUs numpy copies, in this thread: PyTorch would wake all its threads for each of many small copies.
def _take_rows(pool: Tensor, slots: Slots, rows: Tensor) -> None:
    if pool.device.type == "cpu":
        np.take(pool.numpy(), slots, axis=0, out=rows.numpy(), mode="clip")
    else:
        rows.copy_(pool.index_select(0, torch.from_numpy(slots).to(pool.device)))


def _put_rows(pool: Tensor, slots: Slots, rows: Tensor) -> None:
    if pool.device.type == "cpu":
        pool.numpy()[slots] = rows.numpy()
    else:
        pool.index_copy_(0, torch.from_numpy(slots).to(pool.device), rows.to(pool.device))
