"""Captured graphs without a GPU: operations are recorded as they run, and replayed into the same tensors."""

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _storages(values: Any) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in tree_leaves(values) if isinstance(one, Tensor)}


class Recorder(TorchDispatchMode):
    """A mode in which graphs record what this thread does while they are captured."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        graph = getattr(_capturing, "graph", None)
        if graph is not None:
            graph.calls.append((func, args, kwargs or {}, result))
        return result


_capturing = threading.local()


class RecordedGraph:
    """A graph as PyTorch's."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        _capturing.graph = self

    def capture_end(self) -> None:
        _capturing.graph = None

    def replay(self) -> None:
        _capturing.num_replays = num_replays() + 1
        for func, args, kwargs, result in self.calls:
            known = _storages((args, kwargs))
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                # Views and what is modified in place are there already.
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in known:
                    old.copy_(new)

    def own_results(self) -> list[Tensor]:
        """Return a tensor of each piece of memory that the graph has allocated."""
        found: dict[int, Tensor] = {}
        for _, args, kwargs, result in self.calls:
            known = _storages((args, kwargs))
            own = [one for one in tree_leaves(result) if isinstance(one, Tensor) and one.numel()]
            found |= {place: one for one in own if (place := one.untyped_storage().data_ptr()) not in known}
        return list(found.values())


def num_replays() -> int:
    """Return the number of replays by this thread."""
    return getattr(_capturing, "num_replays", 0)


class _Stream:
    def wait_stream(self, other: "_Stream") -> None:
        pass

    def synchronize(self) -> None:
        pass


def record_graphs(patch: pytest.MonkeyPatch) -> None:
    """Let `Graphs` of a GPU capture what runs on the CPU."""
    zeros = torch.zeros
    _device_constructors()  # which keeps for good what it finds first
    for place, name, value in (
        (torch.cuda, "CUDAGraph", RecordedGraph),
        (torch.cuda, "Stream", lambda _: _Stream()),
        (torch.cuda, "current_stream", lambda _: _Stream()),
        (torch.cuda, "graph_pool_handle", lambda: (0, 0)),
        (torch.cuda, "device", lambda _: contextlib.nullcontext()),
        (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
        (torch.cuda, "memory_reserved", lambda _: 0),
        (torch, "zeros", lambda *sizes, **options: zeros(*sizes, **(options | {"device": "cpu"}))),
    ):
        patch.setattr(place, name, value)
