"""The union of several drafters' trees for all requests of a step, and its pruning, in one native call: see merge.h."""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import CHOSEN, POOL, DistributionPool, Draws, Floats, Ints
from specinfer.core.tree import TokenTree, TreeArrays
from specinfer.ops.cpu.library import address, addresses, library

_RESULTS = ("tokens", "parents", "depths", "ranks")


class _Merge(ctypes.Structure):
    _fields_ = (
        ("requests", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("first_tree", "first_node", "first_draw", "tokens", "parents")),
        *((name, ctypes.c_void_p) for name in ("draw_nodes", "sources", "confidence", "heights", "slopes")),
        ("sources_count", ctypes.c_int64),
        ("middles", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("middles_count", "ranks")),
        *((name, ctypes.c_void_p) for name in ("capacities", "min_path_prob", "rival_heights", "rival_slopes")),
        *((f"result_{name}", ctypes.c_void_p) for name in ("first", "first_draw", *_RESULTS)),
        *((f"result_{name}", ctypes.c_void_p) for name in ("alone", "draw_nodes", "draws")),
    )


class MergeRules(NamedTuple):
    """The numbers by which the nodes of merged trees are ranked.

    Attributes:
        capacities: [requests] most nodes of each tree with its root; 0 for a tree that keeps all.
        min_path_prob: [requests] nodes that are less likely to be accepted are left out.
        sources: For each request, the place in `lines` of each of its drafters, by name.
        lines: Heights and slopes of the acceptance probabilities of each source, as `Calibration.lines`.
        rivals: For each request, heights and slopes by the rank among all siblings.
        middles, ranks: Where the lines meet, and the ranks that have lines of their own.
    """

    capacities: Sequence[int]
    min_path_prob: Sequence[float]
    sources: Sequence[dict[str, int]]
    lines: Sequence[tuple[Floats, Floats]]
    rivals: Sequence[tuple[Floats, Floats]]
    middles: Floats
    ranks: int


class Merged(NamedTuple):
    """A merged tree, and of each node its rank among its siblings and the probability that one drafter is right.

    They have no meaning in a tree that keeps all its nodes.
    """

    tree: TokenTree
    ranks: Ints
    alone: Floats


def merge_trees(groups: Sequence[Sequence[TokenTree]], rules: MergeRules) -> list[Merged]:
    """Return the union of each request's trees, cut to what its rules keep.

    Args:
        groups: At least one tree of each request; those of a request have the same root.
    """
    loaded = library()
    arrays = [tree.arrays for trees in groups for tree in trees]
    draws = [tree.draws for tree in arrays]
    first_tree, first_node, first_draw = (
        np.array(list(accumulate(map(len, several), initial=0)), dtype=np.int64)
        for several in (groups, [tree.tokens for tree in arrays], [draw.nodes for draw in draws])
    )
    tokens, parents = (np.concatenate([tree[i] for tree in arrays]) for i in range(2))
    draw_nodes, confidence = (np.concatenate([draw[i] for draw in draws]) for i in (0, 2))
    makers, places = _makers(groups, draws, first_draw, rules.sources)
    sizes = len(groups) + 1, len(tokens), len(draw_nodes)
    results = np.empty(2 * sizes[0] + 4 * sizes[1] + 2 * sizes[2], dtype=np.int64)
    bounds = results[: 2 * sizes[0]].reshape(2, -1)
    of_nodes = results[2 * sizes[0] : len(results) - 2 * sizes[2]].reshape(4, -1)
    of_draws = results[len(results) - 2 * sizes[2] :].reshape(2, -1)
    alone = np.empty(sizes[1])
    inputs: list[npt.NDArray[Any]] = [
        first_tree, first_node, first_draw, tokens, parents, draw_nodes, makers.sources, confidence,
        *(np.array(addresses([pair[i] for pair in rules.lines]), dtype=np.int64) for i in range(2)),
        rules.middles, np.array(rules.capacities, dtype=np.int64), np.array(rules.min_path_prob, dtype=np.float64),
        *(np.array(addresses([pair[i] for pair in rules.rivals]), dtype=np.int64) for i in range(2)),
    ]  # fmt: skip
    at = [address(array) for array in inputs]
    call = _Merge(
        len(groups), *at[:10], len(rules.lines), at[10], len(rules.middles), rules.ranks, *at[11:],
        *(address(row) for row in (*bounds, *of_nodes, alone, *of_draws)),
    )  # fmt: skip
    loaded.specinfer_merge(ctypes.addressof(call))
    columns = _Columns(makers.names, confidence, *_numbers(draws))
    return _merged(bounds.tolist(), of_nodes, alone, of_draws, columns, tuple(places))


class _Makers(NamedTuple):
    """Places of each draw's drafter in the names of all, and of its source in `MergeRules.lines`."""

    names: Ints
    sources: Ints


class _Columns(NamedTuple):
    """Columns that draws keep when trees are merged."""

    makers: Ints
    confidence: Floats
    numbers: Ints | None
    pools: tuple[DistributionPool, ...]


def _makers(
    groups: Sequence[Sequence[TokenTree]],
    draws: Sequence[Draws],
    first_draw: Ints,
    sources: Sequence[dict[str, int]],
) -> tuple[_Makers, dict[str, int]]:
    """Return the drafter of each draw, and the place of each drafter's name among all."""
    places: dict[str, int] = {}
    table, starts = list[tuple[int, int]](), list[int]()
    of_trees = (source for trees, source in zip(groups, sources, strict=True) for _ in trees)
    for draw, source in zip(draws, of_trees, strict=True):
        starts.append(len(table))
        table += [(places.setdefault(name, len(places)), source[name]) for name in draw.names]
    at = np.concatenate([draw.makers for draw in draws]) + np.repeat(np.array(starts), np.diff(first_draw))
    columns = np.array(table, dtype=np.int64).reshape(-1, 2).T
    return _Makers(*(np.ascontiguousarray(column[at]) for column in columns)), places


def _numbers(draws: Sequence[Draws]) -> tuple[Ints | None, tuple[DistributionPool, ...]]:
    """Return the numbers of all distributions, and the pools that they are in."""
    if all(draw.numbers is None for draw in draws):
        return None, ()
    pools: dict[int, tuple[int, DistributionPool]] = {}
    columns = []
    for draw in draws:
        if draw.numbers is None:
            columns.append(np.full(len(draw.nodes), CHOSEN))
            continue
        place = np.array([pools.setdefault(id(pool), (len(pools), pool))[0] for pool in draw.pools])
        moved = place[draw.numbers >> POOL] << POOL | draw.numbers & (1 << POOL) - 1
        columns.append(np.where(draw.numbers >= 0, moved, CHOSEN))
    return np.concatenate(columns), tuple(pool for _, pool in pools.values())


def _merged(
    bounds: list[list[int]], of_nodes: Ints, alone: Floats, of_draws: Ints, columns: _Columns, names: tuple[str, ...]
) -> list[Merged]:
    (starts, first_draws), (tokens, parents, depths, ranks), (nodes, kept) = bounds, of_nodes, of_draws
    kept, nodes = kept[: first_draws[-1]], nodes[: first_draws[-1]]
    makers, confidence = columns.makers[kept], columns.confidence[kept]
    numbers = None if columns.numbers is None else columns.numbers[kept]
    merged = []
    for i in range(len(starts) - 1):
        node, draw = slice(starts[i], starts[i + 1]), slice(first_draws[i], first_draws[i + 1])
        drawn = None if numbers is None else numbers[draw]
        draws = Draws(nodes[draw], makers[draw], confidence[draw], names, drawn, columns.pools)
        tree = TokenTree.from_arrays(TreeArrays(tokens[node], parents[node], depths[node], draws))
        merged.append(Merged(tree, ranks[node], alone[node]))
    return merged
