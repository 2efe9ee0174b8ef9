"""Products of few rows with weights of half precision on Hopper GPUs, where cuBLAS reads weights more slowly.

Weights are the left factor, because tensor cores multiply 64 rows of that at a time, but as few as 8 columns of the
right one. The inputs of small layers are split (split-K), so that the whole device reads. The parts are returned in
float32, and the kernel after the product sums them, always in the same order. Gates and values (SwiGLU) are computed in
one program, which returns their product.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.splits import INPUTS, MOST_FEW, OUTPUTS, Division, divide
from specinfer.ops.triton.blocks import device_of
from specinfer.ops.triton.dependent_launch import launch_options, wait_for_inputs
from specinfer.ops.triton.gate import silu_times

MAX_ROWS = MOST_FEW
COMPUTE_CAPABILITY_MAJOR = 9  # Hopper; elsewhere it has not been measured
_OUTPUTS = tl.constexpr(OUTPUTS)


@triton.jit(do_not_specialize=["num_rows", "num_steps", "steps_each"])
def few_rows_program(
    rows, weight, bias, out, num_rows, inputs, outputs, num_steps, steps_each,
    ROWS: tl.constexpr, STEP: tl.constexpr, IS_GATED: tl.constexpr, IS_PART: tl.constexpr, HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute a block of outputs of all rows, summed over a part of the inputs. Grid: [blocks of outputs, parts].

    With `IS_GATED` a block has half as many gates, and the values that they open.
    """
    wait_for_inputs(DEPENDENT)
    together: tl.constexpr = _OUTPUTS // 2 if IS_GATED else _OUTPUTS
    part, place = tl.program_id(1), tl.arange(0, _OUTPUTS)
    of_weight = tl.program_id(0) * together + place % together + place // together * outputs
    row, column = tl.arange(0, ROWS), tl.arange(0, STEP)
    has_row = row < num_rows
    weight_rows = weight + of_weight.to(tl.int64)[:, None] * inputs + column[None, :]
    given = rows + row[None, :] * inputs + column[:, None]
    total = tl.zeros([_OUTPUTS, ROWS], tl.float32)
    if HAS_BIAS and part == 0:
        total += tl.load(bias + of_weight).to(tl.float32)[:, None]
    first = part * steps_each
    for step in range(first, min(first + steps_each, num_steps)):
        w = tl.load(weight_rows + step * STEP)
        x = tl.load(given + step * STEP, mask=has_row[None, :], other=0.0)
        total = tl.dot(w, x, total)
    if IS_GATED:
        dtype: tl.constexpr = rows.dtype.element_ty
        gates, values = tl.split(tl.permute(tl.reshape(total, [2, together, ROWS]), [1, 2, 0]))
        total = silu_times(gates.to(dtype), values.to(dtype), dtype)
    output = tl.program_id(0) * together + tl.arange(0, together)
    to = out + row[None, :] * outputs + output[:, None]
    if IS_PART:
        to += part * num_rows * outputs
    tl.store(to, total.to(out.dtype.element_ty), mask=has_row[None, :])


def fits(rows: Tensor, weight: Tensor) -> bool:
    """Return whether products of these tensors are supported, on a CUDA device where they have been measured."""
    return (
        len(rows) <= MAX_ROWS
        and rows.dtype == weight.dtype
        and rows.dtype.itemsize == 2
        and weight.shape[1] % INPUTS == 0
        and weight.shape[0] % _OUTPUTS.value == 0
        and rows.is_contiguous()
        and weight.is_contiguous()
        and _is_measured(rows.device)
    )


@cache
def _is_measured(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == COMPUTE_CAPABILITY_MAJOR


def few_rows_product(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, division: Division | None = None
) -> Tensor:
    """Return the product of a linear layer: [rows, outputs], or float32 [parts, rows, outputs] to be added up.

    There are at most `MAX_ROWS` rows.

    Args:
        rows: [rows, inputs], contiguous.
        weight: [outputs, inputs] of the same type.
        bias: [outputs].
        division: How to divide the work, or None for `divide` on this device.
    """
    division = division or _division_of(rows, weight)
    shape = (len(rows), len(weight))
    if division.parts > 1:
        return _launched(rows, weight, bias, rows.new_empty(division.parts, *shape, dtype=torch.float32), division)
    return _launched(rows, weight, bias, rows.new_empty(shape), division)


def gated_product(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, division: Division | None = None
) -> Tensor:
    """Return [rows, width] `gate` of the product with `weight` [2 * width, inputs], whose inputs are not split."""
    division = (division or _division_of(rows, weight))._replace(parts=1)
    return _launched(rows, weight, bias, rows.new_empty(len(rows), len(weight) // 2), division, is_gated=True)


def _division_of(rows: Tensor, weight: Tensor) -> Division:
    outputs, inputs = weight.shape
    return divide(len(rows), outputs, inputs, device_of(rows.device).num_cores)


def _launched(
    rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, division: Division, *, is_gated: bool = False
) -> Tensor:
    if not len(rows):
        return out
    (outputs, inputs), parts = weight.shape, division.parts
    num_steps = inputs // division.step
    few_rows_program[(outputs // _OUTPUTS.value, parts)](
        rows, weight, weight if bias is None else bias, out,
        len(rows), inputs, out.shape[-1], num_steps, triton.cdiv(num_steps, parts),
        ROWS=division.rows, STEP=division.step, IS_GATED=is_gated, IS_PART=parts > 1, HAS_BIAS=bias is not None,
        num_warps=4, num_stages=division.stages, enable_fp_fusion=True, **launch_options(rows.device),
    )  # fmt: skip
    return out
