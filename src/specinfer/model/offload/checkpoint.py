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

from specinfer.core.errors import ModelError
from specinfer.core.progress import ProgressCallback
from specinfer.model.gguf import folder as gguf_folder
from specinfer.model.offload.buffer_layout import set_tensor
from specinfer.model.offload.meta_weights import Cut, MetaWeight, origin_of
from specinfer.model.offload.shards import Shards, read_part
from specinfer.model.stacked_source import StackedSource
from specinfer.ops import QuantizedWeight, float8

_NUMBERED = re.compile(r"\.(\d+)\.")  # matches names that belong to one of several layers
_AT_ONCE = 2**18  # numbers checked at a time, few enough for the processor's cache
_AROUND = 64 * 2**20  # libraries loaded by the first pass, and the readers' own memory


def layer_number(name: str) -> int | None:
    """Return the number of the layer that a tensor of the files belongs to, or None."""
    found = _NUMBERED.search(name)
    return None if found is None else int(found[1])


def needs_copy(name: str) -> ModelError:
    """Return the error for weights whose form in the files differs from the form used for computing."""
    return ModelError(
        f"offload_folder: {name} is made of the files' tensors in a way that takes too long to be done for each pass; "
        "name a folder for a copy of the layers"
    )


class Checkpoint:
    """A folder's weights.

    Args:
        progress: Callback for the progress of reading.
        dtype: Type that weights of a GGUF file are decoded to, or None for the file's own.
        keeps_codes: Function of a name and its source, whether the weight is computed with as it is stored. Experts
            become a stack together, or none of them does: they are kept if one is.
        is_streamed: Whether layers are read again for each pass.

    Raises:
        ModelError: The weights cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        progress: ProgressCallback | None = None,
        dtype: torch.dtype | None = None,
        keeps_codes: Callable[[str, Any], bool] = lambda *_: False,
        *,
        is_streamed: bool = False,
    ) -> None:
        self.folder = folder
        self.shards = Shards(folder, dtype, is_cached=not is_streamed)
        self._coded = {name for name, source in self.shards.sources.items() if keeps_codes(name, source)}
        self._experts = {_experts_of(name) for name in self._coded} - {None}
        self._outlines: dict[str, tuple[str, QuantizedWeight]] = {}
        self.progress = progress or (lambda *_: None)
        self._prefixes: tuple[str, ...] = ()
        self._convert: Callable[[int], dict[str, Tensor]] | None = None
        self._converted: tuple[int, dict[str, Tensor]] = (-1, {})
        self._in_turn: tuple[int | None, dict[str, Tensor]] = (None, {})
        self._num_read = 0

    def converts_by(self, convert: Callable[[int], dict[str, Tensor]], prefixes: Sequence[str]) -> None:
        """Set the function that makes the weights of a layer that are not single tensors of the files.

        Args:
            prefixes: Prefixes of the names of modules within decoder layers.
        """
        self._convert, self._prefixes = convert, tuple(prefixes)

    def layer_of(self, name: str) -> int | None:
        """Return the decoder layer that a name belongs to, or None."""
        if not name.startswith(self._prefixes):
            return None
        number = layer_number(name)
        assert number is not None
        return number

    def weights(self, is_read: Callable[[int | None], bool], *, decodes: bool = False) -> dict[str, Tensor]:
        """Return all weights by name, with meta weights for those that are not read.

        Args:
            is_read: Function of a layer's number, or of None for the weights outside of layers.
            decodes: Whether weights that are kept as they are stored are read, too.
        """
        return {
            name: source.read()
            if is_read(layer_number(name))
            and (decodes or (name not in self._coded and _experts_of(name) not in self._experts))
            else MetaWeight.from_source(name, source.shape, source.dtype)
            for name, source in self.shards.sources.items()
        }

    def keeps(self, module: nn.Module, name: str, tensor: Tensor) -> bool:
        """Return whether a meta weight of a module is computed with as it is stored.

        Not so if it is cut within groups of inputs that share a scale.

        Args:
            name: Name of the model's parameter, which shows what a stack is made of.
        """
        if (origin := origin_of(tensor)) is None:
            return _experts_of(name) in self._experts
        is_taken = isinstance(module, nn.Linear | nn.Embedding) or _experts_of(name) is not None
        return is_taken and self.has_codes(*origin)

    def has_codes(self, name: str, cut: Cut | None) -> bool:
        """Return whether a part of one of the weights is computed with as it is stored."""
        if name not in self._coded or cut is None:
            return name in self._coded
        cut = self._of_matrix(name, cut)
        return cut.dim == 0 or (len(cut.ranges) == 1 and self._outline(name)[1].can_split(cut.ranges[0]))

    def _of_matrix(self, name: str, cut: Cut) -> Cut:
        """Return the cut of each matrix [out, in] of a weight, which may be a `StackedSource`."""
        source = self.shards.sources[name]
        if not isinstance(source, StackedSource) or len(source.shape) < 3:
            return cut
        return Cut(2 - cut.dim if source.is_transposed else cut.dim - 1, cut.ranges)

    def codes(
        self, name: str, cut: Cut | None, *, reads: bool = True, expert: int | None = None
    ) -> tuple[str, QuantizedWeight]:
        """Read a part of a weight as it is stored, and the name of the type that it is stored in.

        Args:
            reads: False for weights on the meta device.
            expert: Number of the expert whose matrix is read, of a stack of them.

        Raises:
            ModelError: A scale is not finite.
        """
        kind, weight = self._read_codes(name, expert) if reads else self._outline(name)
        if cut is not None:
            cut = self._of_matrix(name, cut)
            weight = weight.reordered(cut.taken_from) if cut.dim == 0 else weight.of_inputs(cut.ranges[0])
        return kind, weight

    def _outline(self, name: str) -> tuple[str, QuantizedWeight]:
        if name not in self._outlines:
            self._outlines[name] = self.shards.sources[name].outline()
        return self._outlines[name]

    def _read_codes(self, name: str, expert: int | None) -> tuple[str, QuantizedWeight]:
        source = self.shards.sources[name]
        kind, weight = source.codes(expert or 0) if isinstance(source, StackedSource) else source.codes()
        scales = [one for one in (weight.scales, weight.added, weight.nest) if one is not None]
        are_numbers = all(is_finite(one) for one in scales if one.is_floating_point())
        if not are_numbers or (weight.is_float and float8.has_nan(weight.codes)):
            folder = gguf_folder.origin_of(self.folder)
            raise ModelError(f"model: weight {name} of {folder} has NaN or infinity; fetch the model again")
        return kind, weight

    def least_bytes(self) -> int:
        """Return the bytes that loading takes.

        They are: the weights outside of layers twice, as read and as packed, two layers, and a little more. Codes of
        layers count as the numbers that they stand for, because one pass at load decodes them.
        """
        sizes: dict[int | None, int] = defaultdict(int)
        for name, source in self.shards.sources.items():
            layer = layer_number(name)
            stays_coded = layer is None and name in self._coded
            sizes[layer] += self._outline(name)[1].num_bytes if stays_coded else source.num_bytes
        outside = sizes.pop(None, 0)
        return 2 * (outside + max(sizes.values(), default=0)) + _AROUND

    def check_sources(self, model: nn.Module) -> None:
        """Refuse a model that needs a copy of its layers.

        Raises:
            ModelError: The model needs one.
        """
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, MetaWeight) and tensor.ndim > 1:
                origin = origin_of(tensor)
                if origin is None or (origin[0] in self._coded and self.layer_of(name) is not None):
                    raise needs_copy(name)

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """Read the numbers of a meta weight, in its type.

        Args:
            name: Name of the model's parameter.

        Raises:
            ModelError: The numbers are not finite.
            WeightsError: They cannot be read.
        """
        if (origin := origin_of(tensor)) is None:
            found = self._made(name)
        else:
            found = read_part(self.shards.sources[origin[0]], origin[1]).to(tensor.dtype)
        if found.is_floating_point() and not is_finite(found):
            folder = gguf_folder.origin_of(self.folder)
            raise ModelError(f"model: weight {name} of {folder} has NaN or infinity; fetch the model again")
        return found

    def _made(self, name: str) -> Tensor:
        layer = self.layer_of(name)
        if layer is None or self._convert is None:
            raise ModelError(f"offload: {name} is in no layer and made of several tensors; leave offload out")
        if self._converted[0] != layer:
            self._converted = (-1, {})  # frees it first, so that two layers are not in memory
            self._converted = (layer, self._convert(layer))
        return self._converted[1][name]

    def fill(self, model: nn.Module, is_read: Callable[[str, Tensor], bool] = lambda *_: True) -> None:
        """Read a model's meta weights but for those in `keeps`.

        Args:
            is_read: Function of a name and a meta weight; others stay as they are.
        """
        meta_weights: list[Tensor] = []  # kept alive, so that no two have the same id
        found: dict[int, Tensor] = {}  # a tied head is read once
        for module_name, module in model.named_modules():
            for name, tensor in _meta_weights(module):
                whole = f"{module_name}.{name}"
                if not is_read(whole, tensor) or self.keeps(module, whole, tensor):
                    continue
                if id(tensor) not in found:
                    meta_weights.append(tensor)
                    value = self.read(whole, tensor)
                    is_buffer = name in module._buffers
                    found[id(tensor)] = value if is_buffer else nn.Parameter(value, requires_grad=False)
                set_tensor(module, name, found[id(tensor)])
        self._converted = (-1, {})

    @contextmanager
    def filled_in_turn(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        """Return a context in which each module of a layer has its weights on the device only while it computes.

        A layer that is computed twice before the next one is read once.
        """
        handles, self._num_read = [], 0
        total = sum(tensor.nbytes for module in model.modules() for _, tensor in _meta_weights(module))
        for module_name, module in model.named_modules():
            if weights := _meta_weights(module):
                fill = partial(self._fill, module_name, weights, total, device)
                handles.append(module.register_forward_pre_hook(fill))
                handles.append(module.register_forward_hook(partial(_empty, weights)))
        try:
            yield
        finally:
            self._converted, self._in_turn = (-1, {}), (None, {})
            for handle in handles:
                handle.remove()

    def _fill(
        self,
        module_name: str,
        weights: Sequence[tuple[str, Tensor]],
        total: int,
        device: torch.device,
        module: nn.Module,
        _args: Any,
    ) -> None:
        layer = self.layer_of(f"{module_name}.")
        if layer != self._in_turn[0]:
            self._in_turn = (layer, {})  # frees it first, so that two layers are not in memory
        found = self._in_turn[1]
        for name, tensor in weights:
            whole = f"{module_name}.{name}"
            if whole not in found:
                found[whole] = self.read(whole, tensor).to(device)
                self._num_read += tensor.nbytes
                self.progress("reading layers once to check them", self._num_read, total)
            set_tensor(module, name, found[whole])

    def close(self) -> None:
        self.shards.close()


def is_finite(weight: Tensor) -> bool:
    """Return whether all numbers are finite, checked a few at a time to need no copy of the whole."""
    parts = weight.detach().flatten().split(_AT_ONCE)
    return all(bool(part.sum(dtype=torch.float32).isfinite()) or bool(part.isfinite().all()) for part in parts)


def _meta_weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [(name, tensor) for name, tensor in tensors if isinstance(tensor, MetaWeight)]


def _empty(weights: Sequence[tuple[str, Tensor]], module: nn.Module, _args: Any, _output: Any) -> None:
    for name, tensor in weights:
        set_tensor(module, name, tensor)


def _experts_of(name: str) -> str | None:
    """Return the name of the layer of experts that a weight belongs to, or None."""
    layer, found, _ = name.partition(".experts.")
    return layer if found else None
