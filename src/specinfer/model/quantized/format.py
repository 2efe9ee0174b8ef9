"""Format: how a linear layer's weight is stored as several tensors, and the numbers and codes that they stand for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.ops import QuantizedWeight
from specinfer.ops.float8 import LEVELS

_FP8_GROUP = 128  # inputs of a scale in the kernels
_GROUP = 32  # the smallest groups of inputs of most formats
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Fields = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Sources = Mapping[str, Any]  # with `shape` and `read`
Block = tuple[int, int]  # rows and columns of a weight that share a scale


class Sizes(NamedTuple):
    """The sizes of a layer's tensors, as a format would have them.

    Attributes:
        scales: Shape of the scales, one for each block.
        codes_fit: Whether the words of codes, and of zeros, are as many as codes of this size fill.
    """

    scales: tuple[int, ...]
    block: Block
    codes_fit: bool


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scales of a weight, each for a block of it.

    Attributes:
        scales: One for each block: [out / rows, in / columns], where one of a dimension is for all of it.
        zeros: Codes that stand for 0, of such a shape, or None for the code in the middle.
        groups: [in] groups of inputs with a column of scales each, if they are not neighbours, or None.
    """

    scales: Tensor
    block: Block
    zeros: Tensor | None = None
    groups: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store the weight of a linear layer.

    Attributes:
        names: Ends of the names of the tensors that every such layer has; the first one has the codes.
        others: Ends of the names of tensors that it may have.
        shape: Function from the sources of a layer's tensors to [out, in].
        bits: Bits of codes from 0 on, or None for numbers in place of codes.
        codes: Function from the tensors to the codes [out, in].
        levels: [16] numbers that codes of 4 bits stand for, halves of whole ones, or those of FP8; None for themselves.
        scaling: Function from the other tensors to the scales.
        least: Inputs of the smallest groups that share a scale in codes which kernels compute with.
        types: Types that tensors may have, by the ends of their names; of others not listed any.
        sizes: Function from the sources to the sizes of codes and scales, by which this format differs from others of
            the same names, or None where a checkpoint has no such others.
    """

    names: tuple[str, ...]
    others: tuple[str, ...]
    shape: Callable[[Sources], tuple[int, int]]
    bits: int | None
    codes: Callable[[Tensors], Tensor]
    scaling: Callable[[Tensors], Scaling]
    levels: Tensor | None = None
    least: int = _GROUP
    types: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    sizes: Callable[[Sources], Sizes] | None = None

    @property
    def kind(self) -> str:
        """The type of the codes, to be shown."""
        fp4 = "MXFP4" if self.least == _GROUP else "NVFP4"
        return f"int{self.bits}" if self.levels is None else "FP8" if self.is_fp8 else fp4

    @property
    def is_fp8(self) -> bool:
        """True if codes are floating-point numbers of 8 bits."""
        return self.levels is LEVELS

    def decode(self, tensors: Tensors) -> Tensor:
        """Return the weight [out, in] float32 that tensors stand for."""
        codes, scaling = self._parts(tensors)
        numbers = codes.float() if self.levels is None or self.is_fp8 else self.levels[codes.long()]
        scales, zeros, block = _two_dims(scaling.scales.float()), scaling.zeros, scaling.block
        if scaling.groups is not None:
            order, block = scaling.groups.long(), (1, 1)
            scales, zeros = scales[:, order], None if zeros is None else zeros[:, order]
        if zeros is not None:
            numbers -= _spread(_two_dims(zeros.float()), numbers.shape, block)
        elif self.bits is not None and self.levels is None:
            numbers -= 1 << self.bits - 1
        return numbers.mul_(_spread(scales, numbers.shape, block))

    def _parts(self, tensors: Tensors) -> tuple[Tensor, Scaling]:
        """Return codes and scales that fit each other.

        Raises:
            ValueError: A tensor is of another type or size.
        """
        for name, known in self.types.items():
            if name in tensors and tensors[name].dtype not in known:
                wanted = ", ".join(str(one).removeprefix("torch.") for one in known)
                raise ValueError(f"{name} is of type {str(tensors[name].dtype).removeprefix('torch.')}, not {wanted}")
        codes, scaling = self.codes(tensors), self.scaling(tensors)
        _check(scaling, codes.shape)
        return codes, scaling

    def shared(self, sources: Sources) -> Block | None:
        """Return the rows and columns that share a scale if the tensors are of this format, or None."""
        if not all(name in sources for name in self.names) or self.sizes is None:
            return None
        if any(name in sources and sources[name].dtype not in known for name, known in self.types.items()):
            return None
        try:
            shape, found = self.shape(sources), self.sizes(sources)
        except (ValueError, IndexError, ZeroDivisionError):
            return None
        counts = found.scales if len(found.scales) > 1 else (*found.scales, 1)
        block, pairs = [], tuple(zip(counts, shape, found.block, strict=True))
        for count, size, each in pairs:
            is_one = count == 1 and (each < 2 or each >= size)
            if not is_one and (each < 1 or count != -(-size // each)):
                return None
            block.append(size if count == 1 else each)
        return (block[0], block[1]) if found.codes_fit else None

    def keeps(self, tensors: Tensors, shape: tuple[int, int]) -> bool:
        """Return whether our kernels take codes with the scales in these tensors as they are.

        Args:
            shape: [out, in] of the weight.
        """
        if self.bits not in (2, 4, 8):
            return False
        scaling = self.scaling(tensors)
        size = _group_size(scaling, shape)
        in_order = torch.arange(shape[1]) // size
        return (
            (size % (_FP8_GROUP if self.is_fp8 else self.least) == 0 or size == shape[1])
            and (scaling.groups is None or torch.equal(scaling.groups.long(), in_order))
            and self._narrowed(scaling) is not None
            and (scaling.zeros is None or int(scaling.zeros.max()) < 256)
        )

    def quantized(self, tensors: Tensors) -> QuantizedWeight:
        """Return the weight that tensors stand for, if `keeps` is true of them."""
        codes, scaling = self._parts(tensors)
        outputs, inputs = codes.shape
        size, bits, scales = _group_size(scaling, codes.shape), 8 if self.bits == 8 else 4, self._narrowed(scaling)
        assert self.bits is not None
        assert scales is not None
        group = _FP8_GROUP if self.is_fp8 else 64 if bits == 8 and size % 64 == 0 else self.least

        def of_groups(numbers: Tensor) -> Tensor:
            numbers = _two_dims(numbers)
            rows = _places(len(numbers), outputs, scaling.block[0])
            return numbers[rows][:, _places(numbers.shape[1], inputs, size)[::group]]

        middle = 1 << bits - 1
        zeros = None if scaling.zeros is None else of_groups(scaling.zeros.to(torch.uint8))
        if self.is_fp8:
            codes = _padded(codes.view(torch.uint8), group)
            return QuantizedWeight(codes, of_groups(scales), 8, inputs, group, levels=LEVELS)
        if self.levels is not None:
            codes = _padded(codes.to(torch.uint8), group)  # the first level is 0
            levels = (2 * self.levels).to(torch.int8)
            return QuantizedWeight(codes, of_groups(scales), 4, inputs, group, levels=levels)
        if zeros is None and self.bits < bits:
            codes = codes + (middle - (1 << self.bits - 1))
        codes = _padded(codes.to(torch.uint8), group, middle)
        return QuantizedWeight(codes, of_groups(scales), bits, inputs, group, zeros=zeros)

    def _narrowed(self, scaling: Scaling) -> Tensor | None:
        """Return the scales in a type that the kernels take, or None if none has all their values."""
        if self.is_fp8:
            return scaling.scales.float()
        scales = scaling.scales if self.levels is None else scaling.scales / 2  # of whole levels
        if self.least < _GROUP:  # quotients of two scales
            return scales.float()
        fitting = [torch.bfloat16] if self.levels is not None else [torch.float16, torch.bfloat16]
        for dtype in fitting[: 2 if scaling.zeros is None else 1]:
            if torch.equal(scales.to(dtype).float(), scales.float()):
                return scales.to(dtype)
        return None


def unpack(data: Tensor, bits: int) -> Tensor:
    """Return [..., codes] uint8 codes of [..., integers] of any size, the lowest bits of each first."""
    data = data.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    codes = torch.empty((*data.shape, 8 // bits), dtype=torch.uint8)
    for i in range(8 // bits):
        torch.bitwise_and(data >> i * bits, (1 << bits) - 1, out=codes[..., i])
    return codes.flatten(-2)


def _check(scaling: Scaling, shape: tuple[int, ...]) -> None:
    """Refuse scales and groups that do not belong to a weight of this shape."""
    if scaling.scales.ndim > 2:
        raise ValueError(f"scales have {scaling.scales.ndim} dimensions")
    counts = _two_dims(scaling.scales).shape
    if scaling.groups is not None:
        least, most = int(scaling.groups.min()), int(scaling.groups.max())
        if len(scaling.groups) != shape[1] or least < 0 or most >= counts[1]:
            given = f"{len(scaling.groups)} numbers from {least} to {most}"
            raise ValueError(f"g_idx has {given}, for {shape[1]} inputs in {counts[1]} groups")
        counts = counts[:1]
    for count, size, each in zip(counts, shape, scaling.block, strict=False):
        if each > 1 and count != -(-size // each):  # one of a dimension is for all of it only where blocks are not
            raise ValueError(f"{count} scales for {size} weights, {each} each")


def _padded(codes: Tensor, group: int, value: int = 0) -> Tensor:
    """Return codes [out, in] with whole groups of inputs."""
    rest = -codes.shape[1] % group
    return functional.pad(codes, (0, rest), value=value) if rest else codes


def _group_size(scaling: Scaling, shape: tuple[int, ...]) -> int:
    """Return the inputs that share a scale."""
    return shape[1] if _two_dims(scaling.scales).shape[1] == 1 else scaling.block[1]


def _places(count: int, size: int, each: int) -> Tensor:
    """Return [size] places among `count` values, each for this many neighbours, the last for fewer; or one for all."""
    if count not in (1, -(-size // each)):
        raise ValueError(f"{count} scales for {size} weights, {each} each")
    return torch.arange(size) // (size if count == 1 else each)


def _spread(values: Tensor, shape: tuple[int, ...], block: Block) -> Tensor:
    """Return values of blocks with one for each weight, or one for a dimension that has only one."""
    for dim in (0, 1):
        if values.shape[dim] > 1:
            values = values.index_select(dim, _places(values.shape[dim], shape[dim], block[dim]))
    return values


def _two_dims(scales: Tensor) -> Tensor:
    return scales.reshape(-1, 1) if scales.ndim < 2 else scales


def matrix_shape(source: Any) -> tuple[int, int]:
    """Return the shape of a source that is a matrix.

    Raises:
        ValueError: It is none.
    """
    rows, columns = source.shape
    return rows, columns
