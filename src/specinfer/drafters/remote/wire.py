"""Messages between rank 0 and a drafter on another rank: a header as JSON, and arrays.

Bits of arrays are kept, and JSON keeps those of single numbers, so that a tree is the same wherever it was grown. The
parameters of a request are sent once.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.draws import DrawnFrom, Draws, Floats
from specinfer.core.tree import TokenTree, TreeArrays, TreeBudget

Array = npt.NDArray[Any]


class RequestUpdate(NamedTuple):
    """The progress of a request that the drafter knows.

    Attributes:
        tokens: The tokens emitted since the last message, or None if the request ended or was preempted.
    """

    key: int
    tokens: Sequence[int] | None


class CalibrationState(NamedTuple):
    """The calibration state of the drafter's tokens, for greedy requests or for sampled ones."""

    is_sampled: bool
    state: Floats


class TreeRequest(NamedTuple):
    """A request that needs a tree.

    Attributes:
        about: The request's description; empty if it was sent before.
        tokens: The tokens that became known since the last message.
        first_draw: The number of the tree's first draw, as `DraftState.begin_draws` counts.
    """

    key: int
    about: str
    tokens: Sequence[int]
    first_draw: int
    budget: TreeBudget


class DraftRequest(NamedTuple):
    """The updates for one drafter, in this order, and the trees it is to grow."""

    updates: Sequence[RequestUpdate] = ()
    learned: Sequence[CalibrationState] = ()
    tree_requests: Sequence[TreeRequest] = ()


def pack(header: object, arrays: Sequence[Array] = ()) -> Tensor:
    """Return a message, [count] int32."""
    text = json.dumps([header, [(array.dtype.str, array.shape) for array in arrays]]).encode()
    parts = [len(text).to_bytes(4, "little"), text, *(array.tobytes() for array in arrays)]
    message = b"".join(part + bytes(-len(part) % 4) for part in parts)
    return torch.from_numpy(np.frombuffer(message, dtype=np.int32).copy())


def unpack(message: Tensor) -> tuple[Any, Iterator[Array]]:
    """Return what was passed to `pack`."""
    content = message.numpy().tobytes()
    size = int.from_bytes(content[:4], "little")
    header, forms = json.loads(content[4 : 4 + size])

    def arrays() -> Iterator[Array]:
        start = 4 + size + -size % 4
        for dtype, shape in forms:
            array = np.frombuffer(content, dtype, int(np.prod(shape)), start).reshape(shape).copy()
            start += array.nbytes + -array.nbytes % 4
            yield array

    return header, arrays()


def write_draft_request(drafter: int, draft_request: DraftRequest) -> Tensor:
    """Return a message to this drafter, [count] int32, that is answered by trees or a failure."""
    updates, learned, tree_requests = draft_request
    trees = [(*tree_request[:4], asdict(tree_request.budget) | {"drafters": None}) for tree_request in tree_requests]
    header = {"drafter": drafter, "draft": [updates, [calibration.is_sampled for calibration in learned], trees]}
    return pack(header, [calibration.state for calibration in learned])


def read_draft_request(draft: Any, states: Iterator[Array]) -> DraftRequest:
    """Return what was passed to `write_draft_request`, of its header and arrays."""
    updates, learned, trees = draft
    return DraftRequest(
        [RequestUpdate(*update) for update in updates],
        [CalibrationState(*state) for state in zip(learned, states, strict=True)],
        [
            TreeRequest(
                key,
                about,
                tokens,
                first_draw,
                TreeBudget(**budget | {name: tuple(budget[name]) for name in ("widths", "row_prices")}),
            )
            for key, about, tokens, first_draw, budget in trees
        ],
    )


def write_trees(trees: Sequence[TokenTree]) -> Tensor:
    """Return a message with the trees of one drafter, [count] int32; what trees have in common is sent once."""
    pools = {id(pool): pool for tree in trees for pool in tree.arrays.draws.pools if isinstance(pool, DrawnFrom)}
    places, used, arrays = {key: i for i, key in enumerate(pools)}, [], list[Array]()
    for pool in pools.values():
        arrays += pool.token_ids, pool.probs, pool.places
    for tree in trees:
        tokens, parents, depths, draws = tree.arrays
        used.append(None if draws.numbers is None else [places.get(id(pool)) for pool in draws.pools])
        arrays += tokens, parents, depths, draws.nodes, draws.confidence
        arrays += () if draws.numbers is None else (draws.numbers,)
    return pack({"replaced": [pool.is_replaced for pool in pools.values()], "pools": used}, arrays)


def write_failure(why: str) -> Tensor:
    """Return a message that there are no trees, [count] int32."""
    return pack({"failure": why})


def read_trees(message: Tensor, drafter: str) -> list[TokenTree]:
    """Return the trees passed to `write_trees`; all draft tokens come from this drafter.

    Raises:
        RuntimeError: The message is from `write_failure`.
    """
    header, arrays = unpack(message)
    if "failure" in header:
        raise RuntimeError(header["failure"])
    pools = [DrawnFrom(next(arrays), next(arrays), next(arrays), replaced) for replaced in header["replaced"]]
    trees = []
    for used in header["pools"]:
        tokens, parents, depths, nodes, confidence = (next(arrays) for _ in range(5))
        draws = Draws(nodes, np.zeros_like(nodes), confidence, (drafter,))
        if used is not None:
            of = tuple(() if place is None else pools[place] for place in used)
            draws = draws._replace(numbers=next(arrays), pools=of)
        trees.append(TokenTree.from_arrays(TreeArrays(tokens, parents, depths, draws)))
    return trees
