"""Additions of adapters to the modules of a model: hooks of linear layers, which act in passes with adapters only."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from torch import Tensor, nn

from specinfer.ops import AdapterRows, AdapterRuns

_RUNS: ContextVar[AdapterRuns | AdapterRows | None] = ContextVar("runs", default=None)


def hook(module: nn.Module, number: int) -> None:
    """Let adapters add to a linear layer, which has this number in their tables."""
    # Before the sum over ranks that have slices of the layer: each adds a part.
    module.register_forward_hook(partial(_add, number), prepend=True)


@contextmanager
def adapting(runs: AdapterRuns | AdapterRows | None) -> Iterator[None]:
    """Let hooks add what the adapters of these rows add, within the context."""
    if runs is None:
        yield
        return
    token = _RUNS.set(runs)
    try:
        yield
    finally:
        _RUNS.reset(token)


def _add(number: int, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    runs = _RUNS.get()
    if runs is not None:
        runs.add(number, inputs[0].reshape(-1, inputs[0].shape[-1]), output.view(-1, output.shape[-1]))
    return output
