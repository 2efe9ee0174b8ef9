"""The walks of the rules that use random numbers, down all trees of a step in one native call: see stochastic_walk.h.

What a token was drawn from is given to native code as five numbers, see `DrawnFrom.addresses`; all are 0 if it was
chosen.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specinfer.core.draws import POOL, DistributionPool, DrawnFrom, Draws, Ints
from specinfer.core.tree import TokenTree
from specinfer.ops.cpu.library import call

NUM_WALKS = 2  # in stochastic_walk.h: 0 is multi-step, 1 is traversal


class _StochasticWalks(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("logits", "first", "tokens", "parents", "first_draw", "draws")),
        *((name, ctypes.c_void_p) for name in ("sources", "temperatures", "traverses", "states")),
        *((name, ctypes.c_void_p) for name in ("path", "lengths", "next")),
    )


def walk_stochastic(
    logits: Sequence[Tensor],
    trees: Sequence[TokenTree],
    temperatures: Sequence[float],
    walks: Sequence[int],
    states: Sequence[int],
) -> list[tuple[tuple[int, ...], int, int]]:
    """Return the accepted path of each tree, the token after it, or `NAN` or `NO_VALID_TOKEN`, and the new state.

    Args:
        logits: For each tree, [nodes, vocab] float32 on the CPU.
        trees: The trees.
        temperatures: For each tree, above 0.
        walks: For each tree, the number of its rule's walk, below `NUM_WALKS`.
        states: For each tree, the state of its random numbers.
    """
    assert all(0 <= walk < NUM_WALKS for walk in walks)
    count, rows, arrays = len(trees), [row.contiguous() for row in logits], [tree.arrays for tree in trees]
    draws = [tree.draws for tree in arrays]
    first, first_draw = (
        np.array(list(accumulate(map(len, several), initial=0)), dtype=np.int64)
        for several in (trees, [draw.nodes for draw in draws])
    )
    sources, alive = _sources(draws)
    uniforms, path = np.array(states, dtype=np.uint64), np.empty(first[-1], dtype=np.int64)
    lengths, following = np.empty((2, count), dtype=np.int64)
    inputs: list[npt.NDArray[Any]] = [
        np.array([row.data_ptr() for row in rows], dtype=np.uint64), first,
        *(np.concatenate([tree[i] for tree in arrays]) for i in range(2)),
        first_draw, np.concatenate([draw.nodes for draw in draws]), sources,
        np.array(temperatures, dtype=np.float32), np.array(walks, dtype=np.uint8), uniforms,
        path, lengths, following,
    ]  # fmt: skip
    arguments = _StochasticWalks(count, rows[0].shape[1], *(array.ctypes.data for array in inputs))
    call("specinfer_walk_stochastic", ctypes.addressof(arguments))
    del alive
    starts, nodes = first.tolist(), path.tolist()
    return [
        (tuple(nodes[start : start + length]), token, state)
        for start, length, token, state in zip(
            starts, lengths.tolist(), following.tolist(), uniforms.tolist(), strict=False
        )
    ]


def _sources(draws: Sequence[Draws]) -> tuple[Ints, list[object]]:
    """Return what all draws were drawn from, [draws, 5], and the arrays that the addresses are of."""
    sources = np.zeros((sum(len(draw.nodes) for draw in draws), 5), dtype=np.int64)
    pools: dict[int, tuple[DistributionPool, list[Ints], list[Ints]]] = {}
    start, alive = 0, list[object]()
    for draw in draws:
        if draw.numbers is not None:
            of_pool = np.where(draw.numbers >= 0, draw.numbers >> POOL, -1)
            for i, pool in enumerate(draw.pools):
                at = (of_pool == i).nonzero()[0]
                _, places, numbers = pools.setdefault(id(pool), (pool, [], []))
                places.append(at + start)
                numbers.append(draw.numbers[at] & (1 << POOL) - 1)
        start += len(draw.nodes)
    for pool, places, numbers in pools.values():
        at, number = np.concatenate(places), np.concatenate(numbers)
        sources[at] = pool.addresses(number) if isinstance(pool, DrawnFrom) else _one_by_one(pool, number, alive)
    return sources, alive


def _one_by_one(pool: DistributionPool, numbers: Ints, alive: list[object]) -> Ints:
    sources = np.zeros((len(numbers), 5), dtype=np.int64)
    for i, number in enumerate(numbers.tolist()):
        distribution = pool[number]
        assert distribution is not None
        ids = np.ascontiguousarray(distribution.token_ids, dtype=np.int64)
        probs = np.ascontiguousarray(distribution.probs, dtype=np.float64)
        removed = np.array(distribution.removed, dtype=np.int64)
        alive += ids, probs, removed
        sources[i] = ids.ctypes.data, probs.ctypes.data, len(ids), removed.ctypes.data, len(removed)
    return sources
