"""Weights of 4 to 8 bits: their codes, and the scales of groups; quantization.py has what they are for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUP_SIZES: dict[int, int] = {8: 64, 4: 32}
ZEROS: dict[int, int] = {8: 128, 6: 32, 5: 16, 4: 8}  # the codes that stand for 0
LARGEST_GROUP = 128  # that kernels for GPUs have
NEST = 256  # inputs whose groups' scales have a scale of their own


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The weights of a linear layer; inputs are padded to whole groups, with the code that stands for 0.

    A weight is `(code - zero) * scale + added`. With `nest`, scales and what is added are whole numbers times those of
    `NEST` inputs. The zero is that of all codes of this size, or one of each group. There is none where something is
    added, and the levels stand for themselves.
    """

    codes: Tensor  # [out, groups * group size] uint8, or if packed half as many bytes
    # [out, groups] bfloat16 or float16, of either sign; int8, or uint8 with `added`, if nested; float32 of float codes
    scales: Tensor
    bits: int
    in_features: int
    group: int | None = None  # inputs of a group; None for the one of GROUP_SIZES
    added: Tensor | None = None  # [out, groups] float16, or uint8 if nested
    nest: Tensor | None = None  # [out, inputs / NEST, 1, or 2 with `added`] float16
    levels: Tensor | None = None  # [16] int8: the numbers that the codes stand for, or [256] float32 of float codes
    zeros: Tensor | None = None  # [out, groups] uint8
    inputs: Tensor | None = None  # [in] int64: the input that each column of the codes is for, or None if in order

    @property
    def is_packed(self) -> bool:
        """True if a byte has two codes of 4 bits, the first in the lower half."""
        return self.codes.shape[1] < self.scales.shape[1] * self.group_size

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.scales, self.added, self.nest, self.levels, self.zeros, self.inputs)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def packed(self) -> "QuantizedWeight":
        """Return the same weights with two codes of 4 bits in a byte."""
        if self.bits != 4 or self.is_packed:
            return self
        return replace(self, codes=self.codes[:, ::2] | self.codes[:, 1::2] << 4)

    def unpacked(self) -> "QuantizedWeight":
        """Return the same weights with one code in a byte."""
        return replace(self, codes=self._unpacked(slice(None)))

    def _unpacked(self, part: slice) -> Tensor:
        codes = self.codes[part]
        return torch.stack([codes & 15, codes >> 4], dim=2).flatten(1) if self.is_packed else codes

    def merged(self) -> "QuantizedWeight":
        """Return the same weights in groups as large as possible, up to `LARGEST_GROUP` inputs.

        Neighbouring groups become one if their numbers are equal in all rows, as in files with larger groups.
        """
        weight = self
        while weight.nest is None and weight.group_size < LARGEST_GROUP and weight.scales.shape[1] % 2 == 0:
            both = [None if numbers is None else numbers.unflatten(1, (-1, 2)) for numbers in weight.of_groups]
            if not all(numbers is None or torch.equal(numbers[..., 0], numbers[..., 1]) for numbers in both):
                break
            scales, added, zeros = (None if numbers is None else numbers[..., 0].contiguous() for numbers in both)
            assert scales is not None
            weight = replace(weight, scales=scales, added=added, zeros=zeros, group=2 * weight.group_size)
        return weight

    @property
    def of_groups(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The numbers of each group: scales, what is added, and zeros."""
        return self.scales, self.added, self.zeros

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def group_size(self) -> int:
        return self.group or GROUP_SIZES[self.bits]

    @property
    def is_float(self) -> bool:
        """True if codes are floating-point numbers."""
        return self.levels is not None and self.levels.is_floating_point()

    @property
    def zero(self) -> int:
        """The code that stands for 0 in all groups, or 0 if there is none."""
        return ZEROS[self.bits] if self.added is None and self.levels is None and self.zeros is None else 0

    def part(self, rows: slice | Tensor) -> "QuantizedWeight":
        """Return some of the rows, by a slice or by their indices."""
        return self.reordered(lambda tensor: tensor[rows])

    def reordered(self, order: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """Return the same rows in the order that a function brings those of a tensor into."""
        return self.joined([self], lambda tensors: order(tensors[0]))

    def can_split(self, part: range) -> bool:
        """Return whether these inputs are whole groups, and whole ones of groups whose scales have a scale."""
        if self.inputs is not None:
            return False
        size = self.group_size if self.nest is None else NEST
        return part.start % size == 0 and (part.stop % size == 0 or part.stop == self.in_features)

    def of_inputs(self, part: range) -> "QuantizedWeight":
        """Return the weights of some inputs, see `can_split`."""
        assert self.can_split(part)

        def cut(tensor: Tensor, size: int) -> Tensor:
            return tensor[:, part.start // size : -(-part.stop // size)].contiguous()

        group = self.group_size
        added, zeros = (None if numbers is None else cut(numbers, group) for numbers in (self.added, self.zeros))
        codes = cut(self.codes.unflatten(1, (-1, group)), group).flatten(1)
        nest = None if self.nest is None else cut(self.nest, NEST)
        return replace(
            self, codes=codes, scales=cut(self.scales, group), in_features=len(part), added=added, nest=nest,
            zeros=zeros,
        )  # fmt: skip

    def with_inputs(self, parts: "Sequence[range]") -> "QuantizedWeight":
        """Return the same weights with the columns of these ranges one after the other, as the inputs come.

        Columns stay where they are if the ranges are no whole groups; the inputs are then brought into their order.
        """
        if not all(map(self.can_split, parts)):
            columns = torch.cat([torch.arange(part.start, part.stop) for part in parts])
            return replace(self, inputs=columns.argsort())
        weights = [self.of_inputs(part) for part in parts]
        codes, scales, added, nest, zeros = (
            None if getattr(self, name) is None else torch.cat([getattr(weight, name) for weight in weights], dim=1)
            for name in ("codes", "scales", "added", "nest", "zeros")
        )
        assert codes is not None
        assert scales is not None
        return replace(self, codes=codes, scales=scales, added=added, nest=nest, zeros=zeros)

    def outline(self, rows: int) -> "QuantizedWeight":
        """Return weights on the meta device in the same format, with this many rows."""
        return self.reordered(lambda tensor: torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta"))

    @staticmethod
    def joined(
        weights: "Sequence[QuantizedWeight]", join: Callable[[list[Tensor]], Tensor] = torch.cat
    ) -> "QuantizedWeight":
        """Return the rows of several weights of the same format, one after the other or in the order of `join`."""
        first = weights[0]
        # A comparison reads levels.
        assert len(weights) == 1 or all(weight.format == first.format for weight in weights)
        added, nest, zeros = (
            None if getattr(first, name) is None else join([getattr(weight, name) for weight in weights])
            for name in ("added", "nest", "zeros")
        )
        codes, scales = (join([getattr(weight, name) for weight in weights]) for name in ("codes", "scales"))
        return replace(first, codes=codes, scales=scales, added=added, nest=nest, zeros=zeros)

    @property
    def format(self) -> tuple[object, ...]:
        """Properties that weights must share to be joined."""
        levels = None if self.levels is None else self.is_float or tuple(self.levels.tolist())
        optional = self.added is None, self.nest is None, self.zeros is None, self.inputs is None, levels
        return (self.bits, self.group_size, self.in_features, self.scales.dtype, *optional)

    def numbers(self, part: slice = slice(None)) -> Tensor:
        """Return the float32 numbers that scales multiply, of some rows: [rows, groups * group size]."""
        codes = self._unpacked(part)
        if self.is_float:
            return codes.view(torch.float8_e4m3fn).float()
        if self.levels is not None:
            return self.levels[codes.long()].float()
        return codes.to(torch.float32).sub_(self.zero)

    def group_scales(self, part: slice = slice(None)) -> Tensor:
        """Return the [rows, groups] float32 scales of some rows."""
        return self._nested(self.scales, 0, part)

    def group_added(self, part: slice = slice(None)) -> Tensor | None:
        """Return the [rows, groups] float32 numbers that are added to each weight of some rows, or None."""
        if self.zeros is not None:
            return -self.zeros[part].float() * self.group_scales(part)
        return None if self.added is None else self._nested(self.added, 1, part)

    def _nested(self, numbers: Tensor, index: int, part: slice) -> Tensor:
        numbers = numbers[part].float()
        if self.nest is None:
            return numbers
        outer = self.nest[part, :, index].float()
        return numbers * outer.repeat_interleave(NEST // self.group_size, dim=1)
