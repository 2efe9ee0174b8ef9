"""A checkpoint whose decoder layers are read one at a time, when they are needed."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.errors import ModelError
from specinfer.model.gguf.folder import origin_of
from specinfer.model.offload.image import set_tensor
from specinfer.model.offload.shards import Shards
from specinfer.model.offload.unread import Unread, cut_of, source_of
from specinfer.progress import ProgressCallback

_NUMBERED = re.compile(r"\.(\d+)\.")  # what belongs to one of several layers
_AT_ONCE = 2**18  # numbers looked at: they stay in the processor's cache
_AROUND = 64 * 2**20  # libraries that come with the first pass, and what the readers have for themselves


def needs_copy(name: str) -> ModelError:
    """Of weights that are not in the files as they are computed with."""
    return ModelError(
        f"offload_folder: {name} is made of the files' tensors in a way that takes too long to be done for each pass; "
        "name a folder for a copy of the layers"
    )


class Checkpoint:
    """A folder's weights.

    Args:
        dtype: What weights of a GGUF file are decoded to; None: what the file suggests.

    Raises:
        ModelError: They cannot be used.
    """

    def __init__(self, folder: Path, tell: ProgressCallback | None = None, dtype: torch.dtype | None = None) -> None:
        self.folder = folder
        self.shards = Shards(folder, dtype)
        self.tell = tell or (lambda *_: None)
        self._prefixes: tuple[str, ...] = ()
        self._convert: Callable[[int], dict[str, Tensor]] | None = None
        self._converted: tuple[int, dict[str, Tensor]] = (-1, {})
        self._in_turn: tuple[int | None, dict[str, Tensor]] = (None, {})
        self._num_read = 0

    def converts_by(self, convert: Callable[[int], dict[str, Tensor]], prefixes: Sequence[str]) -> None:
        """What is no tensor of the files by itself is made by it, layer by layer.

        Args:
            prefixes: What names of modules within decoder layers begin with.
        """
        self._convert, self._prefixes = convert, tuple(prefixes)

    def layer_of(self, name: str) -> int | None:
        """The decoder layer that a name belongs to."""
        if not name.startswith(self._prefixes):
            return None
        found = _NUMBERED.search(name)
        assert found is not None
        return int(found[1])

    def stand_ins(self) -> dict[str, Tensor]:
        """For all weights."""
        return {name: Unread.of(name, source.shape, source.dtype) for name, source in self.shards.sources.items()}

    def read_all(self) -> dict[str, Tensor]:
        """All weights."""
        return {name: source.read() for name, source in self.shards.sources.items()}

    def state_dict(self, only: int | None = None) -> dict[str, Tensor]:
        """What is no part of a layer, and stand-ins for the rest; or `only` one layer, and stand-ins for the rest."""
        tensors: dict[str, Tensor] = {}
        for name, source in self.shards.sources.items():
            found = _NUMBERED.search(name)
            number = None if found is None else int(found[1])
            tensors[name] = source.read() if number == only else Unread.of(name, source.shape, source.dtype)
        return tensors

    def is_numbered(self, name: str) -> bool:
        """Whether a tensor of the files is one of several layers'."""
        return _NUMBERED.search(name) is not None

    def least_bytes(self) -> int:
        """What loading takes: what is in no layer, once as read and once as packed, two layers, and a little more."""
        layers: dict[str, int] = defaultdict(int)
        outside = 0
        for name, source in self.shards.sources.items():
            if (found := _NUMBERED.search(name)) is not None:
                layers[found[0]] += source.num_bytes
            else:
                outside += source.num_bytes
        return 2 * (outside + max(layers.values(), default=0)) + _AROUND

    def check_sources(self, model: nn.Module) -> None:
        """Refuses a model that needs a copy of its layers.

        Raises:
            ModelError: It does.
        """
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, Unread) and tensor.ndim > 1 and source_of(tensor) is None:
                raise needs_copy(name)

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """A stand-in's numbers, in its type.

        Args:
            name: Of the model's parameter.

        Raises:
            ModelError: They are not finite.
            WeightsError: They cannot be read.
        """
        source, cut = source_of(tensor), cut_of(tensor)
        if source is None:
            found = self._made(name)
        else:
            whole = self.shards.sources[source]
            found = (whole.read() if cut is None else whole.read_part(cut)).to(tensor.dtype)
        if found.is_floating_point() and not is_finite(found):
            raise ModelError(
                f"model: weight {name} of {origin_of(self.folder)} holds NaN or infinity; fetch the model again"
            )
        return found

    def _made(self, name: str) -> Tensor:
        layer = self.layer_of(name)
        if layer is None or self._convert is None:
            raise ModelError(f"offload: {name} is in no layer and made of several tensors; leave offload out")
        if self._converted[0] != layer:
            self._converted = (-1, {})  # not two layers at a time
            self._converted = (layer, self._convert(layer))
        return self._converted[1][name]

    def fill(self, model: nn.Module, *, small: bool = False) -> None:
        """Reads what a model has stand-ins for; or only what stays: norms, biases, and all that is in no layer."""
        stand_ins: list[Tensor] = []  # as long as they are there, no two have the same id
        found: dict[int, Tensor] = {}  # a tied head is read once
        for module_name, module in model.named_modules():
            for name, tensor in _unread(module):
                whole = f"{module_name}.{name}"
                if small and tensor.ndim > 1 and self.layer_of(whole) is not None:
                    continue
                if id(tensor) not in found:
                    stand_ins.append(tensor)
                    value = self.read(whole, tensor)
                    is_buffer = name in module._buffers
                    found[id(tensor)] = value if is_buffer else nn.Parameter(value, requires_grad=False)
                set_tensor(module, name, found[id(tensor)])
        self._converted = (-1, {})

    @contextmanager
    def filled_in_turn(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        """Meanwhile each module of a layer has its weights on the device while it computes, and no longer.

        A layer that is computed twice before the next one is read once.
        """
        handles, self._num_read = [], 0
        total = sum(tensor.nbytes for module in model.modules() for _, tensor in _unread(module))
        for module_name, module in model.named_modules():
            if unread := _unread(module):
                fill = partial(self._fill, module_name, unread, total, device)
                handles.append(module.register_forward_pre_hook(fill))
                handles.append(module.register_forward_hook(partial(_empty, unread)))
        try:
            yield
        finally:
            self._converted, self._in_turn = (-1, {}), (None, {})
            for handle in handles:
                handle.remove()

    def _fill(
        self,
        module_name: str,
        unread: Sequence[tuple[str, Tensor]],
        total: int,
        device: torch.device,
        module: nn.Module,
        _args: Any,
    ) -> None:
        layer = self.layer_of(f"{module_name}.")
        if layer != self._in_turn[0]:
            self._in_turn = (layer, {})  # not two layers at a time
        found = self._in_turn[1]
        for name, tensor in unread:
            whole = f"{module_name}.{name}"
            if whole not in found:
                found[whole] = self.read(whole, tensor).to(device)
                self._num_read += tensor.nbytes
                self.tell("reading layers once to check them", self._num_read, total)
            set_tensor(module, name, found[whole])

    def close(self) -> None:
        self.shards.close()


def is_finite(weight: Tensor) -> bool:
    """Whether all its numbers are; a few at a time, so that nothing of its size is held beside it."""
    parts = weight.detach().flatten().split(_AT_ONCE)
    return all(bool(part.sum(dtype=torch.float32).isfinite()) or bool(part.isfinite().all()) for part in parts)


def _unread(module: nn.Module) -> list[tuple[str, Tensor]]:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [(name, tensor) for name, tensor in tensors if isinstance(tensor, Unread)]


def _empty(unread: Sequence[tuple[str, Tensor]], module: nn.Module, _args: Any, _output: Any) -> None:
    for name, tensor in unread:
        set_tensor(module, name, tensor)
