"""Conversion of a definition without weights in its decoder layers to a model whose layers are streamed."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.core.config import OffloadConfig
from specinfer.core.errors import ModelError
from specinfer.kernels import PackedLinear, QuantizedLinear, pack_linears
from specinfer.model.cut import Cut
from specinfer.model.fused import FusedDecoder, can_fuse
from specinfer.model.linears import layer_names, make_linears_plain, quantize_linears
from specinfer.model.offload.buffer_layout import BufferLayout, ConvertedLayer, LayoutEntry, LinearEntry, TensorEntry
from specinfer.model.offload.checkpoint import Checkpoint, needs_copy
from specinfer.model.offload.copy import open_copy
from specinfer.model.offload.device_stream import DeviceStream
from specinfer.model.offload.layer_stream import LayerStream
from specinfer.model.offload.meta_weights import origin_of
from specinfer.model.offload.shards import Source
from specinfer.model.offload.stream import Stream
from specinfer.model.offload.streamed_layer import StreamedLayer
from specinfer.model.offload.transfer import CudaTransfer
from specinfer.model.probe import Probe, probe
from specinfer.parallel.shard_spec import ShardSpec


@dataclass(frozen=True, slots=True)
class Streamed:
    """A model ready to run, and its properties."""

    model: nn.Module
    probe: Probe
    stream: LayerStream


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a streamed model; as in `load_model`."""

    config: Any
    device: torch.device
    quantization: str | None
    native: bool
    offload: OffloadConfig
    shard: ShardSpec = field(default_factory=ShardSpec)

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole model."""
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def layers(self) -> range:
        """Layers of this rank."""
        return self.shard.layers(self.num_layers)

    @property
    def in_host_memory(self) -> bool:
        """True if the layers are read once, into host memory."""
        return self.offload.offload == "cpu"


# Makes a definition with the given weights.
Read = Callable[[dict[str, Tensor]], Any]


def stream_layers(definition: Any, read: Read, checkpoint: Checkpoint, settings: Settings) -> Streamed:
    """Check a definition, as `load_model` does, and set up the streaming of its layers; at first all are streamed.

    Args:
        definition: Definition with meta weights for the weights of its layers. It is taken apart.
        read: Function that makes a new definition.

    Raises:
        ModelError: The model cannot run, its weights cannot be used, or a folder for a copy is needed.
        WeightsError: The weights cannot be read.
    """
    folder = settings.offload.offload_folder
    is_direct = folder is None and not settings.in_host_memory
    if settings.quantization is not None and is_direct:
        raise ModelError(
            "offload_folder: weights are not quantized anew for each pass; name a folder for a copy of the layers, or "
            "leave quantization out"
        )
    prefixes = layer_names(definition, settings.num_layers)
    checkpoint.converts_by(partial(layer_tensors, read, checkpoint), prefixes)
    if is_direct:
        checkpoint.check_sources(definition)
    checkpoint.fill(definition, small=True)
    definition.eval().to(settings.device)
    with checkpoint.filled_in_turn(definition, settings.device):
        fuses = _fuses(definition, settings)
        probed = probe(definition, settings.config, settings.device, settings.layers, records=fuses)
    dtype = next(definition.parameters()).dtype
    model, parts = _prepared(definition, checkpoint, settings)
    parts = [{name: part for name, part in layer.items() if part.tensors()[0].is_meta} for layer in parts]
    layouts = [BufferLayout(list(layer.values())) for layer in parts]
    layers: Sequence[StreamedLayer] = layouts
    close, real = checkpoint.close, partial(_real_parts, read, checkpoint, settings)
    if is_direct:
        _check_direct(parts)
    elif folder is None:
        layers = [
            layout
            if all(part.sources for part in its.values())
            else ConvertedLayer(layout, list(its), partial(real, i))
            for i, (layout, its) in zip(settings.layers, zip(layouts, parts, strict=True), strict=True)
        ]
    else:
        identity = [settings.quantization, str(dtype), type(model).__name__]
        if not settings.shard.is_whole:
            group = settings.shard.tensor
            identity += [str(settings.layers), f"rank {group.rank} of {group.size}", str(settings.shard.has_head)]
        of_rank = [partial(real, layer) for layer in settings.layers]
        copy = open_copy(Path(folder).expanduser(), checkpoint, identity, parts, layouts, lambda i: of_rank[i]())
        layers, close = copy.layers, copy.close
        checkpoint.close()  # the copy has all that is needed
    stream = _stream(layers, close, settings, checkpoint)
    try:
        if isinstance(model, FusedDecoder):
            model.stream_from(stream)
            verdict = probed.judge(model, dtype, settings.quantization)
            if not verdict.is_right:
                raise ModelError(f"offload: the native layers are not those of the model, leave offload out: {verdict}")
        else:
            Feeder(stream).attach(model, parts)
        weakref.finalize(model, stream.close)
    except BaseException:
        stream.close()
        raise
    return Streamed(model.eval(), probed, stream)


def _fuses(definition: Any, settings: Settings) -> bool:
    native = settings.native and settings.device.type == "cpu"
    return native and settings.quantization != "fp8" and can_fuse(definition)


def _stream(
    layers: Sequence[StreamedLayer], close: Callable[[], None], settings: Settings, checkpoint: Checkpoint
) -> LayerStream:
    if settings.device.type == "cpu":
        return Stream(layers, close)
    return DeviceStream(
        layers,
        close,
        CudaTransfer(settings.device),
        in_host_memory=settings.in_host_memory,
        progress=checkpoint.progress,
    )


def _prepared(
    definition: Any, checkpoint: Checkpoint, settings: Settings, *, warns: bool = True
) -> tuple[nn.Module, list[dict[str, LayoutEntry]]]:
    """Return the model that runs, and for each layer the parts to stream, by name; with weights if it has them."""
    config, quantization = settings.config, settings.quantization
    native = settings.native and settings.device.type == "cpu"
    sources = checkpoint.shards.sources

    def found(origins: Sequence[tuple[str, Cut | None] | None]) -> list[Source] | None:
        parts = [None if origin is None else sources[origin[0]].parts(origin[1]) for origin in origins]
        known = [part for part in parts if part is not None]
        return [source for part in known for source in part] if len(known) == len(parts) else None

    if _fuses(definition, settings):
        model = FusedDecoder(definition, quantization)
        return model, [
            {
                str(i): LinearEntry(one.call, found(one.sources), interleaved=one.interleaved)
                for i, one in enumerate(layer.origins)
            }
            for layer in model.layers
        ]
    make_linears_plain(definition)
    origins = {name: origin_of(tensor) for name, tensor in definition.named_parameters()}
    if quantization is not None:
        quantize_linears(definition, quantization, config, settings.device, native=native, warns=warns)
    if native:
        pack_linears(definition, to_come=True)
    parts: list[dict[str, LayoutEntry]] = [{} for _ in settings.layers]
    for name, module in definition.named_modules():
        layer = checkpoint.layer_of(f"{name}.")
        if layer is None or layer not in settings.layers:
            continue
        own = parts[layer - settings.layers.start]
        if isinstance(module, PackedLinear | QuantizedLinear) and module.call is not None:
            own[name] = LinearEntry(module.call, found([origins.get(f"{name}.weight")]))
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for kind, tensor in tensors:
            whole = f"{name}.{kind}"
            its_sources = found([origins.get(whole)]) or ()
            own[whole] = TensorEntry(module, kind, tensor, its_sources if len(its_sources) == 1 else None)
    return definition, parts


def layer_tensors(read: Read, checkpoint: Checkpoint, layer: int) -> dict[str, Tensor]:
    """Return a layer's weights by name, as in the family's definition."""
    model = read(checkpoint.state_dict(only=layer))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in tensors if checkpoint.layer_of(name) == layer}


def _real_parts(read: Read, checkpoint: Checkpoint, settings: Settings, layer: int) -> dict[str, LayoutEntry]:
    """Return a layer's parts with their weights."""
    model = read(checkpoint.state_dict(only=layer)).requires_grad_(False)
    parts = _prepared(model, checkpoint, settings, warns=False)[1]  # the first warning is enough
    return parts[layer - settings.layers.start]


def _check_direct(parts: Sequence[dict[str, LayoutEntry]]) -> None:
    made = sorted(name for layer in parts for name, part in layer.items() if part.sources is None)
    if made:
        raise needs_copy(made[0])


def _owner(name: str, part: LayoutEntry) -> str:
    """Return the name of the module that a part belongs to."""
    return name if isinstance(part, LinearEntry) else name.rpartition(".")[0]


class Feeder:
    """Hooks that acquire a layer from a stream when the first of its modules with weights is called."""

    def __init__(self, stream: LayerStream) -> None:
        self._stream = stream
        self._current: int | None = None

    def attach(self, model: nn.Module, parts: Sequence[dict[str, LayoutEntry]]) -> None:
        for layer, its_parts in enumerate(parts):
            for owner in {_owner(name, part) for name, part in its_parts.items()}:
                model.get_submodule(owner).register_forward_pre_hook(partial(self._enter, layer))
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)  # a stage ends by an exception

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        self._current = None  # the last pass may have been interrupted

    def _enter(self, layer: int, _module: nn.Module, _args: Any) -> None:
        if layer != self._current:
            self._leave()
            self._stream.acquire(layer)
            self._current = layer

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._current is not None:
            self._stream.release(self._current)
            self._current = None
