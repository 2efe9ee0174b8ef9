"""Loading of a model folder: a model that runs with tree attention, or the part of it that one rank holds.

A model that would compute wrong results silently is refused with an error: one whose layers do not call our attention,
and one that `definition` refuses.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.core.config import OffloadConfig
from specinfer.core.errors import ModelError, WeightsError
from specinfer.core.progress import ProgressCallback
from specinfer.kernels import PackedLinear, QuantizedLinear, pack_linears
from specinfer.model.attention import register
from specinfer.model.definition import (
    check_architecture,
    eos_token_ids_of,
    load_config,
    max_position_of,
    read_definition,
)
from specinfer.model.device_decoder import DeviceDecoder, can_fuse_on_device
from specinfer.model.folder import sampling_defaults
from specinfer.model.fused import FusedDecoder, can_fuse
from specinfer.model.gguf.folder import origin_of, weights_file
from specinfer.model.kv_cache import LayerShape
from specinfer.model.linears import cut_head, layer_names, make_linears_plain, quantize_linears
from specinfer.model.offload.budget import Budget, release_freed_memory
from specinfer.model.offload.checkpoint import Checkpoint
from specinfer.model.offload.layer_stream import LayerStream
from specinfer.model.probe import probe
from specinfer.model.sharding.shard import connect_shards, rank_layers, shard_model
from specinfer.model.streamed import Settings, Streamed, layer_tensors, stream_layers
from specinfer.parallel.shard_spec import ShardSpec

logger = logging.getLogger(__name__)
_PACKED = (PackedLinear, QuantizedLinear, FusedDecoder)  # these hold weights that are not parameters


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and its properties.

    Attributes:
        num_parameters: Number of parameters of the checkpoint, before quantization and splitting.
        num_bytes: Bytes that the weights take in memory.
        dtype: Type of keys, values and activations, and of the weights that are not quantized.
        quantization: One of `config.QUANTIZATIONS`, or None.
        compute_path: Description of the code that computes its layers.
        stream: Brings in the layers that are not kept in memory, or None if all are.
        share: The part of the model that this rank holds.
        token_map: [map] the only tokens whose logits are computed, or None for the whole vocabulary.
    """

    model: nn.Module
    folder: Path
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    layer_shapes: tuple[LayerShape, ...]
    num_parameters: int
    native: bool  # native kernels may be used
    num_bytes: int
    dtype: torch.dtype
    quantization: str | None
    device: torch.device
    sampling_defaults: Mapping[str, float]  # the folder's recommended values, by names of `SamplingParams`
    compute_path: str
    stream: LayerStream | None = None
    shard: ShardSpec = field(default_factory=ShardSpec)
    token_map: Tensor | None = None

    @property
    def num_logits(self) -> int:
        """Number of logits of each token."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    @property
    def seconds_waiting(self) -> float:
        """Seconds that passes have waited for weights that are not kept in memory."""
        return 0.0 if self.stream is None else self.stream.seconds_waiting


def load_model(
    folder: Path,
    dtype: str | torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    *,
    native: bool = True,
    offload: OffloadConfig | None = None,
    progress: ProgressCallback | None = None,
    shard: ShardSpec | None = None,
    token_map: Tensor | None = None,
) -> LoadedModel:
    """Load weights into transformers' definition, and check that it runs with tree attention.

    Args:
        dtype: Type of the weights; "auto" for the checkpoint's own.
        quantization: One of `config.QUANTIZATIONS`, to which the linear layers are rounded, or None.
        native: Whether to use native kernels where they are faster, and the fused decoder on a GPU. False to run the
            model with transformers and PyTorch only.
        offload: Settings to stream the decoder layers instead of keeping them in memory. At first all layers are
            streamed, see `Stream.settle`.
        progress: Callback for the progress of reading a streamed target.
        share: The part that this rank reads and holds, or None for the whole model. Other ranks are not waited for.
        token_map: [map] the only tokens whose rows of the output head are kept, or None for all. For drafters only.

    Raises:
        ModelError: The architecture is not supported, weights are missing, of the wrong shape, not finite or already
            quantized, or the model cannot be split like this.
        ValueError: The memory budget is too small.
    """
    register()
    config = load_config(folder)
    check_architecture(config)
    shard = shard or ShardSpec()
    layers = rank_layers(config, shard)
    if offload is not None and offload.offload is not None:
        definition, streamed = _load_streamed(
            folder, config, dtype, device, quantization, offload, shard, native=native, progress=progress
        )
        model, probed, stream = streamed.model, streamed.probe, streamed.stream
    else:
        definition, stream = _load_held(folder, config, dtype, shard, quantization), None
        model = definition.model
        make_linears_plain(model)
        if token_map is not None:
            cut_head(model, token_map)
        fuses = native and device.type == "cpu" and quantization != "fp8" and can_fuse(model)
        if quantization is not None and not fuses:  # before the move: the whole may not fit there
            quantize_linears(model, quantization, config, device, native=native)
        model.eval().to(device)
        if native and not fuses:
            pack_linears(model)
        fuses_on_device = native and not fuses and shard.is_whole and can_fuse_on_device(model, device)
        probed = probe(model, config, device, layers, records=fuses or fuses_on_device)
        if fuses:
            model = FusedDecoder(model, quantization, narrows=True).eval()
        elif fuses_on_device:
            model = DeviceDecoder(model, max_position_of(config)).eval()
        if probed.reference is not None:
            verdict = probed.judge(model, definition.dtype, quantization if fuses else None)
            if not verdict.is_right:
                path = _path_of(model)
                logger.warning(
                    "the %s of %s are not used, and it runs as PyTorch has it, several times slower: %s",
                    path, origin_of(folder), verdict,
                )  # fmt: skip
                del model  # free it before its weights are read again
                slow = load_model(folder, dtype, device, quantization, native=False, shard=shard, token_map=token_map)
                return replace(slow, compute_path=f"{slow.compute_path}; the {path} were refused")
    connect_shards(model, definition.sums, shard)
    release_freed_memory()
    return LoadedModel(
        model=model,
        folder=folder,
        vocab_size=config.get_text_config().vocab_size,
        max_position=max_position_of(config),
        eos_token_ids=definition.eos_token_ids,
        layer_shapes=probed.layer_shapes,
        num_parameters=definition.num_parameters,
        native=native,
        num_bytes=_num_bytes(model),
        dtype=definition.dtype,
        quantization=quantization,
        device=device,
        sampling_defaults=sampling_defaults(folder),
        compute_path=_path_of(model) + ("" if stream is None else ", streamed"),
        stream=stream,
        shard=shard,
        token_map=None if token_map is None else token_map.to(device),
    )


@dataclass(frozen=True, slots=True)
class _Definition:
    """A rank's part of a family's definition, and properties of the whole."""

    model: Any
    num_parameters: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    sums: list[str]  # see `connect_shards`

    @classmethod
    def of(cls, model: Any, config: Any, shard: ShardSpec, quantization: str | None) -> "_Definition":
        """Read the properties of a whole definition, and cut it to this rank's part."""
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        dtype, eos_token_ids = next(model.parameters()).dtype, eos_token_ids_of(model, config)
        model.requires_grad_(False)
        sums = shard_model(model, config, shard, quantization)
        return cls(model, num_parameters, dtype, eos_token_ids, sums)


def _load_held(
    folder: Path, config: Any, dtype: str | torch.dtype, shard: ShardSpec, quantization: str | None
) -> _Definition:
    """Load a definition with this rank's weights. Of a split model, no other weights are in memory at any time."""
    read = partial(read_definition, folder, config, dtype)
    is_gguf = weights_file(folder) is not None
    if shard.is_whole and not is_gguf:
        return _Definition.of(read(), config, shard, quantization)
    with _opened(folder, dtype) as checkpoint:
        if shard.is_whole:  # transformers would treat the file as quantized, and reads only some files correctly
            return _Definition.of(read(checkpoint.read_all()), config, shard, quantization)
        definition = _Definition.of(read(checkpoint.meta_weights()), config, shard, quantization)

        def read_held(state_dict: dict[str, Tensor]) -> Any:
            return _Definition.of(read(state_dict), config, shard, quantization).model

        prefixes = layer_names(definition.model, config.get_text_config().num_hidden_layers)
        checkpoint.converts_by(partial(layer_tensors, read_held, checkpoint), prefixes)
        checkpoint.fill(definition.model)
        return definition


@contextlib.contextmanager
def _opened(
    folder: Path, dtype: str | torch.dtype, progress: ProgressCallback | None = None, *, stays: bool = False
) -> Iterator[Checkpoint]:
    """Open a folder's weights, and close them at the end or on an error."""
    checkpoint = Checkpoint(folder, progress, dtype if isinstance(dtype, torch.dtype) else None)
    try:
        yield checkpoint
    except WeightsError as error:
        checkpoint.close()
        raise ModelError(str(error)) from error
    except BaseException:
        checkpoint.close()
        raise
    if not stays:
        checkpoint.close()


def _load_streamed(
    folder: Path,
    config: Any,
    dtype: str | torch.dtype,
    device: torch.device,
    quantization: str | None,
    offload: OffloadConfig,
    shard: ShardSpec,
    *,
    native: bool,
    progress: ProgressCallback | None,
) -> tuple[_Definition, Streamed]:
    if device.type == "cpu" and offload.offload == "cpu":
        raise ValueError('offload: the target runs on the CPU, whose memory "cpu" stands for; use offload="disk"')
    budget = Budget(offload.budget_bytes, device)
    with _opened(folder, dtype, progress, stays=True) as checkpoint:
        budget.spare(checkpoint.least_bytes(), budget.cache_bytes, "two layers, the cache, embeddings and head")

        def define(state_dict: dict[str, Tensor]) -> _Definition:
            return _Definition.of(read_definition(folder, config, dtype, state_dict), config, shard, quantization)

        def read(state_dict: dict[str, Tensor]) -> Any:
            return define(state_dict).model

        definition = define(checkpoint.state_dict() if shard.is_whole else checkpoint.meta_weights())
        settings = Settings(config, device, quantization, native, offload, shard)
        return definition, stream_layers(definition.model, read, checkpoint, settings)


def _path_of(model: nn.Module) -> str:
    """Return the description for `LoadedModel.compute_path`."""
    if isinstance(model, FusedDecoder):
        return "native fused layers"
    if isinstance(model, DeviceDecoder):
        return "fused device layers"
    linears = [module for module in model.modules() if isinstance(module, PackedLinear | QuantizedLinear)]
    return "native linear layers" if any(layer.call is not None for layer in linears) else "PyTorch"


def _num_bytes(model: nn.Module) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}  # counts tied ones once
    packed = sum(module.num_bytes for module in model.modules() if isinstance(module, _PACKED))
    return packed + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
