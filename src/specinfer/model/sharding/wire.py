"""Serialization of a pass's pieces, for ranks without an engine.

A message is one int32 tensor: for each piece a header of sizes, then its numbers. The slots of a request's prefix would
be most of it, and stay the same from pass to pass. So both sides remember the last lists of slots ("histories"). A
message names a history, how many of its slots stay, and the slots that follow.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.model.batch import Piece
from specinfer.model.kv_cache import NO_SLOTS, Slots
from specinfer.ops import AdapterTable

Numbers = npt.NDArray[np.int32]
NUM_LISTS = 64
# Adapter, history, slots that stay, slots that follow, positions of the prefix, earlier, new, logits, known, whether
# `visible` is a chain.
_HEADER = 10


class _Histories:
    """The last lists of slots. Writer and reader update theirs in the same way."""

    def __init__(self) -> None:
        self.lists: list[Slots] = [NO_SLOTS] * NUM_LISTS
        self._used = [0] * NUM_LISTS
        self._clock = 0

    def find(self, slots: Slots) -> tuple[int, int]:
        """Return the history whose list is the longest prefix of these slots, and its length.

        Without such a history, return the least recently used one and 0.
        """
        best, length = min(range(NUM_LISTS), key=self._used.__getitem__), 0
        for history, known in enumerate(self.lists):
            is_near = length < len(known) <= len(slots) and known[-1] == slots[len(known) - 1]
            if is_near and np.array_equal(known, slots[: len(known)]):
                best, length = history, len(known)
        return best, length

    def put(self, history: int, slots: Slots) -> None:
        self._clock += 1
        self.lists[history], self._used[history] = slots, self._clock


class PieceWriter:
    """A writer of messages, which a `PieceReader` must read in the same order."""

    def __init__(self) -> None:
        self._histories = _Histories()

    def write(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the pieces as a message, [count] int32."""
        parts: list[npt.NDArray[np.int32]] = [np.asarray([len(pieces)], dtype=np.int32)]
        for piece in pieces:
            history, known = self._histories.find(piece.prefix_slots)
            self._histories.put(history, piece.prefix_slots)
            num_new, num_earlier = len(piece.tokens), len(piece.earlier_slots)
            is_chain = not num_earlier and np.array_equal(piece.visible, _chain(num_new))
            tail = piece.prefix_slots[known:]
            places = () if piece.prefix_positions is None else piece.prefix_positions
            adapter = 0 if piece.adapter is None else piece.adapter.number
            sizes = (len(tail), len(places), num_earlier, num_new, piece.num_logits, piece.num_known)
            header = (adapter, history, known, *sizes, is_chain)
            numbers = (header, tail, places, piece.earlier_slots, piece.earlier_positions, piece.slots, piece.tokens)
            parts += [np.asarray(part, dtype=np.int32) for part in (*numbers, piece.positions)]
            if not is_chain:
                parts.append(_packed(piece.visible))
        return torch.from_numpy(np.concatenate(parts))


class PieceReader:
    """A reader of pieces from messages.

    Args:
        adapters: What this rank adds for adapters, by their numbers; it may change.
    """

    def __init__(self, adapters: Mapping[int, AdapterTable] | None = None) -> None:
        self._histories = _Histories()
        self._adapters = {} if adapters is None else adapters

    def read(self, message: Tensor) -> list[Piece]:
        rest = _Rest(message.numpy())
        return [self._piece(rest) for _ in range(int(rest.take(1)[0]))]

    def _piece(self, rest: "_Rest") -> Piece:
        adapter, history, known, *sizes, is_chain = rest.take(_HEADER).tolist()
        num_tail, num_places, num_earlier, num_new, num_logits, num_known = sizes
        prefix_slots = np.concatenate([self._histories.lists[history][:known], rest.slots(num_tail)])
        self._histories.put(history, prefix_slots)
        places = rest.take(num_places).astype(np.int64) if num_places else None
        earlier_slots, earlier_positions = rest.slots(num_earlier), rest.take(num_earlier).tolist()
        slots, tokens, positions = rest.slots(num_new), rest.take(num_new).tolist(), rest.take(num_new).tolist()
        if is_chain:
            visible = _chain(num_new)
        else:
            shape = (num_new, num_earlier + num_new)
            bits = rest.take(_num_packed(*shape)).view(np.uint8)
            visible = np.unpackbits(bits, count=shape[0] * shape[1]).astype(np.bool_).reshape(shape)
        return Piece(
            tokens, positions, prefix_slots, slots, visible, num_logits, earlier_slots, earlier_positions,
            num_known=num_known, prefix_positions=places, adapter=self._adapters[adapter] if adapter else None,
        )  # fmt: skip


class _Rest:
    """The part of a message that has not been read yet."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers, self._start = numbers, 0

    def take(self, count: int) -> Numbers:
        start, self._start = self._start, self._start + count
        assert 0 <= start <= self._start <= len(self._numbers)
        return self._numbers[start : self._start]

    def slots(self, count: int) -> Slots:
        return self.take(count).astype(np.int64)


def _chain(length: int) -> npt.NDArray[np.bool_]:
    return np.tri(length, dtype=np.bool_)


def _num_packed(rows: int, columns: int) -> int:
    return -(-rows * columns // 32)


def _packed(visible: npt.NDArray[np.bool_]) -> Numbers:
    bits = np.packbits(visible)
    words = np.zeros(4 * _num_packed(*visible.shape), dtype=np.uint8)
    words[: len(bits)] = bits
    return words.view(np.int32)
