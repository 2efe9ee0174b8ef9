"""Operations of decoder layers on GPUs; see `kernels`. None waits for the device, so all can be captured.

Results are rounded to the type of activations at the same places as in transformers.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specinfer.ops.fixed_order import is_fixed
from specinfer.ops.kernels import operations
from specinfer.ops.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from specinfer.ops.triton.few_rows import few_rows_product, gated_product
    from specinfer.ops.triton.gate import gate
    from specinfer.ops.triton.low_rank import add_low_rank
    from specinfer.ops.triton.norm import add_norm
    from specinfer.ops.triton.product import product, product_of_many, routed_product
    from specinfer.ops.triton.recurrence import convolve, recur
    from specinfer.ops.triton.rotary import rotate_and_store
    from specinfer.ops.triton.row_sum import row_sum

__all__ = [
    "OPERATIONS", "add_low_rank", "add_norm", "convolve", "few_rows_product", "gate", "gated_product",
    "has_few_rows_kernel", "product", "product_of_many", "quantized_product", "recur", "rotate_and_store",
    "rotation_table", "routed_product", "row_sum", "sum_parts",
]  # fmt: skip

# Up to this many rows, codes are widened in registers, again for every 64 rows. For more rows they are widened once.
MAX_ROWS = 256
# The module of `ops/triton` that has the kernel of each operation.
OPERATIONS = {
    "add_norm": "norm",
    "rotate_and_store": "rotary",
    "gate": "gate",
    "convolve": "recurrence",
    "recur": "recurrence",
    "few_rows_product": "few_rows",
    "gated_product": "few_rows",
    "product": "product",
    "product_of_many": "product",
    "routed_product": "product",
    "add_low_rank": "low_rank",
    "row_sum": "row_sum",
}
globals().update(operations(OPERATIONS))


def has_few_rows_kernel(rows: Tensor, linear: nn.Module) -> bool:
    """Return whether `few_rows_product` and `gated_product` have a kernel for a linear layer with these inputs."""
    if type(linear) is not nn.Linear or not rows.is_cuda or is_fixed():
        return False
    from specinfer.ops.triton import few_rows

    return few_rows.fits(rows, linear.weight)


def quantized_product(rows: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return [rows, outputs] products with quantized weights; arguments as for `product`."""
    multiply = product if len(rows) <= MAX_ROWS or is_fixed() else product_of_many
    result: Tensor = multiply(rows, weight, bias)
    return result


def sum_parts(result: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [tokens, width] in a type, the sum of float32 [parts, tokens, width] where a product has parts."""
    return (result if result.dim() == 2 else result.sum(dim=0)).to(dtype)


def rotation_table(cosines: Tensor, sines: Tensor) -> Tensor:
    """Return a [positions, dim] float32 table, half cosines and half sines, from transformers' [positions, dim] tables.

    The two halves of each of transformers' tables are equal (rotary embeddings, arXiv 2104.09864, with pairs of numbers
    `dim / 2` apart).
    """
    half = cosines.shape[1] // 2
    assert torch.equal(cosines[:, :half], cosines[:, half:])
    assert torch.equal(sines[:, :half], sines[:, half:])
    return torch.cat([cosines[:, :half], sines[:, :half]], dim=1).float()
