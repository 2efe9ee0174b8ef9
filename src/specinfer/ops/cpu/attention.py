"""Attention over a cache of slots on the native kernels, with rotation and norms of queries and keys before it."""

import ctypes
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.ops.cpu.library import call
from specinfer.ops.cpu.recurrence import NativeScan
from specinfer.ops.kv_types import KV_TYPES, NO_SCALES, KVScales

MAX_DIM = 512  # of a head
_Integers = npt.NDArray[np.int64]


class _Pieces(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("first_row", "num_new", "num_prefix", "num_rest")),
        *((name, ctypes.c_void_p) for name in ("first_slot", "first_visible")),
        *((name, ctypes.c_void_p) for name in ("slots", "key_positions", "visible")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("positions", "new_slots", "scan", "paths", "layer_inputs")),
        ("layer_stride", ctypes.c_int64),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "query_norm", "key_norm", "value_norm")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "rotated", "window")),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_float) for name in ("key_inverse", "value_inverse", "value_scale")),
        *((name, ctypes.c_int32) for name in ("type", "is_gated", "joins_heads", "rotates_pairs", "num_stored")),
    )


@dataclass(frozen=True, slots=True)
class FlatPieces:
    """The slots and masks of a pass as flat arrays, piece by piece.

    A token sees its piece's prefix, and in the rest (earlier nodes, then new tokens) what `visible` selects.
    """

    num_new: _Integers  # [pieces]
    num_prefix: _Integers  # [pieces]
    num_rest: _Integers  # [pieces]
    slots: _Integers  # [of each piece: prefix, rest]
    key_positions: _Integers  # as slots
    visible: npt.NDArray[np.bool_]  # [of each piece: new * rest]
    positions: Tensor  # [tokens] int64
    new_slots: Tensor  # [tokens] int64


class NativePieces:
    """`FlatPieces` in the form that the library reads, made once per pass."""

    def __init__(self, pieces: FlatPieces) -> None:
        count = len(pieces.num_new)
        starts = np.zeros((3, count), dtype=np.int64)
        if count > 1:
            np.cumsum(pieces.num_new[:-1], out=starts[0, 1:])
            np.cumsum((pieces.num_prefix + pieces.num_rest)[:-1], out=starts[1, 1:])
            np.cumsum((pieces.num_new * pieces.num_rest)[:-1], out=starts[2, 1:])
        self._alive = (pieces, starts)  # keeps the arrays alive as long as their addresses
        counts = (starts[0], pieces.num_new, pieces.num_prefix, pieces.num_rest, starts[1], starts[2])
        flat = (pieces.slots, pieces.key_positions, pieces.visible)
        addresses = [array.ctypes.data for array in (*counts, *flat)]
        tensors = (pieces.positions.data_ptr(), pieces.new_slots.data_ptr())
        self._structure = _Pieces(count, *addresses, len(pieces.positions), *tensors)
        self.num_tokens = len(pieces.positions)
        self.address = ctypes.addressof(self._structure)
        self.num_scanned = 0  # tokens of the scan

    def follow(self, scan: NativeScan, paths: Tensor) -> None:
        """Let recurrences follow a scan. paths: [scanned, taps] as `ConvolutionCall` reads them."""
        self._scan, self.num_scanned = (scan, paths), scan.num_tokens
        self._structure.scan, self._structure.paths = scan.address, paths.data_ptr()

    def give(self, inputs: Tensor) -> None:
        """Let layers read inputs in addition to hidden states: contiguous float32 [tokens, of all layers]."""
        assert inputs.is_contiguous()
        self._inputs = inputs
        self._structure.layer_inputs, self._structure.layer_stride = inputs.data_ptr(), inputs.shape[1]


class AttentionCall:
    """One layer's attention on one cache, ready to be called. Copies of a model share this object.

    Args:
        keys, values: [slots, kv_heads, dim] of float32, bfloat16, float16, or e4m3 or e5m2.
        window: A token sees keys less than this many positions back.
        query_norm, key_norm: [dim] float32 weights of norms before rotation, or [heads * dim] of one over all heads.
        value_norm: [dim] float32 weights of a norm of values.
        num_stored: Number of things that come after the queries and are stored. 2: keys and values; 1: keys, which
            before their norm are values, too; 0: nothing, because another layer has stored them.
        rotated: Number of a head's values, from the first, that are rotated.
        is_gated: Whether each head's queries come with gates of its results, for `LayerCall`.
        rotates_pairs: Whether neighbouring values are rotated together, not those `rotated / 2` apart.
        kv_scales: What keys and values of 8 bits are stored as multiples of.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        num_heads: int,
        scale: float,
        *,
        window: int | None = None,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        value_norm: Tensor | None = None,
        num_stored: int = 2,
        eps: float = 0.0,
        rotated: int = 0,
        is_gated: bool = False,
        rotates_pairs: bool = False,
        kv_scales: KVScales = NO_SCALES,
    ) -> None:
        _, kv_heads, dim = keys.shape
        assert keys.shape == values.shape
        assert dim <= MAX_DIM
        assert num_heads % kv_heads == 0
        assert all(pool.is_contiguous() for pool in (keys, values))
        assert num_stored == 2 or not is_gated
        self._alive = (keys, values, query_norm, key_norm, value_norm)
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in self._alive)
        sizes = (num_heads, kv_heads, dim, rotated, window or 0)
        scales = (*kv_scales.inverses, kv_scales.value)
        scale *= kv_scales.key
        joins_heads = query_norm is not None and len(query_norm) != dim
        flags = (is_gated, joins_heads, rotates_pairs, num_stored)
        self._structure = _Attention(*addresses, *sizes, scale, eps, *scales, KV_TYPES[keys.dtype].native, *flags)
        self.address = ctypes.addressof(self._structure)
        self._num_heads, self._dim = num_heads, dim

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def rotate(self, pieces: NativePieces, cosines: Tensor, sines: Tensor, qkv: Tensor) -> None:
        """Norm and rotate queries and keys in place, and store keys and values in the cache.

        Args:
            cosines, sines: [positions, rotated] float32.
            qkv: [tokens, (heads + num_stored * kv_heads) * dim] float32.
        """
        addresses = (self.address, pieces.address, cosines.data_ptr(), sines.data_ptr(), qkv.data_ptr())
        call("specinfer_rotate", *addresses, qkv.stride(0))

    def attend(self, pieces: NativePieces, queries: Tensor) -> Tensor:
        """Return [tokens, heads * dim] for float32 `queries` [tokens, at least heads * dim]; the rest is ignored."""
        result = torch.empty((pieces.num_tokens, self._num_heads * self._dim))
        addresses = (self.address, pieces.address, queries.data_ptr())
        call("specinfer_attend", *addresses, queries.stride(0), result.data_ptr())
        return result


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root mean square norm of contiguous `x` [rows, size], times `weight` [size]; all float32."""
    result = torch.empty_like(x)
    call("specinfer_norm", x.data_ptr(), weight.data_ptr(), result.data_ptr(), *x.shape, eps)
    return result


def attends(keys: Tensor, values: Tensor) -> bool:
    """Return whether native attention supports this cache."""
    alike = keys.dtype == values.dtype and keys.shape == values.shape
    return alike and keys.dtype in KV_TYPES and keys.shape[2] <= MAX_DIM
