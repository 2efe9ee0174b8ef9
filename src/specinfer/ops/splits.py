"""Division of products among the multiprocessors of a GPU, by shapes alone; plans read it without Triton."""

from typing import NamedTuple

MOST_FEW = 64  # rows of the products of few rows
OUTPUTS = 64  # of a program of those
INPUTS = 128  # that all sizes of layers are a multiple of
_MAX_PARTS = 8
_LEAST_STEPS = 4  # of a part


class Division(NamedTuple):
    """The division of a product of few rows, which depends only on shapes and the device."""

    rows: int  # padded to a block
    step: int  # inputs
    stages: int
    parts: int  # of the inputs


def divide(num_rows: int, outputs: int, inputs: int, num_cores: int) -> Division:
    """Divide a product: two programs per multiprocessor, or one with more than 32 rows, whose steps are larger.

    Args:
        outputs: Rows of the weight.
    """
    blocks, parts, is_small = outputs // OUTPUTS, 1, num_rows <= 32
    wanted = 0.95 * num_cores * (2 if is_small else 1)
    while parts < _MAX_PARTS and blocks * parts < wanted and inputs // INPUTS >= 2 * parts * _LEAST_STEPS:
        parts *= 2
    padded = max(1 << (num_rows - 1).bit_length(), 16)
    if is_small or blocks * parts <= num_cores:
        return Division(padded, 128, 4, parts)
    return Division(padded, 64, 5, parts)
