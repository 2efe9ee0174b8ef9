"""Costs of `batch_invariant` in a pass on a GPU that is not here: kernels that divide their work by shapes alone.

Products pad their rows to whole tiles, and split the inputs of small layers into as many parts for many rows as for
few. A kernel of its own adds the parts up. Products do not launch during the kernel before. Attention has parts of a
fixed number of positions, so short contexts of few requests leave multiprocessors without work.

Left out: that caches hold most of what is written in parts; the parts of attention, of which usual kernels write as
many; that tiles of few rows compute padding while they wait for weights; prompts of more rows than a tile, which cuBLAS
multiplies otherwise. Experts count as dense layers, and layers without attention as others. Products with codes are the
usual ones but for the rows of a tile.

Example: a layer of a 7 B target with 4 products, 3 of them in parts, has 13 kernels instead of 10, and 7 of these take
3.2 us each instead of 2.3: 13 us more, 0.4 ms in 32 layers, where a pass takes 5.
"""

from dataclasses import dataclass

import numpy as np

from specinfer.ops.splits import MOST_FEW, STEP_OF_NUMBERS, divide, num_parts
from specinfer.planning.options import Accelerator
from specinfer.planning.target_shape import TargetShape
from specinfer.policy.curves import Floats

_FLOAT = 4  # bytes of a number of a part
_LEAST_BYTES = 2  # of a weight that is no code
_GATED = 2  # place of the product of gates, which usual kernels do not split
_SUMS = 2  # numbers of a row of attention, beside its values: the highest score, and the sum of weights


@dataclass(frozen=True, slots=True)
class WorkDivision:
    """Division of the kernels' work, to which `tests/planning/test_invariance_costs.py` holds it.

    Attributes:
        rows, rows_of_codes: Rows of a tile of a product, with weights that are no codes and with codes.
        layer_kernels: Kernels of a layer, without those that add up parts of products.
        waiting_kernels: Those among them that do not launch during the kernel before, the products.
        part: Positions of a part of attention.
        attention_rows: Rows of a tile of attention: heads of one KV head, of one token or several.
        least_programs: Tiles of attention for each multiprocessor from which on one program has all parts of its rows.
        most_bytes: Bytes of the parts of attention from which on one program has them, too.
    """

    rows: int = 64
    rows_of_codes: int = 32
    layer_kernels: int = 10
    waiting_kernels: int = 4
    part: int = 256
    attention_rows: int = 32
    least_programs: int = 4
    most_bytes: int = 2**28


@dataclass(frozen=True, slots=True)
class InvarianceCosts:
    """Costs of the passes of one target on one device.

    Args:
        rate: Bytes of memory per second that kernels reach.
        flops: Operations per second that they reach.
        kernel_seconds: Seconds that a kernel takes in addition to reading and computing, with and without a launch
            during the one before.
    """

    device: Accelerator
    shape: TargetShape
    rate: float
    flops: float
    kernel_seconds: tuple[float, float]
    order: WorkDivision = WorkDivision()

    @property
    def has_codes(self) -> bool:
        """True if weights are codes, whose usual products are those of a fixed order but for the rows of a tile."""
        return self.shape.bytes_per_parameter < _LEAST_BYTES

    @property
    def head_dim(self) -> int:
        return self.shape.kv_parameters // (2 * self.shape.width * self.shape.num_kv_heads)

    @property
    def products(self) -> list[tuple[int, int]]:
        """The (inputs, outputs) of the products of a layer of Llama's kind."""
        shape, dim = self.shape, self.head_dim
        queries, width = shape.num_heads * dim, shape.width
        attention = width * (2 * queries + 2 * shape.num_kv_heads * dim)
        gates = max((shape.layer_parameters - attention) // (3 * width), 1)
        return [(width, queries + 2 * shape.num_kv_heads * dim), (queries, width), (width, 2 * gates), (gates, width)]

    @property
    def parts(self) -> list[int]:
        """The number of parts of each product of a layer, which a kernel adds up; 1 for all products with codes."""
        if self.has_codes:  # usual kernels split them alike
            return [1] * len(self.products)
        return [num_parts(inputs, outputs, STEP_OF_NUMBERS) for inputs, outputs in self.products]

    def launches(self) -> float:
        """Return the seconds of all kernels of the layers, apart from their reading and computing."""
        adding = sum(parts > 1 for parts in self.parts)
        waiting = 0 if self.has_codes else min(self.order.waiting_kernels, self.order.layer_kernels)
        soon, late = self.kernel_seconds
        return self.shape.num_layers * ((self.order.layer_kernels - waiting) * soon + (waiting + adding) * late)

    def padded(self, num_rows: Floats) -> Floats:
        """Return the rows that products compute."""
        size = self.order.rows_of_codes if self.has_codes else self.order.rows
        return np.ceil(num_rows / size) * size

    def adding(self, num_rows: Floats) -> Floats:
        """Return the seconds of writing and reading the parts of products, beyond those of usual kernels."""
        return np.asarray([2 * _FLOAT * self._numbers_beyond(int(rows)) / self.rate for rows in num_rows])

    def _numbers_beyond(self, num_rows: int) -> int:
        """Return the numbers of parts of all layers that usual kernels do not write."""
        beyond = 0
        for place, (parts, (inputs, outputs)) in enumerate(zip(self.parts, self.products, strict=True)):
            usual = 1
            if self.device.has_dependent_launches and num_rows <= MOST_FEW and place != _GATED:
                usual = divide(num_rows, outputs, inputs, self.device.num_cores).parts
            beyond += max((parts if parts > 1 else 0) - (usual if usual > 1 else 0), 0) * outputs * num_rows
        return self.shape.num_layers * beyond

    def attention(self, num_rows: Floats, num_requests: int, context: int, cache_seconds: float) -> Floats:
        """Return the seconds in which attention reads keys and values.

        Args:
            cache_seconds: Seconds of reading keys and values where all multiprocessors read.
        """
        order, shape = self.order, self.shape
        parts = max(context // order.part, 1)
        repeats = shape.num_heads // shape.num_kv_heads
        blocks = np.ceil(num_rows / num_requests * repeats / order.attention_rows)
        tiles = blocks * num_requests * shape.num_kv_heads
        stored = num_rows * shape.num_heads * parts * (self.head_dim + _SUMS) * _FLOAT
        is_split = (tiles < order.least_programs * self.device.num_cores) & (stored <= order.most_bytes)
        share = np.minimum(tiles * np.where(is_split, parts, 1) / self.device.num_cores, 1.0)
        return np.asarray(cache_seconds / share)
