"""Short convolutions and recurrences over token trees on the native kernels: see recurrence.h."""

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.ops.cpu.library import call
from specinfer.ops.cpu.panels import TYPES
from specinfer.ops.scan_order import ScanOrder

# What has a decay of its own: a head's state, each of its rows (keys), or each number in it.
Decays = Literal["head", "key", "column"]
DECAYS: dict[Decays, int] = {"head": 0, "key": 1, "column": 2}
_Integers = npt.NDArray[np.int64]


class ConvolutionFields(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("inputs", "weight", "bias")),
        *((name, ctypes.c_int64) for name in ("channels", "taps")),
        *((name, ctypes.c_int32) for name in ("type", "activates")),
    )


class RecurrenceFields(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("stored", "pool", "bias", "decay", "skip")),
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("channels", "query", "key", "value")),
        *((name, ctypes.c_float) for name in ("least", "most")),
        *((name, ctypes.c_int32) for name in ("type", "is_delta", "decays")),
    )


class _Scan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "places", "count")),
        *((name, ctypes.c_void_p) for name in ("slots", "from", "to", "rows", "results")),
        *((name, ctypes.c_void_p) for name in ("first_places", "first_rows")),
    )


class NativeScan:
    """The tokens of a pass in the order of a recurrence; made once per pass, from the arguments of a `ScanOrder`.

    A token reads the state in one place and writes it to another: to the place that a later token continues from, or to
    a place of its request that the next token continues from.
    """

    def __init__(
        self,
        slots: _Integers,
        parents: Sequence[_Integers],
        first_rows: Sequence[int],
        rows: _Integers,
        results: _Integers,
        num_results: int,
    ) -> None:
        arrays, num_places = ScanOrder.arrays_of(slots, parents, first_rows, rows, results)
        count = len(parents)
        of_request = num_places + np.arange(count)
        lengths = arrays["ends"] - arrays["starts"]
        written = np.where(arrays["places"] < 0, np.repeat(of_request, lengths), arrays["places"])
        first_places = np.where(arrays["first_places"] < 0, of_request, arrays["first_places"])
        before = np.roll(written, 1)
        before[arrays["starts"]] = first_places
        read = np.where(arrays["origins"] < 0, before, arrays["origins"])
        of_tokens = [arrays["slots"], read, written, arrays["rows"], arrays["results"]]
        self._alive = kept = [np.ascontiguousarray(one) for one in (*of_tokens, first_places, arrays["first_rows"])]
        self._structure = _Scan(len(slots), num_places + count, count, *(one.ctypes.data for one in kept))
        self.address = ctypes.addressof(self._structure)
        self.num_tokens, self.num_results = len(slots), num_results


class ConvolutionCall:
    """The convolution of one layer on inputs that are stored by slot.

    Args:
        weight: [channels, 1, taps] filters.
        bias: [channels], or None.
        activates: Whether SiLU follows.

    Attributes:
        weight: [taps, channels] float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, activates: bool) -> None:
        self.weight, self.activates = weight.detach().squeeze(1).float().T.contiguous(), activates
        self.bias = None if bias is None else bias.detach().float().contiguous()

    @property
    def num_taps(self) -> int:
        return len(self.weight)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def fields(self, inputs: Tensor) -> ConvolutionFields:
        """Return what native code reads of it, as long as this object and `inputs` [slots, 1, channels] live."""
        taps, channels = self.weight.shape
        bias = None if self.bias is None else self.bias.data_ptr()
        addresses = (inputs.data_ptr(), self.weight.data_ptr(), bias)
        return ConvolutionFields(*addresses, channels, taps, TYPES[inputs.dtype], self.activates)

    def __call__(self, inputs: Tensor, paths: Tensor) -> Tensor:
        """Return [tokens, channels] float32 results, rounded to the type of the inputs.

        Args:
            inputs: [slots, 1, channels] of float32, bfloat16 or float16.
            paths: [tokens, taps] slots of the last tokens on each token's path, itself last; -1 before the first.
        """
        taps, channels = self.weight.shape
        assert (inputs.shape[1:], paths.shape[1]) == ((1, channels), taps)
        assert inputs.is_contiguous()
        assert paths.is_contiguous()
        layer, result = self.fields(inputs), torch.empty(len(paths), channels)
        call("specinfer_convolve", ctypes.addressof(layer), paths.data_ptr(), result.data_ptr(), len(paths))
        return result


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Sizes of a recurrence, and the columns where queries, keys and values of a token begin.

    Attributes:
        num_key_heads: Number of heads of queries and keys; each serves as many neighbouring heads.
        num_channels: Number of columns.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    num_channels: int
    query: int
    key: int
    value: int


class RecurrenceCall:
    """The recurrence of one layer.

    Args:
        bias: [heads] what is added to steps; [heads, key_dim] if each key has its own. Of "column" decays not read.
        decay: [heads] what steps are multiplied by, to be the logarithm of what is kept of a state; of "column" decays
            [key_dim, value_dim].
        skip: [heads] share of the values in the results, or None for none.
        limits: Least and greatest step of a recurrence that is no delta rule; of a delta rule, the second is the
            greatest beta. If the first is negative, a delta rule keeps its power, times the sigmoid of minus a step
            times its decay.
        is_delta: Whether a value is the change of what the state returns for its key.
    """

    def __init__(
        self,
        sizes: HeadSizes,
        bias: Tensor | None,
        decay: Tensor,
        skip: Tensor | None = None,
        limits: tuple[float, float] = (0.0, float("inf")),
        *,
        is_delta: bool = False,
        decays: Decays = "head",
    ) -> None:
        self.sizes, self.limits, self.is_delta, self.decays = sizes, limits, is_delta, decays
        self.bias, self.decay, self.skip = _numbers(bias), decay.detach().float().contiguous(), _numbers(skip)
        self._num_steps = sizes.num_heads * (sizes.key_dim if decays == "key" else 1)
        if decays == "column":
            assert not is_delta
            assert decay.shape == (sizes.key_dim, sizes.value_dim)
        else:
            assert bias is not None
            assert (bias.numel(), decay.numel()) == (self._num_steps, sizes.num_heads)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def num_stored(self) -> int:
        """Numbers that are stored of each token, but of "column" decays."""
        return self._num_steps + self.sizes.num_heads * self.is_delta

    @property
    def scratch_floats(self) -> int:
        """Floats for the channels and the rates of each token."""
        return self.sizes.num_channels + self.sizes.num_heads + self._num_steps

    def fields(self, stored: Tensor, pool: Tensor | None) -> RecurrenceFields:
        """Return what native code reads of it, as long as this object and the arguments live; see `__call__`."""
        sizes = self.sizes
        assert stored.is_contiguous()
        assert pool is None or pool.is_contiguous()
        assert pool is None or pool.shape[1:] == (sizes.num_heads, sizes.key_dim, sizes.value_dim)
        tensors = (stored, pool, self.bias, self.decay, self.skip)
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        kind = (TYPES[stored.dtype], self.is_delta, DECAYS[self.decays])
        return RecurrenceFields(*addresses, *astuple(sizes), *self.limits, *kind)

    def __call__(self, scan: NativeScan, mixed: Tensor, stored: Tensor, pool: Tensor | None) -> Tensor:
        """Return [results, heads, value_dim] float32, and write the states that are kept.

        Args:
            mixed: [tokens, channels] float32 queries, keys and values, which may be overwritten.
            stored: [slots, 1, width] steps before activation, of each head or each of its keys; of a delta rule, the
                betas of all heads come before them. Of "column" decays [tokens, 1, value_dim] float32 steps.
            pool: [rows, heads, key_dim, value_dim] float32 kept states, or None for none.
        """
        sizes, heads = self.sizes, self.sizes.num_heads
        assert mixed.is_contiguous()
        assert mixed.shape == (scan.num_tokens, sizes.num_channels)
        if self.decays == "column":
            assert (stored.shape, stored.dtype) == ((scan.num_tokens, 1, sizes.value_dim), torch.float32)
            rates = stored
        else:
            assert stored.shape[1:] == (1, self.num_stored)
            rates = torch.empty(scan.num_tokens, heads + self._num_steps)
        layer = self.fields(stored, pool)
        result = torch.empty(scan.num_results, heads, sizes.value_dim)
        places = (mixed.data_ptr(), rates.data_ptr(), result.data_ptr())
        call("specinfer_recur", ctypes.addressof(layer), scan.address, *places)
        return result


def _numbers(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.detach().float().contiguous()
