"""Additions of adapters (LoRA) to linear layers: products of low rank, for the rows of a pass that have an adapter."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from specinfer.ops.cpu.library import call
from specinfer.ops.cpu.panels import TYPES
from specinfer.ops.scales import WIDTH

LANES = 16  # as in types.h
_RANKS = 4  # ranks are padded to a multiple of it; as in low_rank.h


class _LowRank(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("down", "up", "blocks")),
        *((name, ctypes.c_int64) for name in ("rank", "type")),
    )


class _Runs(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("first", "rows", "adapters", "scratch")),
    )


def packs(tensor: Tensor) -> bool:
    """Return whether native code adds to what this tensor is computed with."""
    return tensor.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrices of one adapter for one linear layer, which adds `up @ (down @ x)`.

    With native kernels, `up` has only the ranks that each block of 16 outputs needs: layers that are computed
    together have their own ranks each.
    """

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank], or [ranks of all blocks, LANES]
    blocks: Tensor | None = None  # [blocks, 3] int32 first rank, number of ranks, and the place of the first in `up`

    @classmethod
    def from_matrices(cls, down: Tensor, up: Tensor) -> "LowRank":
        """Return the addition of `up` [outputs, rank] times `down` [rank, inputs], both float32 or bfloat16."""
        if not packs(down):
            return cls(down, up)
        padding = -len(down) % _RANKS
        down = functional.pad(down, (0, 0, 0, padding)).contiguous()
        parts = functional.pad(up, (0, padding, 0, -len(up) % WIDTH)).view(-1, LANES, len(down)).transpose(1, 2)
        used, ranks = (parts != 0).any(dim=2), torch.arange(len(down))
        ends = torch.where(used, ranks + 1, 0).amax(dim=1)
        firsts = torch.where(used, ranks, len(down)).amin(dim=1).minimum(ends)
        is_needed = (ranks >= firsts[:, None]) & (ranks < ends[:, None])
        counts = ends - firsts
        blocks = torch.stack([firsts, counts, counts.cumsum(0) - counts], dim=1)
        return cls(down, parts[is_needed].contiguous(), blocks.int().contiguous())

    @property
    def num_bytes(self) -> int:
        tensors = (self.down, self.up, self.blocks)
        return sum(int(tensor.nbytes) for tensor in tensors if tensor is not None)


class AdapterTable:
    """The matrices of one adapter for all linear layers of a model, by their numbers; None where it adds nothing.

    Attributes:
        number: Number from 1 of the adapter among those that ranks share, or 0.
    """

    def __init__(self, layers: Sequence[LowRank | None]) -> None:
        self.layers, self.number = tuple(layers), 0
        self.max_rank = max((len(layer.down) for layer in layers if layer is not None), default=0)
        self.num_bytes = sum(layer.num_bytes for layer in layers if layer is not None)
        self._structures = (_LowRank * len(layers))()
        for structure, layer in zip(self._structures, layers, strict=True):
            if layer is not None and layer.blocks is not None:
                addresses = (layer.down.data_ptr(), layer.up.data_ptr(), layer.blocks.data_ptr())
                structure.down, structure.up, structure.blocks = addresses
                structure.rank, structure.type = len(layer.down), TYPES[layer.down.dtype]
        self.address = ctypes.addressof(self._structures)


class AdapterRuns:
    """The rows of a pass that have adapters, as runs of neighbouring rows with the same one."""

    def __init__(self, runs: Sequence[tuple[int, int, AdapterTable]]) -> None:
        """Make the runs of a pass from the first row, the number of rows and the adapter of each."""
        self._runs = runs
        firsts, rows, tables = zip(*runs, strict=True)
        numbers = np.asarray([firsts, rows, [table.address for table in tables]], dtype=np.int64)
        scratch = torch.empty(sum(count * table.max_rank for _, count, table in runs), device="cpu")
        self._alive = (numbers, scratch)
        addresses = (part.ctypes.data for part in numbers)
        self._structure = _Runs(len(runs), *addresses, scratch.data_ptr())
        self.address = ctypes.addressof(self._structure)

    @classmethod
    def from_requests(cls, counts: Sequence[int], tables: Sequence[AdapterTable | None]) -> "AdapterRuns | None":
        """Return the runs of requests with `counts` rows each, or None if none of them has an adapter."""
        starts = accumulate(counts, initial=0)
        groups = [
            list(group) for _, group in groupby(zip(starts, counts, tables, strict=False), lambda run: id(run[2]))
        ]
        runs = [(group[0][0], sum(count for _, count, _ in group), group[0][2]) for group in groups]
        adapted = [(first, rows, table) for first, rows, table in runs if table is not None]
        return cls(adapted) if adapted else None

    def add(self, number: int, x: Tensor, y: Tensor) -> None:
        """Add to `y` [rows, outputs] what the adapters add to the linear layer of this number with inputs `x`.

        With native kernels, a row's result does not depend on the other rows.
        """
        if packs(y):
            target = y if y.dtype == torch.float32 and y.is_contiguous() else y.float().contiguous()
            sizes, addresses = (number, x.shape[1], y.shape[1]), (target.data_ptr(), self.address)
            inputs = x.float().contiguous()
            call("specinfer_add_low_rank", *sizes, inputs.data_ptr(), *addresses, len(x))
            if target is not y:
                y.copy_(target)
            return
        for first, rows, table in self._runs:
            if (one := table.layers[number]) is not None:
                part = slice(first, first + rows)
                y[part] += functional.linear(functional.linear(x[part].to(one.down.dtype), one.down), one.up)
