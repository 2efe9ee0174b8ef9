"""Ranks as threads of one process: a `Group` without sockets, and models split over such ranks."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from specinfer.core.tree import Draw, TokenTree
from specinfer.model.adapters.peft_folder import Pair, Shape
from specinfer.model.adapters.sites import AdapterSites
from specinfer.model.batch import Piece, pack
from specinfer.model.forward import forward
from specinfer.model.kv_tensors import KVTensors
from specinfer.model.load import LoadedModel, load_model
from specinfer.ops import AdapterTable
from specinfer.parallel.group import Alone, ShardSpec
from tiny import random_prompts

WHOLE = (1, 1)
_CPU = torch.device("cpu")
_PATIENCE = 60  # seconds, after which a rank that waits for others gives up
_NUM_SLOTS = 64
_TREE = TokenTree((7, 3, 5, 9, 2), (-1, 0, 0, 1, 1), tuple(Draw(i, "a") for i in range(1, 5)))

Item = TypeVar("Item")
Result = TypeVar("Result")


_turn, _own = threading.Lock(), threading.local()


class _Barrier(threading.Barrier):
    """A barrier at which a thread of `at_once(in_turns=True)` lets another one run while it waits."""

    def wait(self, timeout: float | None = None) -> int:
        if not getattr(_own, "has_turn", False):
            return super().wait(timeout)
        _turn.release()
        try:
            return super().wait(timeout)
        finally:
            _turn.acquire()


class _Meeting:
    """Where the ranks of a group lay down their tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tensors: list[Tensor | None] = [None] * size
        self.barrier = _Barrier(size)


class ThreadGroup:
    """One rank's view of it.

    Attributes:
        num_sums: How often this rank was in `all_reduce`.
    """

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, meeting.size
        self.num_sums = 0

    @classmethod
    def make(cls, size: int) -> "list[ThreadGroup] | list[Alone]":
        meeting = _Meeting(size)
        return [cls(meeting, rank) for rank in range(size)] if size > 1 else [Alone()]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.tensors[self.rank] = tensor.clone()
        meeting.barrier.wait(_PATIENCE)
        found = [one for one in meeting.tensors if one is not None]
        meeting.barrier.wait(_PATIENCE)
        assert all((one.shape, one.dtype) == (tensor.shape, tensor.dtype) for one in found)
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        self.num_sums += 1
        first, *others = self.all_gather(tensor)
        total = first.clone()
        for one in others:
            total += one
        return total

    def send(self, tensor: Tensor, to: int) -> None:
        raise AssertionError("hidden states go from hand to hand here")

    def recv(self, tensor: Tensor, source: int) -> None:
        raise AssertionError("hidden states go from hand to hand here")

    def abort(self) -> None:
        """Lets nobody wait for this rank any more."""
        self._meeting.barrier.abort()


def make_shards(tensor: int, stages: int) -> list[list[ShardSpec]]:
    """Of each stage, from the first, the shares of its ranks."""
    return [[ShardSpec(group, stage, stages) for group in ThreadGroup.make(tensor)] for stage in range(stages)]


def at_once(work: Callable[[Item], Result], items: Sequence[Item], *, in_turns: bool = False) -> list[Result]:
    """One thread for each item, all at the same time; raises the first error that is not of waiting for others.

    Args:
        in_turns: A thread runs until it waits for the others of its group, or ends.
    """

    def run(item: Item) -> Result:
        if not in_turns:
            return work(item)
        with _turn:
            _own.has_turn = True
            return work(item)

    with ThreadPoolExecutor(len(items)) as pool:
        futures = [pool.submit(run, item) for item in items]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


class Ranks:
    """All ranks' parts of a model, loaded one after the other: loading waits for nobody.

    Args:
        split: Ranks of a tensor group, and stages.
        options: Of `load_model`.
    """

    def __init__(
        self,
        folder: Path,
        split: tuple[int, int],
        quantization: str | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.stages = [
            [load_model(folder, dtype, _CPU, quantization, shard=shard, **options) for shard in stage]
            for stage in make_shards(*split)
        ]
        self._stores = {id(one): KVTensors(one.layer_shapes, _NUM_SLOTS, one.dtype, _CPU) for one in self.all}
        self.adapters: dict[int, AdapterTable] = {}  # of every other piece, by the identity of a rank's model

    @property
    def all(self) -> list[LoadedModel]:
        return [loaded for stage in self.stages for loaded in stage]

    def __call__(self, pieces: Sequence[Piece]) -> Tensor:
        """[rows, vocab] logits."""
        hidden: list[Tensor | None] = [None] * len(self.stages[0])

        def compute(job: tuple[LoadedModel, Tensor | None]) -> Tensor:
            loaded, given = job
            try:
                table = self.adapters.get(id(loaded))
                own = [piece if i % 2 else replace(piece, adapter=table) for i, piece in enumerate(pieces)]
                with torch.inference_mode():
                    batch = pack(own, self._stores[id(loaded)], _CPU, native=loaded.native)
                    return forward(loaded.model, batch, given)
            except BaseException:
                if isinstance(loaded.shard.tensor, ThreadGroup):
                    loaded.shard.tensor.abort()
                raise

        for stage in self.stages:
            hidden = list(at_once(compute, list(zip(stage, hidden, strict=True))))
        assert hidden[0] is not None
        return hidden[0]

    def logits(self) -> list[Tensor]:
        """Of all of `passes`."""
        return [self(pieces) for pieces in passes()]

    def close(self) -> None:
        for loaded in self.all:
            if loaded.stream is not None:
                loaded.stream.close()


def passes() -> list[list[Piece]]:
    """Two prompts, one of them in two chunks; then a tree on that one, and one token more of the other."""
    first, second = random_prompts((9, 5), seed=3)
    slots = [np.arange(0, 30), np.arange(30, 60)]
    none = np.arange(0)
    return [
        [
            Piece.from_span(first[:4], None, none, slots[0][:4]),
            Piece.from_span(second, TokenTree.chain(second[-1], []), none, slots[1][:5]),
        ],
        [
            Piece.from_span([*first[4:], 7], _TREE, slots[0][:4], slots[0][4:14]),
            Piece.from_span([3], TokenTree.chain(3, []), slots[1][:5], slots[1][5:6]),
        ],
    ]


def assert_close_each(
    found: Iterable[Tensor], wanted: Iterable[Tensor], rtol: float = 1e-5, atol: float = 1e-5
) -> None:
    """Check the logits of each pass; by default they may differ in the order of sums alone."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def check_shards(folder: Path, splits: Iterable[tuple[int, int]], **options: Any) -> None:
    """Check that ranks compute what transformers does with the whole model; see `Ranks`."""
    wanted = Ranks(folder, WHOLE, native=False).logits()
    for split in splits:
        assert_close_each(Ranks(folder, split, **options).logits(), wanted)


def check_adapted_shards(folder: Path, splits: Iterable[tuple[int, int]]) -> None:
    """Check that the slices of an adapter that ranks add sum up to what the whole model adds."""
    whole = Ranks(folder, WHOLE)
    plain, sites = whole.logits(), AdapterSites(whole.all[0])
    pairs = random_pairs(sites.linears)
    whole.adapters[id(whole.all[0])] = sites.table(pairs)
    wanted = whole.logits()
    assert not torch.allclose(plain[1], wanted[1], atol=1e-2)
    for split in splits:
        ranks, linears = Ranks(folder, split), {}
        for loaded in ranks.all:
            own = AdapterSites(loaded)
            linears |= own.linears
            ranks.adapters[id(loaded)] = own.table(pairs)
        assert linears == sites.linears
        assert_close_each(ranks.logits(), wanted, rtol=1e-4, atol=1e-4)


def random_pairs(linears: Mapping[str, Shape]) -> dict[str, Pair]:
    """Matrices of several ranks for linear layers."""
    torch.manual_seed(1)
    found = {}
    for i, (name, shape) in enumerate(linears.items()):
        rank = 1 + i % 5
        down, up = torch.randn(rank, shape.inputs), torch.randn(shape.outputs, rank)
        found[name] = Pair(down / shape.inputs**0.5, up * 0.3)
    return found
