"""Operations of decoder layers on GPUs: Triton kernels for tensors on a GPU, plain PyTorch for others.

Each is documented at its plain version in `plain_layer` or `plain_recurrence`.
"""

from torch import Tensor, nn

from specinfer.ops import plain_layer, plain_recurrence
from specinfer.ops.quantized_weight import QuantizedWeight
from specinfer.ops.triton import by_device, runs_on

# Up to this many rows, codes are widened in registers, again for every 64 rows. For more rows they are widened once.
MAX_ROWS = 256


def _runs_on(tensor: Tensor) -> bool:
    return runs_on(tensor)


add_norm = by_device(_runs_on, plain_layer.add_norm, "norm")
rotate_and_store = by_device(_runs_on, plain_layer.rotate_and_store, "rotary")
gate = by_device(_runs_on, plain_layer.gate, "gate")
convolve = by_device(_runs_on, plain_recurrence.convolve, "recurrence")
recur = by_device(_runs_on, plain_recurrence.recur, "recurrence")
few_rows_product = by_device(_runs_on, plain_layer.few_rows_product, "few_rows")
gated_product = by_device(_runs_on, plain_layer.gated_product, "few_rows")
routed_product = by_device(_runs_on, plain_layer.routed_product, "product")


def has_few_rows_kernel(rows: Tensor, linear: nn.Module) -> bool:
    """Return whether `few_rows_product` and `gated_product` have a kernel for a linear layer with these inputs."""
    if type(linear) is not nn.Linear or not runs_on(rows):
        return False
    from specinfer.ops.triton import few_rows

    return few_rows.fits(rows, linear.weight)


def product(rows: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Run `plain_layer.product` or its Triton kernel."""
    if runs_on(rows):
        from specinfer.ops.triton import product as products

        multiply = products.product if len(rows) <= MAX_ROWS else products.product_of_many
        return multiply(rows, weight, bias, out)
    return plain_layer.product(rows, weight, bias, out)
