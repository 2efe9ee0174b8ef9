"""The operations of a device in plain PyTorch, which tests install on machines without a GPU."""

from collections.abc import Callable
from typing import Any, cast

from reference import draft, layers, processing, trees, walks
from specinfer.ops import kernels, layer_ops, tree_ops

_MODULES = (draft, layers, processing, trees, walks)


def _reference_of(name: str) -> Callable[..., Any]:
    for module in _MODULES:
        if hasattr(module, name):
            return cast(Callable[..., Any], getattr(module, name))
    names = ", ".join(module.__name__ for module in _MODULES)
    raise NotImplementedError(f"the operation {name} has no reference; write it in one of {names}")


OPERATIONS = {name: _reference_of(name) for name in (*tree_ops.OPERATIONS, *layer_ops.OPERATIONS)}


def by_device(name: str) -> Callable[..., Any]:
    """Return an operation that runs its kernel for tensors on a GPU, and the reference for others."""

    def run(first: Any, *args: Any, **options: Any) -> Any:
        kernel = kernels.kernel(name) if kernels.tensor_of(first).is_cuda else OPERATIONS[name]
        return kernel(first, *args, **options)

    return run


def install() -> None:
    """Let tensors on a CPU have the operations of a device, from here on."""
    kernels.back_end = by_device
