"""The walks of the rules that use random numbers, down all trees of a step in one native call: see toss.h.

What a token was drawn from is given to native code as five numbers: the addresses of the tokens, of their probabilities
(before the removal of those drawn earlier), their number, the address of the places that were drawn earlier, and how
many these are. All are 0 if it was chosen.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specinfer.core.draws import POOL, DistributionPool, Draws, Ints
from specinfer.core.tree import TokenTree
from specinfer.ops.cpu.library import call


class _Tosses(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("logits", "first", "tokens", "parents", "first_draw", "draws")),
        *((name, ctypes.c_void_p) for name in ("sources", "temperatures", "traverses", "states")),
        *((name, ctypes.c_void_p) for name in ("path", "lengths", "next")),
    )


@runtime_checkable
class _AddressedPool(Protocol):
    """A pool that knows where its distributions are."""

    def sources(self, numbers: Ints, /) -> Ints: ...


def toss_trees(
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
        walks: For each tree, the number of its rule's walk, as `core.rules` has it.
        states: For each tree, the state of its random numbers.
    """
    count, rows, arrays = len(trees), [one.contiguous() for one in logits], [tree.arrays for tree in trees]
    draws = [one.draws for one in arrays]
    first, first_draw = (
        np.array(list(accumulate(map(len, several), initial=0)), dtype=np.int64)
        for several in (trees, [one.nodes for one in draws])
    )
    sources, alive = _sources(draws)
    uniforms, path = np.array(states, dtype=np.uint64), np.empty(first[-1], dtype=np.int64)
    lengths, following = np.empty((2, count), dtype=np.int64)
    inputs: list[npt.NDArray[Any]] = [
        np.array([one.data_ptr() for one in rows], dtype=np.uint64), first,
        *(np.concatenate([one[i] for one in arrays]) for i in range(2)),
        first_draw, np.concatenate([one.nodes for one in draws]), sources,
        np.array(temperatures, dtype=np.float32), np.array(walks, dtype=np.uint8), uniforms,
        path, lengths, following,
    ]  # fmt: skip
    tosses = _Tosses(count, rows[0].shape[1], *(array.ctypes.data for array in inputs))
    call("specinfer_toss", ctypes.addressof(tosses))
    del alive
    starts, nodes = first.tolist(), path.tolist()
    return [
        (tuple(nodes[start : start + length]), token, state)
        for start, length, token, state in zip(
            starts, lengths.tolist(), following.tolist(), uniforms.tolist(), strict=False
        )
    ]


def sources_at(tokens: Ints, probs: npt.NDArray[Any], places: Ints, rows: Ints, num_removed: Ints) -> Ints:
    """Return what tokens were drawn from, [draws, 5], with addresses that are valid as long as the arrays are kept.

    Args:
        tokens, probs: [nodes, support] what the children of each node are drawn from, int64 and float64.
        places: [nodes, most] int64 indices of those drawn, in draw order.
        rows: [draws] the node of each draw.
        num_removed: [draws] how many of its places were drawn before and removed.
    """
    found = np.empty((len(rows), 5), dtype=np.int64)
    for column, array in ((0, tokens), (1, probs), (3, places)):
        assert array.shape[1] <= 1 or array.strides[1] == array.itemsize  # of a single column NumPy's is arbitrary
        found[:, column] = array.ctypes.data + rows * array.strides[0]
    found[:, 2], found[:, 4] = tokens.shape[1], num_removed
    return found


def _sources(draws: Sequence[Draws]) -> tuple[Ints, list[object]]:
    """Return what all draws were drawn from, [draws, 5], and the arrays that the addresses are of."""
    found = np.zeros((sum(len(one.nodes) for one in draws), 5), dtype=np.int64)
    pools: dict[int, tuple[DistributionPool, list[Ints], list[Ints]]] = {}
    start, alive = 0, list[object]()
    for one in draws:
        if one.numbers is not None:
            of_pool = np.where(one.numbers >= 0, one.numbers >> POOL, -1)
            for i, pool in enumerate(one.pools):
                at = (of_pool == i).nonzero()[0]
                _, places, numbers = pools.setdefault(id(pool), (pool, [], []))
                places.append(at + start)
                numbers.append(one.numbers[at] & (1 << POOL) - 1)
        start += len(one.nodes)
    for pool, places, numbers in pools.values():
        at, number = np.concatenate(places), np.concatenate(numbers)
        found[at] = pool.sources(number) if isinstance(pool, _AddressedPool) else _one_by_one(pool, number, alive)
    return found, alive


def _one_by_one(pool: DistributionPool, numbers: Ints, alive: list[object]) -> Ints:
    found = np.zeros((len(numbers), 5), dtype=np.int64)
    for i, number in enumerate(numbers.tolist()):
        distribution = pool[number]
        assert distribution is not None
        ids = np.ascontiguousarray(distribution.token_ids, dtype=np.int64)
        probs = np.ascontiguousarray(distribution.probs, dtype=np.float64)
        removed = np.array(distribution.removed, dtype=np.int64)
        alive += ids, probs, removed
        found[i] = ids.ctypes.data, probs.ctypes.data, len(ids), removed.ctypes.data, len(removed)
    return found
