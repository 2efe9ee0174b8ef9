"""Operations on tensors of GPUs, by name: each runs its Triton kernel.

Arguments and results are documented at the kernels in `ops/triton`. Tests hold every kernel to a slow version in
`tests/reference`, which they install as the back end on machines without a GPU.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.ops.triton import why_not_on

_modules: dict[str, str] = {}  # of `ops/triton`, by the operations whose kernels they have


def tensor_of(first: Any) -> Tensor:
    """Return a tensor of an operation's first argument, which may have several."""
    return first if isinstance(first, Tensor) else cast(Tensor, first[0])


@cache
def kernel(name: str) -> Callable[..., Any]:
    """Return an operation that runs on the GPU of its first argument, which becomes the thread's current one.

    Raises:
        ModelError: Triton cannot run there.
    """
    load = cache(lambda: getattr(import_module(f"specinfer.ops.triton.{_modules[name]}"), name))

    def run(first: Any, *args: Any, **options: Any) -> Any:
        device = tensor_of(first).device
        if device.type == "cuda":
            _use(device)
        return load()(first, *args, **options)

    return run


def _use(device: torch.device) -> None:
    if (reason := why_not_on(device)) is not None:
        raise ModelError(f"this model needs Triton, which cannot run on {device}: {reason}")
    if torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device)  # Triton launches kernels there


back_end: Callable[[str], Callable[..., Any]] = kernel


def operations(modules: Mapping[str, str]) -> dict[str, Callable[..., Any]]:
    """Return the operations of these names, whose kernels are in these modules of `ops/triton`."""
    _modules.update(modules)
    return {name: _operation(name) for name in modules}


def _operation(name: str) -> Callable[..., Any]:
    return lambda *args, **options: back_end(name)(*args, **options)
