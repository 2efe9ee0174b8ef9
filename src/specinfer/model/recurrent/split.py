"""The blocks of weights of layers without attention, of which each rank has a part: some heads or channels."""

from collections.abc import Mapping
from typing import NamedTuple


class Block(NamedTuple):
    """Neighbouring outputs of a weight, or channels of a parameter: each rank has an equal part of them, or all."""

    size: int
    is_split: bool = True


# By name within a layer: the blocks of a weight's outputs, () for one of all of them, or None to split it by inputs.
Blocks = Mapping[str, tuple[Block, ...] | None]
EVENLY: tuple[Block, ...] = ()
