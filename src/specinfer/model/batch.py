"""ForwardBatch: spans and their token trees, packed flat for one forward pass.

Each span consists of its known tokens (a chain), then the guessed nodes of its tree, whose root is the chain's last
token. A node sees the request's whole prefix, the chain, its own ancestors and itself. This is the topology-aware
causal mask of SpecInfer (arXiv 2305.09781, section 4.2). A node's position is the root's position plus its depth,
wherever its slot is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.draws import Ints
from specinfer.core.tree import TokenTree
from specinfer.model.kv_cache import NO_SLOTS, Slots
from specinfer.model.reach import Reach
from specinfer.model.recurrent import scan as scans
from specinfer.model.recurrent.states import RecurrentStates
from specinfer.ops import AdapterRows, AdapterRuns, AdapterTable, FlatPieces, NativePieces
from specinfer.ops.cpu.tree_mask import tree_mask
from specinfer.ops.kv_types import KVScales
from specinfer.ops.tree_layout import TreeLayout

# Spans of at most this many new tokens share one padded attention call.
MAX_GROUPED_TOKENS = 128


class KVStore(Protocol):
    """The part of a cache that a pass needs: tensors to read, and a method that writes.

    Attributes:
        scales: Of each layer.
        taps: [slots + 1, width] hidden states of every token after some of the layers, by the number of layers before.
    """

    keys: list[Tensor]
    values: list[Tensor]
    scales: list[KVScales]
    taps: dict[int, Tensor]
    states: RecurrentStates

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of one request in a pass, and the slots of their keys and values.

    The tokens that it may see are in three ranges: the prefix, which all new tokens see; `earlier` nodes of the same
    tree, from previous passes; and the new tokens. `visible` covers the last two.
    """

    tokens: Sequence[int] | Ints
    positions: Sequence[int] | Ints
    prefix_slots: Slots  # [prefix] slots of the tokens at positions 0, 1, ..., or `prefix_positions`
    slots: Slots  # [new]
    visible: npt.NDArray[np.bool_]  # [new, earlier + new]
    num_logits: int  # logits are computed for the last this many tokens
    earlier_slots: Slots = field(default_factory=lambda: NO_SLOTS)  # [earlier]
    earlier_positions: Sequence[int] = ()
    features: Tensor | None = None  # [new, width] what a head reads of the target, with the tokens
    adapter: AdapterTable | None = None  # what a LoRA adapter adds to linear layers
    num_known: int = 0  # the first this many tokens will be committed: recurrent layers keep the state after them
    prefix_positions: npt.NDArray[np.int64] | None = None  # [prefix] where it leaves out tokens, ascending

    @property
    def num_context(self) -> int:
        return len(self.prefix_slots) + len(self.earlier_slots) + len(self.tokens)

    @classmethod
    def from_span(cls, chain: Sequence[int], tree: TokenTree | None, prefix_slots: Slots, slots: Slots) -> "Piece":
        """Return a piece for a chain of known tokens with a tree on its last one; without a tree it has no logits."""
        start, num_chain = len(prefix_slots), len(chain)
        if tree is None:
            visible = np.tri(num_chain, dtype=np.bool_)
            places = range(start, start + num_chain)
            return cls(chain, places, prefix_slots, slots, visible, 0, num_known=num_chain)
        visible, positions = tree_mask(num_chain, tree, start)
        nodes = tree.arrays.tokens  # from the chain's last token on
        tokens = nodes if num_chain == 1 else np.concatenate([np.array(chain[:-1], dtype=np.int64), nodes])
        return cls(tokens, positions, prefix_slots, slots, visible, len(tree), num_known=num_chain)


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Requests whose attention is computed in one call, padded to the longest of them."""

    rows: Tensor  # [requests, new] index into the packed tokens; padding repeats a row
    kv_slots: Tensor  # [requests, context] slots of prefix and new tokens, then padding
    query_positions: Tensor  # [requests, new]
    key_positions: Tensor  # [requests, context]
    visible: Tensor  # [requests, new, context] bool
    out_rows: Tensor  # [rows] flat index into [requests * new] of each packed token of this group
    packed_rows: Tensor  # [rows] index into the packed tokens, matching out_rows
    is_whole: bool  # rows are all packed tokens in order, so no gather is needed
    _biases: dict[tuple[int | None, int, torch.dtype, Reach | None], Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, repeats: int, dtype: torch.dtype, reach: Reach | None = None) -> Tensor:
        """Return the additive mask [requests, 1, repeats * new, context], made once per pass and shared by layers."""
        key = (window, repeats, dtype, reach)
        if key not in self._biases:
            visible = self.visible
            if reach is not None:
                visible = visible & reach.visible(self.query_positions, self.key_positions)
            if window is not None:
                distance = self.query_positions.unsqueeze(2) - self.key_positions.unsqueeze(1)
                visible = visible & (distance < window)
            bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            bias.masked_fill_(~visible, torch.finfo(dtype).min)
            self._biases[key] = bias.repeat(1, repeats, 1).unsqueeze(1)
        return self._biases[key]


@dataclass(frozen=True)
class ForwardBatch:
    """The inputs of one forward pass. Inputs that only some kinds of attention read are computed on first use."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64, where keys and values are written
    logit_rows: Tensor  # [rows] int64, tokens whose logits are computed
    pieces: tuple[Piece, ...]  # empty if there is a layout
    store: KVStore
    allows_native: bool = True
    in_double: bool = False  # compute PyTorch's attention in float64
    layout: TreeLayout | None = None  # for passes of fixed shapes; padding tokens have slot -1
    windows: dict[int, int | None] = field(default_factory=dict)  # by layer with attention; None is full attention
    hidden: Tensor | None = None  # [1, tokens, width] input of the first layer here, unless it is the model's first
    features: Tensor | None = None  # [tokens, width] see `Piece`; may be overwritten
    _paths: dict[int, Tensor] = field(default_factory=dict)
    adapters: AdapterRuns | None = None  # rows with adapters, or None if there are none
    adapter_rows: AdapterRows | None = None  # the same of passes of fixed size
    padded_scan: scans.PaddedScan | None = None  # for passes of fixed shapes, of models with layers without attention

    @cached_property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """Groups of requests that share padded calls of PyTorch's attention."""
        pieces = self.pieces
        starts = np.cumsum([0, *(len(piece.tokens) for piece in pieces)])
        small = [i for i, piece in enumerate(pieces) if len(piece.tokens) <= MAX_GROUPED_TOKENS]
        large = [i for i, piece in enumerate(pieces) if len(piece.tokens) > MAX_GROUPED_TOKENS]
        groups = ([small] if small else []) + [[i] for i in large]
        device = self.slots.device
        return tuple(_group([pieces[i] for i in group], starts[group], len(pieces), device) for group in groups)

    def paths(self, count: int) -> Tensor:
        """Return [tokens, count] slots of the last tokens on each token's path, itself last; -1 before the first."""
        if self.padded_scan is not None:
            return self.padded_scan.paths(count)[: len(self.token_ids)]  # there are no other tokens to compute
        if count not in self._paths:
            parts = [(piece, scans.parents_of(piece)) for piece in self.pieces]
            paths = [
                scans.path_slots(piece, parents, len(parents) - len(piece.slots), count) for piece, parents in parts
            ]
            self._paths[count] = torch.from_numpy(np.concatenate(paths)).to(self.slots.device)
        return self._paths[count]

    @cached_property
    def scan(self) -> "scans.Scan | scans.PaddedScan":
        """The order in which recurrent layers compute the tokens."""
        if self.padded_scan is not None:
            return self.padded_scan
        return scans.Scan(self.pieces, self.store.states, self.slots.device)

    @cached_property
    def native(self) -> NativePieces | None:
        """The pieces in the form that native attention reads, or None where native attention cannot be used."""
        if not self.allows_native or self.slots.device.type != "cpu":
            return None
        pieces = self.pieces
        flat = FlatPieces(
            num_new=np.asarray([len(piece.tokens) for piece in pieces], dtype=np.int64),
            num_prefix=np.asarray([len(piece.prefix_slots) for piece in pieces], dtype=np.int64),
            num_rest=np.asarray([piece.visible.shape[1] for piece in pieces], dtype=np.int64),
            slots=np.concatenate([s for p in pieces for s in (p.prefix_slots, p.earlier_slots, p.slots)]),
            key_positions=np.concatenate([_key_positions(piece) for piece in pieces]),
            visible=np.concatenate([piece.visible.ravel() for piece in pieces]),
            positions=self.positions,
            new_slots=self.slots,
        )
        return NativePieces(flat)


def _key_positions(piece: Piece) -> npt.NDArray[np.int64]:
    prefix = np.arange(len(piece.prefix_slots)) if piece.prefix_positions is None else piece.prefix_positions
    parts = [np.asarray(part, dtype=np.int64) for part in (prefix, piece.earlier_positions, piece.positions)]
    return np.concatenate(parts)


def pack(
    pieces: Sequence[Piece], store: KVStore, device: torch.device, *, native: bool = True, in_double: bool = False
) -> ForwardBatch:
    """Pack pieces one after the other; logits come back in the same order."""
    ends = accumulate(len(piece.tokens) for piece in pieces)
    logit_rows = [np.arange(end - piece.num_logits, end) for piece, end in zip(pieces, ends, strict=True)]
    features = [piece.features for piece in pieces if piece.features is not None]

    def tensor(values: Sequence[Sequence[int] | npt.NDArray[np.int64]]) -> Tensor:
        parts = [np.asarray(part, dtype=np.int64) for part in values]
        return torch.from_numpy(parts[0].copy() if len(parts) == 1 else np.concatenate(parts)).to(device)

    return ForwardBatch(
        token_ids=tensor([piece.tokens for piece in pieces]),
        positions=tensor([piece.positions for piece in pieces]),
        slots=tensor([piece.slots for piece in pieces]),
        logit_rows=tensor(logit_rows),
        pieces=tuple(pieces),
        store=store,
        allows_native=native,
        in_double=in_double,
        features=torch.cat(features) if features else None,
        adapters=runs_of(pieces),
    )


def runs_of(pieces: Sequence[Piece]) -> AdapterRuns | None:
    """Return the rows of packed pieces that have adapters, or None if there are none."""
    if all(piece.adapter is None for piece in pieces):
        return None
    return AdapterRuns.from_requests([len(piece.tokens) for piece in pieces], [piece.adapter for piece in pieces])


def _group(
    pieces: Sequence[Piece], starts: npt.NDArray[np.int64], num_pieces: int, device: torch.device
) -> AttentionGroup:
    num_new = max(len(piece.tokens) for piece in pieces)
    num_context = max(piece.num_context for piece in pieces)
    shape = (len(pieces), num_new)
    rows, query_positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    kv_slots, key_positions = (np.zeros((len(pieces), num_context), np.int64) for _ in range(2))
    visible = np.zeros((len(pieces), num_new, num_context), np.bool_)
    visible[:, :, 0] = True  # padding sees one key, so that its softmax is finite
    out_rows, packed_rows = [], []
    for i, (piece, start) in enumerate(zip(pieces, starts, strict=True)):
        new, prefix = len(piece.tokens), len(piece.prefix_slots)
        rows[i, :] = start
        kv_slots[i, :] = piece.slots[0]  # padding reads its own request, because NaN in another one would spread
        rows[i, :new] = np.arange(start, start + new)
        out_rows.append(i * num_new + np.arange(new))
        packed_rows.append(rows[i, :new])
        query_positions[i, :new] = piece.positions
        end = piece.num_context
        kv_slots[i, :end] = np.concatenate([piece.prefix_slots, piece.earlier_slots, piece.slots])
        key_positions[i, :end] = _key_positions(piece)
        visible[i, :new, :prefix] = True
        visible[i, :new, prefix:end] = piece.visible

    def tensor(array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return AttentionGroup(
        rows=tensor(rows),
        kv_slots=tensor(kv_slots),
        query_positions=tensor(query_positions),
        key_positions=tensor(key_positions),
        visible=tensor(visible),
        out_rows=tensor(np.concatenate(out_rows)),
        packed_rows=tensor(np.concatenate(packed_rows)),
        is_whole=len(pieces) == num_pieces == 1,
    )
