"""Routes: which rows of a product are multiplied by which expert's weights, in blocks of fixed size.

The number of blocks depends only on the numbers of rows and experts, and nothing is read back from the device, so that
passes can be captured.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.ops.fixed_order import is_fixed

BLOCKS = (16, 32, 64)  # rows of a program
_FIXED_OF_CODES = 32


@dataclass(frozen=True, slots=True)
class Routes:
    """The pairs of a token and one of its experts, in the order of the experts.

    Attributes:
        pairs: [blocks * size] numbers of pairs, as in [tokens, experts of each] flattened, or `num_pairs` for none.
        experts: [blocks] the expert of each block, or `num_experts` or more for blocks of none.
    """

    pairs: Tensor
    experts: Tensor
    size: int
    num_pairs: int
    num_experts: int

    @classmethod
    def from_experts(cls, experts: Tensor, num_experts: int, dtype: torch.dtype) -> "Routes":
        """Return the routes of tokens.

        Args:
            experts: [tokens, experts of each]; `num_experts` stands for none.
            dtype: Type of the rows that are multiplied.
        """
        flat = experts.flatten().long()
        size = block_of(-(-len(flat) // num_experts), dtype)
        order = flat.argsort(stable=True)
        counts = torch.zeros(num_experts + 1, dtype=torch.long, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        filled = (counts + size - 1) // size * size  # each expert has whole blocks
        starts, ends = filled.cumsum(0) - filled, filled.cumsum(0)
        blocks = len(flat) // size + min(num_experts + 1, len(flat))
        pairs = torch.full((blocks * size,), len(flat), device=flat.device)
        in_order = flat[order]
        places = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[in_order]
        pairs[starts[in_order] + places] = order
        first = torch.arange(blocks, device=flat.device) * size
        return cls(pairs, torch.searchsorted(ends, first, right=True), size, len(flat), num_experts)


def block_of(rows: int, dtype: torch.dtype, *, is_codes: bool = True) -> int:
    """Return the rows of a program, for so many rows with the same weights.

    In a fixed order it is the same for any number of rows. Codes are widened once for each block of rows, but few rows
    must not wait for the products of many, so those of codes have fewer rows.
    """
    sizes = BLOCKS[:-1] if dtype == torch.float32 else BLOCKS  # sums of 64 rows of float32 do not fit into registers
    if is_fixed():
        return _FIXED_OF_CODES if is_codes else sizes[-1]
    return next((size for size in sizes if rows <= size), sizes[-1])
