"""The walk of coupled verification down all trees of a step, in one native call: see walk.h."""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specinfer.core.tree import TokenTree
from specinfer.ops.cpu.choice import choose_token
from specinfer.ops.cpu.library import address, call

_UNKNOWN = -3  # as in walk.h


class _Walks(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("logits", "first", "tokens", "parents", "seeds", "positions")),
        *((name, ctypes.c_void_p) for name in ("temperatures", "chosen", "path", "lengths", "next")),
    )


def walk_trees(
    logits: Sequence[Tensor],
    trees: Sequence[TokenTree],
    noises: Sequence[tuple[int, int]],
    temperatures: Sequence[float],
) -> list[tuple[tuple[int, ...], int]]:
    """Return the accepted path of each tree and the token after it, or `NAN` or `NO_VALID_TOKEN`.

    Args:
        logits: For each tree, [nodes, vocab] float32 on the CPU.
        trees: The trees.
        noises: For each tree, the request's seed and the position of the token after the root.
        temperatures: For each tree, the temperature; 0 is greedy, without noise.
    """
    count, rows = len(trees), [row.contiguous() for row in logits]
    first = list(accumulate(map(len, trees), initial=0))
    tokens, parents = (np.concatenate([tree.arrays[i] for tree in trees]) for i in range(2))
    chosen, path = np.full((2, first[-1]), _UNKNOWN, dtype=np.int64)
    lengths, following = np.empty((2, count), dtype=np.int64)
    arrays: list[npt.NDArray[Any]] = [
        np.array([row.data_ptr() for row in rows], dtype=np.uint64),
        np.array(first, dtype=np.int64),
        tokens,
        parents,
        np.array([seed for seed, _ in noises], dtype=np.uint64),
        np.array([position for _, position in noises], dtype=np.int64),
        np.array(temperatures, dtype=np.float32),
        *(chosen, path, lengths, following),
    ]
    walks = _Walks(count, rows[0].shape[1], *map(address, arrays))
    while True:
        call("specinfer_walk", ctypes.addressof(walks))
        undecided = (following == _UNKNOWN).nonzero()[0].tolist()
        for i in undecided:
            length = int(lengths[i])
            node = int(path[first[i] + length - 1]) if length else 0
            seed, position = noises[i]
            scores = rows[i][node] if temperatures[i] == 1.0 else rows[i][node] / temperatures[i]
            chosen[first[i] + node] = choose_token(scores, (seed, position + length))
        if not undecided:
            break
    ends = zip(first, lengths.tolist(), following.tolist(), strict=False)
    return [(tuple(path[start : start + length].tolist()), token) for start, length, token in ends]
