"""A checkpoint whose decoder layers are read one at a time, when they are needed."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from specinfer.errors import ModelError
from specinfer.model.offload.shards import Shards, Source
from specinfer.model.offload.unread import Unread, source_of

_NUMBERED = re.compile(r"\.\d+\.")  # what belongs to one of several layers


class Checkpoint:
    """A folder's weights.

    Raises:
        ModelError: They cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards = Shards(folder)

    def state_dict(self) -> dict[str, Tensor]:
        """What is no part of a layer, and stand-ins for the rest."""
        return {
            name: Unread.of(name, source.shape, source.dtype) if _NUMBERED.search(name) else source.read()
            for name, source in self.shards.sources.items()
        }

    def least_bytes(self) -> int:
        """What loading takes: what is in no layer, once as read and once as packed, and two layers."""
        layers: dict[str, int] = defaultdict(int)
        outside = 0
        for name, source in self.shards.sources.items():
            if (found := _NUMBERED.search(name)) is not None:
                layers[found[0]] += source.num_bytes
            else:
                outside += source.num_bytes
        return 2 * (outside + max(layers.values(), default=0))

    def source(self, tensor: Tensor) -> Source | None:
        """Where a stand-in's numbers lie; None: not in one place."""
        name = source_of(tensor)
        return None if name is None else self.shards.sources[name]

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """A stand-in's numbers, in its type.

        Args:
            name: Of the model's parameter, for messages.

        Raises:
            ModelError: They are not finite.
        """
        source = self.source(tensor)
        if source is None:
            raise ModelError(
                f"offload_folder: {name} is put together from several tensors of {self.folder}, which is not done "
                "anew for each pass; name a folder for a copy"
            )
        found = source.read().to(tensor.dtype)
        if found.is_floating_point() and not bool(found.isfinite().all()):
            raise ModelError(f"model: weight {name} of {self.folder} holds NaN or infinity; fetch the model again")
        return found

    def fill_small(self, model: nn.Module, prefixes: Sequence[str]) -> None:
        """Reads what stays: norms, biases, and all that is in no layer."""
        for module_name, module in model.named_modules():
            for name, tensor in _unread(module):
                whole = f"{module_name}.{name}"
                if tensor.ndim < 2 or not whole.startswith(tuple(prefixes)):
                    _set(module, name, self.read(whole, tensor))

    @contextmanager
    def filled_in_turn(self, model: nn.Module, prefixes: Sequence[str]) -> Iterator[None]:
        """Meanwhile each decoder layer has its weights while it computes, and no longer."""
        handles = []
        for prefix in prefixes:
            layer = model.get_submodule(prefix.removesuffix("."))
            for module_name, module in layer.named_modules(prefix=prefix.removesuffix(".")):
                if unread := _unread(module):
                    fill = partial(self._fill, module_name, unread)
                    handles.append(module.register_forward_pre_hook(fill))
                    handles.append(module.register_forward_hook(partial(_empty, unread)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _fill(self, module_name: str, unread: Sequence[tuple[str, Tensor]], module: nn.Module, _args: Any) -> None:
        for name, tensor in unread:
            _set(module, name, self.read(f"{module_name}.{name}", tensor))

    def close(self) -> None:
        self.shards.close()


def _unread(module: nn.Module) -> list[tuple[str, Tensor]]:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [(name, tensor) for name, tensor in tensors if isinstance(tensor, Unread)]


def _empty(unread: Sequence[tuple[str, Tensor]], module: nn.Module, _args: Any, _output: Any) -> None:
    for name, tensor in unread:
        _set(module, name, tensor)


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    if name in module._buffers:
        module._buffers[name] = tensor
    elif isinstance(tensor, Unread):
        module._parameters[name] = tensor  # type: ignore[assignment]
    else:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
