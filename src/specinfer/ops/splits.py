"""Division of products among the multiprocessors of a GPU, by shapes alone; plans read it without Triton."""

from typing import NamedTuple

MOST_FEW = 64  # rows of the products of few rows
OUTPUTS = 64  # of a program, at least
INPUTS = 128  # that all sizes of layers are a multiple of
STEP_OF_NUMBERS = 64  # inputs of a step of products in a fixed order, with weights that are no codes
_MAX_PARTS = 8
_LEAST_STEPS = 4  # of a part
_PROGRAMS = 264  # of a product of any number of rows, if there are enough inputs: two per multiprocessor of a large GPU


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


def num_parts(inputs: int, outputs: int, step: int) -> int:
    """Return the parts that a layer's inputs are split into, for any number of rows: 1, 2, 4, 8 or 16.

    Args:
        step: Inputs of a step.
    """
    blocks, steps, parts = -(-outputs // OUTPUTS), -(-inputs // step), 1
    while parts < 16 and blocks * parts < _PROGRAMS and steps // (2 * parts) >= _LEAST_STEPS:
        parts *= 2
    return parts
