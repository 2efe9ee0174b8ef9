"""Loading of a model whose decoder layers are streamed: they are read, converted or copied while it computes."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from specinfer.core.errors import ModelError
from specinfer.core.progress import ProgressCallback
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.layers.native import NativeLayer
from specinfer.model.linears import make_linears_plain, quantize_linears
from specinfer.model.load_config import LoadConfig
from specinfer.model.offload.budget import Budget
from specinfer.model.offload.buffer_layout import BufferLayout, ConvertedLayer, LayoutEntry, LinearEntry, TensorEntry
from specinfer.model.offload.checkpoint import Checkpoint, needs_copy
from specinfer.model.offload.copy import open_copy
from specinfer.model.offload.device_stream import DeviceStream
from specinfer.model.offload.meta_weights import Cut, origin_of
from specinfer.model.offload.shards import Source, parts_of
from specinfer.model.offload.stream import Stream
from specinfer.model.offload.streamed_layer import LayerStream, StreamedLayer
from specinfer.model.offload.transfer import CudaTransfer
from specinfer.model.own_pass import choose_way
from specinfer.model.probe import Probe, probe
from specinfer.model.quantized_experts import QuantizedExperts
from specinfer.model.recurrent.layers import weights_in_memory
from specinfer.model.shard_definition import (
    BuiltModel,
    ShardDefinition,
    open_checkpoint,
    place_stored,
    prepare_conversion,
    rounding_of,
)
from specinfer.ops import PackedLinear, QuantizedLinear, pack_linears

Entries = dict[str, LayoutEntry]  # what is streamed of one layer, by name
_Origin = tuple[str, Cut | None] | None  # of a weight, if it is known


def load_streamed(job: LoadConfig, progress: ProgressCallback | None = None) -> BuiltModel:
    """Load and check a model, and set up the streaming of its layers; at first all are streamed.

    Raises:
        ModelError: The model cannot run, its weights cannot be used, or a folder for a copy is needed.
        ValueError: The memory budget is too small, or the target runs on the CPU, whose memory "cpu" stands for.
    """
    if job.device.type == "cpu" and job.offload.offload == "cpu":
        raise ValueError('offload: the target runs on the CPU, whose memory "cpu" stands for; use offload="disk"')
    budget = Budget(job.offload.budget_bytes, job.device)
    with open_checkpoint(job, progress, stays_open=True) as checkpoint:
        budget.spare(checkpoint.least_bytes())
        weights = checkpoint.weights(lambda layer: layer is None and job.shard.is_whole)
        definition = ShardDefinition.make(job, weights)
        if job.quantization is not None and job.is_direct:
            raise ModelError(
                "offload_folder: weights are not quantized anew for each pass; name a folder for a copy of the layers, "
                "or leave quantization out"
            )
        probed, kinds = _probe(definition.model, checkpoint, job)
        # Codes of layers are read later: only their shapes matter here.
        definition = definition.with_types(kinds | place_stored(definition.model, checkpoint, lambda _: False))
        model, entries = _convert(definition.model, checkpoint, job)
        entries = [{name: entry for name, entry in named.items() if entry.tensors()[0].is_meta} for named in entries]
        layers, close = _layers(
            entries, checkpoint, job, [job.quantization, str(definition.dtype), type(model).__name__]
        )
        stream = _stream(layers, close, job, checkpoint)
        try:
            _attach(stream, model, entries, probed, definition, job)
        except BaseException:
            stream.close()
            raise
        return BuiltModel(model.eval(), definition, probed, stream=stream)


def _probe(model: Any, checkpoint: Checkpoint, job: LoadConfig) -> tuple[Probe, set[str]]:
    """Read all weights but the matrices of layers, and run a pass in which each layer has them while it computes.

    Codes of layers are decoded for that. Return the types of those outside of layers, too.
    """
    prepare_conversion(checkpoint, model, job)
    if job.is_direct:
        checkpoint.check_sources(model)
    stay = weights_in_memory(model)
    checkpoint.fill(
        model,
        lambda name, weight: (
            weight.ndim < 2 or name.endswith("_bias") or checkpoint.layer_of(name) is None or name in stay
        ),
    )
    kinds = place_stored(model, checkpoint, is_placed=lambda layer: layer is None)
    model.eval().to(job.device)
    with checkpoint.filled_in_turn(model, job.device):
        choose_way(model, job)
        return probe(model, job.config, job.device, job.layers, records=job.may_fuse(model)), kinds


def _layers(
    entries: Sequence[Entries], checkpoint: Checkpoint, job: LoadConfig, identity: list[Any]
) -> tuple[Sequence[StreamedLayer], Callable[[], None]]:
    """Return the layers to stream, and what closes their files.

    They come from a copy, straight from the model's files, or are converted at each read.
    """
    layouts = [BufferLayout(list(named.values())) for named in entries]
    read = [partial(_read_layer, checkpoint, job, layer) for layer in job.layers]
    if job.is_direct:
        if made := sorted(name for named in entries for name, entry in named.items() if entry.sources is None):
            raise needs_copy(made[0])
        return layouts, checkpoint.close
    if job.offload.offload_folder is None:
        is_stored = [all(entry.sources for entry in named.values()) for named in entries]
        return [
            layout if stored else ConvertedLayer(layout, list(named), convert)
            for stored, layout, named, convert in zip(is_stored, layouts, entries, read, strict=True)
        ], checkpoint.close
    if not job.shard.is_whole:
        group = job.shard.tensor
        identity = [*identity, str(job.layers), f"rank {group.rank} of {group.size}", str(job.shard.has_head)]
    folder = Path(job.offload.offload_folder).expanduser()
    copy = open_copy(folder, checkpoint, identity, entries, layouts, lambda i: read[i]())
    checkpoint.close()  # the copy has all that is needed
    return copy.layers, copy.close


def _stream(
    layers: Sequence[StreamedLayer], close: Callable[[], None], job: LoadConfig, checkpoint: Checkpoint
) -> LayerStream:
    if job.device.type == "cpu":
        return Stream(layers, close)
    return DeviceStream(
        layers, close, CudaTransfer(job.device),
        in_host_memory=job.in_host_memory, progress=checkpoint.progress, num_sharing=job.num_sharing,
    )  # fmt: skip


def _attach(
    stream: LayerStream,
    model: nn.Module,
    entries: Sequence[Entries],
    probed: Probe,
    definition: ShardDefinition,
    job: LoadConfig,
) -> None:
    """Let the model take its layers from the stream, and check that fused layers compute what the definition does."""
    if isinstance(model, FusedDecoder):
        model.stack.stream = stream
        verdict = probed.judge(model, definition.dtype, rounding_of(job, definition))
        if not verdict.is_right:
            raise ModelError(f"offload: the native layers are not those of the model, leave offload out: {verdict}")
    else:
        Feeder(stream).attach(model, entries)
    weakref.finalize(model, stream.close)


def _convert(
    definition: Any, checkpoint: Checkpoint, job: LoadConfig, *, warns: bool = True
) -> tuple[nn.Module, list[Entries]]:
    """Return the model that runs, and what is streamed of each layer; with weights if the definition has them."""
    sources = checkpoint.shards.sources

    def sources_of(origins: Sequence[_Origin]) -> list[Source] | None:
        parts = [None if origin is None else parts_of(sources[origin[0]], origin[1]) for origin in origins]
        known = [part for part in parts if part is not None]
        return [source for part in known for source in part] if len(known) == len(parts) else None

    if job.fuses(definition):
        model = FusedDecoder(definition, job.quantization)
        return model, [_entries(layer, sources_of) for layer in model.layers]
    make_linears_plain(definition)
    origins = {name: origin_of(tensor) for name, tensor in definition.named_parameters()}
    if job.quantization is not None:
        native = job.has_native_kernels
        quantize_linears(definition, job.quantization, job.config, job.device, native=native, warns=warns)
    if job.has_native_kernels:
        pack_linears(definition, to_come=True)
    entries: list[Entries] = [{} for _ in job.layers]
    for name, module in definition.named_modules():
        layer = checkpoint.layer_of(f"{name}.")
        if layer is None or layer not in job.layers:
            continue
        of_layer = entries[layer - job.layers.start]
        if isinstance(module, PackedLinear | QuantizedLinear) and module.call is not None:
            of_layer[name] = LinearEntry([module.call], sources_of([origins.get(f"{name}.weight")]))
        if isinstance(module, QuantizedExperts) and module.calls:
            of_layer[name] = LinearEntry(module.calls, None)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for kind, tensor in tensors:
            whole = f"{name}.{kind}"
            parts = sources_of([origins.get(whole)]) or ()
            of_layer[whole] = TensorEntry(module, kind, tensor, parts if len(parts) == 1 else None)
    return definition, entries


def _entries(layer: NativeLayer, sources_of: Callable[[Sequence[_Origin]], list[Source] | None]) -> Entries:
    """Return what is streamed of a fused layer; `sources_of` returns those of a linear layer."""
    entries: Entries = {
        str(i): LinearEntry(linears.computed.chain, sources_of(linears.sources), interleaved=linears.interleaved)
        for i, linears in enumerate([*layer.linears, *layer.routers])
    }
    for part in layer.call.parts:
        if part.experts is not None:
            entries["experts"] = LinearEntry(part.experts.calls, None)
    return entries


def _read_layer(checkpoint: Checkpoint, job: LoadConfig, layer: int) -> Entries:
    """Return what is streamed of a layer, with its weights."""
    model = ShardDefinition.make(job, checkpoint.weights(lambda number: number == layer)).model
    place_stored(model, checkpoint, lambda number: number == layer)
    checkpoint.fill(model, lambda name, _: checkpoint.layer_of(name) == layer)  # codes of routers, which are decoded
    entries = _convert(model, checkpoint, job, warns=False)[1]  # the first warning is enough
    return entries[layer - job.layers.start]


class Feeder:
    """Hooks that acquire a layer from a stream when the first of its modules with weights is called."""

    def __init__(self, stream: LayerStream) -> None:
        self._stream = stream
        self._current: int | None = None

    def attach(self, model: nn.Module, entries: Sequence[Entries]) -> None:
        for layer, named in enumerate(entries):
            modules = {name if isinstance(x, LinearEntry) else name.rpartition(".")[0] for name, x in named.items()}
            for owner in modules:
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
