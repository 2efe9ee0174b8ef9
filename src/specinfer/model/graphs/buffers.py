"""Buffers: the inputs of passes of one size, at fixed addresses, filled anew for each pass."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.model.batch import ForwardBatch, KVStore, Piece
from specinfer.model.graphs.sizes import Size
from specinfer.model.graphs.slot_table import Change, SlotTable
from specinfer.model.recurrent.scan import PaddedScan, Scan
from specinfer.ops import AdapterRows, AdapterSlots
from specinfer.ops.scan_order import ScanOrder
from specinfer.ops.tree_layout import WORD, TreeLayout, num_words

_ALIGNMENT = 16  # bytes
_UPDATES = 16  # slot table cells that a pass may change per request without separate copies
_SCAN = "scan_"  # before the names of the tensors of a `ScanOrder`
_OF_REQUESTS = ("starts", "ends", "first_rows", "first_places")  # -1 for those that are not there, without tokens
_OF_SCANNED = ("slots", "origins", "places", "rows", "results")
_TYPES: dict[type[np.generic], torch.dtype] = {np.int64: torch.int64, np.int32: torch.int32}


class InputBlock:
    """Bytes that are written on the host and sent to the device in one copy, which nobody waits for.

    Attributes:
        host, on_device: [num_bytes] uint8, the first pinned for a GPU.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self.on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None

    def wait(self) -> None:
        """Wait until the last copy has read the host's bytes, so that they may be written again."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, num_bytes: int) -> None:
        """Send the first bytes, in order with the other work of the device."""
        self.on_device[:num_bytes].copy_(self.host[:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Buffers:
    """Static inputs of one size, filled on the host and sent to the device in one copy.

    Padding rows have slot -1 and belong to no request. Values beyond a length are never read.

    Args:
        size: Size that passes are padded to.
        table: Slots of the prefixes, shared by all sizes.
        taps: Most taps of a convolution, or 0 if the model has none.
        num_updates: Slot table cells that a pass changes without separate copies, or None for some of each request.
        make_block: Function that returns memory of at least so many bytes, which other buffers may have used before;
            they are not used any more. None for memory of their own.
    """

    def __init__(
        self,
        size: Size,
        table: SlotTable,
        device: torch.device,
        taps: int = 0,
        *,
        num_updates: int | None = None,
        make_block: Callable[[int], InputBlock] | None = None,
    ) -> None:
        self.size, self._table, self._taps = size, table, taps
        tokens, requests, nodes = size.tokens, size.requests, size.nodes
        words = num_words(1 if size.is_chain else nodes)
        num_updates = _UPDATES * requests if num_updates is None else num_updates
        shapes: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "token_ids": (np.int64, (tokens,)),
            "positions": (np.int64, (tokens,)),
            "slots": (np.int64, (tokens,)),
            "logit_rows": (np.int64, (size.rows,)),
            "update_cells": (np.int64, (num_updates,)),
            "update_slots": (np.int32, (num_updates,)),
            "prefix_lens": (np.int32, (requests,)),
            "starts": (np.int32, (requests + 1,)),
            "node_slots": (np.int32, (requests, nodes)),
            "node_positions": (np.int32, (requests, nodes)),
            "node_lens": (np.int32, (requests,)),
            "visible": (np.int32, (tokens, words)),
            "query_positions": (np.int32, (tokens,)),
            "lora_indices": (np.int32, (tokens,)),
        }
        if taps:
            scanned = dict.fromkeys(_OF_SCANNED, (np.int64, (size.scanned,)))
            firsts = dict.fromkeys(_OF_REQUESTS, (np.int64, (requests,)))
            shapes |= {f"{_SCAN}{name}": shape for name, shape in (scanned | firsts).items()}
            shapes[f"{_SCAN}new"] = (np.int64, (tokens,))
            shapes[f"{_SCAN}paths"] = (np.int64, (size.scanned, taps))
        parts, end = {}, 0
        for name, (kind, shape) in shapes.items():
            num_bytes = np.dtype(kind).itemsize * int(np.prod(shape))
            parts[name] = slice(end, end + num_bytes)
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end
        self._block = (make_block or partial(InputBlock, device=device))(end)
        self._host: dict[str, npt.NDArray[np.integer]] = {}
        self._on_device: dict[str, Tensor] = {}
        for name, (kind, shape) in shapes.items():
            self._host[name] = self._block.host[parts[name]].numpy().view(kind).reshape(shape)
            self._on_device[name] = self._block.on_device[parts[name]].view(_TYPES[kind]).view(shape)
        self._block.wait()
        self._clear()
        self._idle = self._block.host[:end].numpy().copy()
        if make_block is None:  # else they are filled at once
            self._send()
        names = ("prefix_lens", "starts", "node_slots", "node_positions", "node_lens", "visible")
        tensors: dict[str, Any] = {name: self._on_device[name] for name in names}
        self.layout = TreeLayout(
            slot_table=table.rows[:requests], positions=self._on_device["query_positions"],
            max_new=size.new, is_chain=size.is_chain, **tensors,
        )  # fmt: skip

    def batch(self, store: KVStore, adapters: AdapterSlots | None = None) -> ForwardBatch:
        """Return a batch that reads the buffers whenever it is run; `adapters` are those that rows may have."""
        tensors: dict[str, Any] = {
            name: self._on_device[name] for name in ("token_ids", "positions", "slots", "logit_rows")
        }
        rows = (
            AdapterRows(adapters, self._on_device["lora_indices"])
            if self.size.adapts and adapters is not None
            else None
        )
        scan = self._scan() if self._taps else None
        return ForwardBatch(
            **tensors, pieces=(), store=store, allows_native=False, layout=self.layout, adapter_rows=rows,
            padded_scan=scan,
        )  # fmt: skip

    def _scan(self) -> PaddedScan:
        scanned = {
            name.removeprefix(_SCAN): tensor for name, tensor in self._on_device.items() if name.startswith(_SCAN)
        }
        paths, new = scanned.pop("paths"), scanned.pop("new")
        num_places = 0 if self.size.is_chain else self.size.scanned
        return PaddedScan(ScanOrder(self.size.tokens, num_places, **scanned), paths, new)

    def update_table(self) -> None:
        """Write the changes of prefixes to the slot table; part of every pass."""
        self._table.cells.index_copy_(0, self._on_device["update_cells"], self._on_device["update_slots"])

    def fill(
        self,
        pieces: Sequence[Piece],
        lora_indices: Sequence[int] = (),
        scan: Scan | None = None,
        changes: Iterable[Change] | None = None,
    ) -> None:
        """Fill the buffers with these pieces, one after the other; `lora_indices` are the slots of their adapters.

        Args:
            changes: Those of the slot table, or None to find them here.
        """
        self._make_idle()
        host = self._host
        start = num_rows = 0
        for i, piece in enumerate(pieces):
            end, earlier, nodes = start + len(piece.tokens), len(piece.earlier_slots), piece.visible.shape[1]
            host["token_ids"][start:end] = piece.tokens
            host["positions"][start:end] = piece.positions
            host["slots"][start:end] = piece.slots
            host["logit_rows"][num_rows : num_rows + piece.num_logits] = range(end - piece.num_logits, end)
            host["prefix_lens"][i], host["node_lens"][i], host["starts"][i + 1] = len(piece.prefix_slots), nodes, end
            host["node_slots"][i, :earlier], host["node_slots"][i, earlier:nodes] = piece.earlier_slots, piece.slots
            host["lora_indices"][start:end] = lora_indices[i] if lora_indices else 0
            host["node_positions"][i, :earlier] = piece.earlier_positions
            host["node_positions"][i, earlier:nodes] = piece.positions
            if not self.size.is_chain:
                bits = np.packbits(piece.visible, axis=1, bitorder="little")
                host["visible"].view(np.uint8)[start:end, : bits.shape[1]] = bits
            start, num_rows = end, num_rows + piece.num_logits
        host["starts"][len(pieces) + 1 :] = start
        host["query_positions"][:] = host["positions"]
        if scan is not None:
            for name, values in scan.host_arrays(self._taps).items():
                host[f"{_SCAN}{name}"][: len(values)] = values
        changes = self._table.changes([piece.prefix_slots for piece in pieces]) if changes is None else changes
        self._table.list_changes(changes, host["update_cells"], host["update_slots"])
        self._send()

    def empty(self) -> None:
        """Fill the buffers with padding alone: a pass then changes neither the slot table nor any key or value."""
        self._make_idle()
        self._send()

    def _make_idle(self) -> None:
        self._block.wait()  # the copy of the previous pass reads the same memory
        self._block.host[: self.num_bytes].numpy()[:] = self._idle

    def _send(self) -> None:
        self._block.send(self.num_bytes)

    def _clear(self) -> None:
        """Fill the host buffers with padding."""
        for array in self._host.values():
            array.fill(0)
        self._host["slots"].fill(-1)
        for name in (*_OF_REQUESTS, *_OF_SCANNED, "paths") if self._taps else ():
            self._host[f"{_SCAN}{name}"].fill(0 if name == "slots" else -1)
        self._host["update_cells"].fill(self._table.no_cell)


assert WORD == 32  # bits are packed here by bytes, lowest first, and read as words
