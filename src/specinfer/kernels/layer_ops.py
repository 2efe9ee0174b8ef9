"""Operations of decoder layers on GPUs: Triton kernels for tensors on a GPU, plain PyTorch for others."""

from torch import Tensor

from specinfer.kernels import plain_layer
from specinfer.kernels.triton import runs_on

# Up to this many rows, codes are widened in registers, again for every 64 rows. For more rows they are widened once.
MAX_ROWS = 256


def add_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Run `plain_layer.add_norm` or its Triton kernel."""
    if runs_on(hidden):
        from specinfer.kernels.triton import norm

        return norm.add_norm(hidden, added, weight, eps, out)
    return plain_layer.add_norm(hidden, added, weight, eps, out)


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    rotations: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Run `plain_layer.rotate_and_store` or its Triton kernel."""
    if runs_on(qkv):
        from specinfer.kernels.triton import rotary

        return rotary.rotate_and_store(qkv, positions, rotations, slots, keys, values, norms, eps, out)
    return plain_layer.rotate_and_store(qkv, positions, rotations, slots, keys, values, norms, eps, out)


def gate(gated: Tensor, out: Tensor | None = None) -> Tensor:
    """Run `plain_layer.gate` or its Triton kernel."""
    if runs_on(gated):
        from specinfer.kernels.triton import gate as gates

        return gates.gate(gated, out)
    return plain_layer.gate(gated, out)


def product(
    rows: Tensor, codes: Tensor, scales: Tensor, kind: str, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Run `plain_layer.product` or its Triton kernel."""
    if runs_on(rows):
        from specinfer.kernels.triton import product as products

        multiply = products.product if len(rows) <= MAX_ROWS else products.product_of_many
        return multiply(rows, codes, scales, kind, bias, out)
    return plain_layer.product(rows, codes, scales, kind, bias, out)
