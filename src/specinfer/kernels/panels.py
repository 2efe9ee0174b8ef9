"""Linear layers on the native kernels: weights in panels, and the call. Activations are float32."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.kernels.float8 import LEVELS
from specinfer.kernels.library import call, describe, library
from specinfer.kernels.quantization import QuantizedWeight
from specinfer.kernels.scales import BF16_SCALES, WIDTH, pack_scales, with_scales

if TYPE_CHECKING:  # adapters are packed in panels
    from specinfer.kernels.low_rank import AdapterRuns

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INT8, INT4, INT8_OF_32, INT6, INT5, LEVELS4, FP8 = range(3, 10)
ANY_ROWS = 2**62
_GROUPS = (1, 2, 2, 64, 32, 32, 16, 32, 32, 128)  # by type: inputs are padded to a multiple of it
_BITS = {INT6: 6, INT5: 5, INT4: 4, LEVELS4: 4}  # of a code; 8 of other types
# The bits and inputs of groups of each type.
_FORMATS = {
    INT8: (8, 64), INT4: (4, 32), INT8_OF_32: (8, 32), INT6: (6, 16), INT5: (5, 32), LEVELS4: (4, 32), FP8: (8, 128),
}  # fmt: skip
_TYPES = {form: kind for kind, form in _FORMATS.items() if kind != LEVELS4}


class Ending(IntEnum):
    """The operation on a linear layer's sums at the end of the call."""

    STORE = 0
    ADD = 1  # to the old contents of the result
    GATED = 2  # silu of each panel's first half times the second half
    GATED_GELU = 3  # the same with GELU's tanh approximation


# The ending of a gated layer, by transformers' name of the activation.
GATES = {"silu": Ending.GATED, "gelu_pytorch_tanh": Ending.GATED_GELU}


class _Linear(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("dots", ctypes.c_int32),
        ("number", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("next", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
        ("scaling", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Panels:
    """A linear layer's weights [outputs, inputs] in the layout that the kernels read."""

    packed: Tensor
    scales: Tensor | None  # [panels, groups, WIDTH] bfloat16 or float32, or [panels, bytes] uint8 as in panels.h
    bias: Tensor | None  # [panels * WIDTH] float32
    inputs: int
    outputs: int
    type: int
    scaling: int = BF16_SCALES
    levels: Tensor | None = None  # [16] uint8, 128 more than what the codes stand for

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> "Panels":
        """Pack `weight` [outputs, inputs], whose type is one of `TYPES`."""
        return cls._pack(TYPES[weight.dtype], weight, None, bias, weight.shape[1])

    @classmethod
    def of_codes(cls, weight: QuantizedWeight, bias: Tensor | None = None) -> "Panels":
        """Pack codes with their scales."""
        kind, codes, levels = _TYPES[weight.bits, weight.group_size], weight.codes, None
        if weight.levels is not None and not weight.is_float:
            levels = (weight.levels.to(torch.int16) + 128).to(torch.uint8)
            if has_dots(LEVELS4):
                kind = LEVELS4
            else:
                kind, codes, levels = INT8_OF_32, levels.to(codes.device)[codes.long()], None
        scaling, scales = pack_scales(weight)
        return replace(cls._pack(kind, codes, scales, bias, weight.in_features), scaling=scaling, levels=levels)

    @property
    def bytes_per_panel(self) -> int:
        """Bytes of `packed` for `WIDTH` outputs."""
        return _filled(self.inputs, self.type) * WIDTH * self.packed.element_size()

    def place(self, first: int, rows: Tensor) -> None:
        """Pack `rows` [any, inputs] as the outputs from `first` on, in this thread only; not for codes.

        Other outputs in the same panels, and the padding of inputs, keep their contents.
        """
        assert self.scales is None
        assert rows.is_contiguous()
        assert rows.dtype == self.packed.dtype
        depth, apart = _filled(self.inputs, self.type), 2 if self.type == TYPES[torch.bfloat16] else 1
        done, loaded = 0, library()
        assert loaded is not None
        while done < len(rows):
            panel, column = divmod(first + done, WIDTH)
            left = len(rows) - done
            count = min(WIDTH - column, left) if column or left < WIDTH else left // WIDTH * WIDTH
            start = (panel * depth * WIDTH + column * apart) * self.packed.element_size()
            source = rows.data_ptr() + done * self.inputs * rows.element_size()
            loaded.specinfer_move(self.type, self.packed.data_ptr() + start, source, count, self.inputs, depth, True, 1)
            done += count

    @classmethod
    def _pack(cls, kind: int, weight: Tensor, scales: Tensor | None, bias: Tensor | None, inputs: int) -> "Panels":
        outputs, depth = len(weight), _filled(inputs, kind)
        panels = -(-outputs // WIDTH)
        size = panels * WIDTH * depth
        # Weights on the meta device, which are read later, make panels on the meta device.
        place = torch.device("meta" if weight.is_meta else "cpu")
        packed = torch.zeros(size * _BITS.get(kind, 8) // 8, dtype=weight.dtype, device=place)
        if not weight.is_meta:
            _move(kind, packed, weight.contiguous(), depth, packs=True)
        if bias is not None:
            bias = functional.pad(bias.float(), (0, panels * WIDTH - outputs))
        return cls(packed, scales, bias, inputs, outputs, kind)

    def unpack(self) -> Tensor:
        """Return the [outputs, inputs] weights before packing, or the codes [outputs, padded inputs]."""
        depth = _filled(self.inputs, self.type)
        inputs = depth if self.scales is not None else self.inputs
        weight = torch.empty((self.outputs, inputs), dtype=self.packed.dtype, device=self.packed.device)
        if not weight.is_meta:
            _move(self.type, self.packed, weight, depth, packs=False)
        return weight

    def unpack_codes(self) -> QuantizedWeight:
        """Return the codes and scales before packing; levels may have become codes of 8 bits."""
        assert self.scales is not None
        bits, group = _FORMATS[self.type]
        weight = QuantizedWeight(self.unpack(), self.scales, bits, self.inputs, group)
        if self.type == FP8:
            weight = replace(weight, levels=LEVELS)
        elif self.levels is not None:
            weight = replace(weight, levels=(self.levels.to(torch.int16) - 128).to(torch.int8))
        return with_scales(weight, self.scales, self.scaling)

    @staticmethod
    def joined(panels: "Sequence[Panels]") -> "list[Panels]":
        """Return panels with the same outputs in the same order, fewer where neighbours are of one type."""
        result = [panels[0]]
        for one in panels[1:]:
            last = result[-1]
            if last.format != one.format or (last.bias is None) != (one.bias is None) or last.outputs % WIDTH:
                result.append(one)
                continue
            packed = torch.cat([last.packed, one.packed])
            scales, bias = _cat(last.scales, one.scales), _cat(last.bias, one.bias)
            result[-1] = replace(last, packed=packed, scales=scales, bias=bias, outputs=last.outputs + one.outputs)
        return result

    @property
    def format(self) -> tuple[object, ...]:
        """Properties that panels must share to be joined."""
        return self.type, self.scaling, self.inputs, None if self.levels is None else tuple(self.levels.tolist())

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.packed, self.scales, self.bias) if t is not None)


def _cat(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else torch.cat([first, second])


def _filled(inputs: int, kind: int) -> int:
    return -(-inputs // _GROUPS[kind]) * _GROUPS[kind]


def _move(kind: int, packed: Tensor, weight: Tensor, depth: int, *, packs: bool) -> None:
    size = (len(weight), weight.shape[1], depth)
    call("specinfer_move", kind, packed.data_ptr(), weight.data_ptr(), *size, packs)


class LinearCall:
    """A linear layer, ready to be called. Copies of a model share this object.

    Args:
        max_rows: Largest number of rows of a native call. For more, PyTorch multiplies, with weights unpacked each
            time.
        dots: Whether to multiply in the weights' own type, where the CPU has instructions for that.
        widens: Whether to multiply in float32, for float32 weights that are stored in a smaller type without loss.
        following: Call with the same inputs, whose outputs come after these; for weights of several types.
    """

    def __init__(
        self,
        panels: Panels,
        *,
        max_rows: int = ANY_ROWS,
        dots: bool = True,
        widens: bool = False,
        following: "LinearCall | None" = None,
    ) -> None:
        self.panels, self.max_rows, self.widens, self.following = panels, max_rows, widens, following
        self.outputs: int = panels.outputs + (0 if following is None else following.outputs)
        self.num_bytes: int = panels.num_bytes + (0 if following is None else following.num_bytes)
        dots = panels.type == LEVELS4 or (dots and not widens)  # levels need these instructions, see `Panels.of_codes`
        pointers = (None if t is None else t.data_ptr() for t in (panels.packed, panels.scales, panels.bias))
        self._structure = _Linear(
            *pointers, panels.inputs, panels.outputs, panels.type, dots and has_dots(panels.type), 0
        )
        self._structure.levels = None if panels.levels is None else panels.levels.data_ptr()
        self._structure.scaling = panels.scaling
        self.address = ctypes.addressof(self._structure)
        # Floats for each row.
        self.scratch_floats: int = max(self._ready(panels), 0 if following is None else following.scratch_floats)
        self._place(0, self.outputs)

    def _place(self, first: int, stride: int) -> None:
        """Set the column of the first output in result rows of `stride` columns, also for calls that follow."""
        assert first % WIDTH == 0
        self._structure.first, self._structure.stride = first, stride
        if self.following is not None:
            assert self.following.panels.inputs == self.panels.inputs
            self._structure.next = self.following.address
            self.following._place(first + self.panels.outputs, stride)

    def _ready(self, panels: Panels) -> int:
        """Return the floats of scratch memory for one row of prepared activations.

        Instructions for two or four numbers store that many in one float. Rounded activations need in addition a scale
        and a zero point for each group.
        """
        depth, is_rounded = _filled(panels.inputs, panels.type), panels.type >= INT8 and panels.type != FP8
        together = 1 if not self._structure.dots else 4 if is_rounded else 2
        return depth // together + (2 * depth // _GROUPS[panels.type] if is_rounded else 0)

    @property
    def chain(self) -> "list[LinearCall]":
        """This call and those that follow it."""
        return [self, *([] if self.following is None else self.following.chain)]

    def bind(self, packed: Tensor, scales: Tensor | None) -> None:
        """Use other weights of the same shapes from now on."""
        assert packed.shape == self.panels.packed.shape
        self.panels = replace(self.panels, packed=packed, scales=scales)
        self._structure.packed = packed.data_ptr()
        self._structure.scales = None if scales is None else scales.data_ptr()

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def number(self) -> int:
        """Number of this layer in the tables of adapters."""
        return int(self._structure.number)

    @number.setter
    def number(self, number: int) -> None:
        self._structure.number = number
        if self.following is not None:
            self.following.number = number

    def rows(self, numbers: Tensor) -> Tensor:
        """Return [rows, inputs] float32, the weight's rows with the indices `numbers` [rows] int64."""
        assert self.following is None
        result = torch.empty((numbers.shape[0], self.panels.inputs))
        call("specinfer_rows", self.address, numbers.data_ptr(), result.data_ptr(), len(numbers))
        return result

    def __call__(
        self,
        x: Tensor,
        result: Tensor | None = None,
        ending: Ending = Ending.STORE,
        runs: "AdapterRuns | None" = None,
    ) -> Tensor:
        """Compute float32 [rows, outputs], or half as many if gated, from contiguous float32 `x` [rows, inputs].

        A row's result does not depend on the other rows, unless PyTorch multiplies.

        Args:
            result: Tensor that the result is written or added to, or None for a new one.
            runs: Rows with adapters.
        """
        rows = x.shape[0]
        assert x.is_contiguous()
        if rows > self.max_rows and self.panels.scales is None:
            return self._by_torch(x, result, ending, runs)
        if result is None:
            result = torch.empty((rows, self.outputs // 2 if ending in GATES.values() else self.outputs))
        if rows:
            scratch = torch.empty(rows * self.scratch_floats)
            addresses = (self.address, x.data_ptr(), result.data_ptr(), scratch.data_ptr())
            call("specinfer_linear", *addresses, rows, ending, None if runs is None else runs.address)
        return result

    def _by_torch(self, x: Tensor, result: Tensor | None, ending: Ending, runs: "AdapterRuns | None") -> Tensor:
        weight = self.panels.unpack().float() if self.widens else self.panels.unpack()
        y = functional.linear(x.to(weight.dtype), weight).float()
        if self.panels.bias is not None:
            y += self.panels.bias[: self.panels.outputs]
        if runs is not None:
            runs.add(self.number, x, y)
        if ending in GATES.values():
            gates, values = y.unflatten(1, (-1, 2, WIDTH // 2)).unbind(2)
            opened = functional.silu(gates) if ending == Ending.GATED else functional.gelu(gates, approximate="tanh")
            y = (opened * values).flatten(1)
        if result is None:
            return y
        return result.add_(y) if ending == Ending.ADD else result.copy_(y)


def has_dots(kind: int) -> bool:
    """Return whether the CPU multiplies and adds numbers of this type in one instruction."""
    widened = {TYPES[torch.bfloat16]: ("BF16",), FP8: ("BF16",)}
    names = widened.get(kind, ("VNNI", "dotprod", "i8mm") if kind >= INT8 else ())
    return any(name in describe() for name in names)
