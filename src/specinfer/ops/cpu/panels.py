"""Weights of linear layers in panels, the layout that the native kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.ops.cpu.huge_pages import zeros_on_huge_pages
from specinfer.ops.cpu.library import call, describe, library
from specinfer.ops.float8 import LEVELS
from specinfer.ops.quantized_weight import ZEROS, QuantizedWeight
from specinfer.ops.scales import BF16_SCALES, WIDTH, pack_scales, with_scales

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INT8, INT4, INT8_OF_32, INT6, INT5, LEVELS4, FP8, _, LEVELS4_OF_16 = range(3, 12)
_GROUPS = (1, 2, 2, 64, 32, 32, 16, 32, 32, 128, 1, 16)  # by type: inputs are padded to a multiple of it
_BITS = {INT6: 6, INT5: 5, INT4: 4, LEVELS4: 4, LEVELS4_OF_16: 4}  # of a code; 8 of other types
# The bits and inputs of groups of each type.
_FORMATS = {
    INT8: (8, 64), INT4: (4, 32), INT8_OF_32: (8, 32), INT6: (6, 16), INT5: (5, 32), LEVELS4: (4, 32), FP8: (8, 128),
    LEVELS4_OF_16: (4, 16),
}  # fmt: skip
HAVE_LEVELS = (LEVELS4, LEVELS4_OF_16)
_TYPES = {form: kind for kind, form in _FORMATS.items() if kind not in HAVE_LEVELS}


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
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None) -> "Panels":
        """Pack `weight` [outputs, inputs], whose type is one of `TYPES`."""
        return cls._pack(TYPES[weight.dtype], weight, None, bias, weight.shape[1])

    @classmethod
    def from_codes(cls, weight: QuantizedWeight, bias: Tensor | None = None) -> "Panels":
        """Pack codes with their scales."""
        weight = _in_kernel_groups(weight) if weight.is_float else weight
        codes, levels = weight.codes, None
        if weight.levels is None or weight.is_float:
            kind = _TYPES[weight.bits, weight.group_size]
        elif has_dots(LEVELS4):
            kind = LEVELS4 if weight.group_size == _GROUPS[LEVELS4] else LEVELS4_OF_16
            levels = (weight.levels.to(torch.int16) + 128).to(torch.uint8)
        else:
            kind = INT8_OF_32 if weight.group_size == _GROUPS[LEVELS4] else INT6
            zero = ZEROS[_BITS.get(kind, 8)]
            numbers = weight.levels.to(torch.int16) + zero
            assert weight.levels.is_meta or (numbers.min() >= 0 and numbers.max() < 2 * zero)
            codes = numbers.to(torch.uint8).to(codes.device)[codes.long()]
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
        assert kind < INT8 or weight.shape[1] == depth  # codes are whole groups
        # Weights on the meta device, which are read later, make panels on the meta device.
        place = torch.device("meta" if weight.is_meta else "cpu")
        packed = zeros_on_huge_pages(size * _BITS.get(kind, 8) // 8, weight.dtype, place)
        if not weight.is_meta:
            _move(kind, packed, weight.contiguous(), depth, packs=True)
        if bias is not None:
            bias = functional.pad(bias.float(), (0, panels * WIDTH - outputs))
        return cls(packed, scales, bias, inputs, outputs, kind)

    def part(self, outputs: range) -> "Panels":
        """Return some outputs, which begin and end where panels do, without copying them."""
        assert outputs.start % WIDTH == 0
        assert outputs.stop % WIDTH == 0 or outputs.stop == self.outputs
        panels = slice(outputs.start // WIDTH, -(-outputs.stop // WIDTH))
        size = self.packed.numel() // -(-self.outputs // WIDTH)
        return replace(
            self,
            packed=self.packed[panels.start * size : panels.stop * size],
            scales=None if self.scales is None else self.scales[panels],
            bias=None if self.bias is None else self.bias[panels.start * WIDTH : panels.stop * WIDTH],
            outputs=len(outputs),
        )

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
        for panel in panels[1:]:
            last = result[-1]
            if last.format != panel.format or (last.bias is None) != (panel.bias is None) or last.outputs % WIDTH:
                result.append(panel)
                continue
            packed = torch.cat([last.packed, panel.packed])
            scales, bias = _cat(last.scales, panel.scales), _cat(last.bias, panel.bias)
            result[-1] = replace(last, packed=packed, scales=scales, bias=bias, outputs=last.outputs + panel.outputs)
        return result

    @property
    def format(self) -> tuple[object, ...]:
        """Properties that panels must share to be joined."""
        return self.type, self.scaling, self.inputs, None if self.levels is None else tuple(self.levels.tolist())

    def scratch_floats(self, *, dots: bool) -> int:
        """Return the floats of scratch memory for one row of prepared activations.

        Instructions for two or four numbers store that many in one float; pairs fill whole tiles. Rounded activations
        need in addition a scale and a zero point for each group.

        Args:
            dots: Whether such instructions are used.
        """
        depth = _filled(self.inputs, self.type)
        if self.type < INT8 or self.type == FP8:
            return -(-depth // 32) * 16 if dots else depth
        return depth // (4 if dots else 1) + 2 * depth // _GROUPS[self.type]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.packed, self.scales, self.bias) if t is not None)


def _in_kernel_groups(weight: QuantizedWeight) -> QuantizedWeight:
    """Return weights of floating-point codes in the kernels' groups, which repeat the scales of larger ones."""
    size = _GROUPS[FP8]
    starts = torch.arange(0, weight.in_features, size)
    codes = functional.pad(weight.codes, (0, len(starts) * size - weight.codes.shape[1]))
    return replace(weight, codes=codes, scales=weight.scales[:, starts // weight.group_size], group=size)


def _cat(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else torch.cat([first, second])


def _filled(inputs: int, kind: int) -> int:
    return -(-inputs // _GROUPS[kind]) * _GROUPS[kind]


def _move(kind: int, packed: Tensor, weight: Tensor, depth: int, *, packs: bool) -> None:
    size = (len(weight), weight.shape[1], depth)
    call("specinfer_move", kind, packed.data_ptr(), weight.data_ptr(), *size, packs)


def has_dots(kind: int) -> bool:
    """Return whether the CPU multiplies and adds numbers of this type in one instruction."""
    widened = {TYPES[torch.bfloat16]: ("BF16",), FP8: ("BF16",)}
    names = widened.get(kind, ("AVX2", "VNNI", "dotprod", "i8mm") if kind >= INT8 else ())
    return any(name in describe() for name in names)
