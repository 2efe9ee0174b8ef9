"""Loading of a model folder: a model that runs with tree attention, or the shard of it that one rank computes.

A definition is read, goes through `TRANSFORMS` in their order, runs one tiny pass, and may be rebuilt from fused
layers, which are compared with that pass. If they compute something else, the model is loaded once more without native
code. A model that would compute wrong results silently is refused with an error: one whose layers do not call our
attention, and one that `definition` refuses.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specinfer.core.config import OffloadConfig
from specinfer.core.errors import ModelError, first_line
from specinfer.core.progress import ProgressCallback
from specinfer.model.attention import register
from specinfer.model.context_length import fit_to_length, max_position_of
from specinfer.model.definition import check_architecture, load_config
from specinfer.model.device import check_gpu, warn_of_slow_type
from specinfer.model.folder import sampling_defaults
from specinfer.model.gguf.folder import origin_of
from specinfer.model.invariance import check_can_be_invariant, make_invariant
from specinfer.model.kv_tensors import LayerShape, TapShape
from specinfer.model.layers.device import DeviceDecoder, DeviceLayers, can_fuse_on_device
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.layers.native import NativeLayers
from specinfer.model.linears import cut_head, make_linears_plain, quantize_linears
from specinfer.model.load_config import LoadConfig
from specinfer.model.offload.budget import release_freed_memory
from specinfer.model.offload.meta_weights import LinearCut
from specinfer.model.offload.shards import with_scales
from specinfer.model.offload.streamed_layer import LayerStream
from specinfer.model.own_pass import choose_way
from specinfer.model.probe import probe
from specinfer.model.quantized_experts import QuantizedExperts
from specinfer.model.recurrent.layers import check_stages
from specinfer.model.shard_definition import BuiltModel, read_shard, rounding_of
from specinfer.model.sharding.shard import connect_shards, rank_layers
from specinfer.model.streamed import load_streamed
from specinfer.ops import PackedLinear, QuantizedEmbedding, QuantizedLinear, pack_linears
from specinfer.ops.triton import why_not_on
from specinfer.parallel.group import ShardSpec

logger = logging.getLogger(__name__)
# These have weights that are not parameters.
_PACKED = (PackedLinear, QuantizedLinear, QuantizedEmbedding, QuantizedExperts, FusedDecoder, NativeLayers)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and its properties.

    Attributes:
        num_parameters: Number of parameters of the checkpoint, before quantization and splitting.
        num_bytes: Bytes that the weights take in memory.
        dtype: Type of activations, and of the weights that are not quantized.
        quantization: One of `config.QUANTIZATIONS`, or None.
        stored_types: The types of weights that are computed with as a file stores them, such as "Q4_K, Q6_K" or
            "int4", or None.
        compute_path: Description of the code that computes its layers.
        stream: Brings in the layers that are not kept in memory, or None if all are.
        shard: The shard of the model that this rank computes.
        layers: The numbers of its decoder layers in the whole model.
        cuts: The slices of linear layers in the decoder layers that this rank computes, by name.
        token_map: [map] the only tokens whose logits are computed, or None for the whole vocabulary.
        taps: The hidden states that its cache stores for drafters that read them, or None.
        kv_dtype: Type of the keys and values in its cache, or None for `dtype`.
        batch_invariant: Whether its rows are computed with one order of sums, whatever else is in a pass.
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
    stored_types: str | None = None
    stream: LayerStream | None = None
    shard: ShardSpec = field(default_factory=ShardSpec)
    layers: range = range(0)
    cuts: Mapping[str, LinearCut] = field(default_factory=dict)
    token_map: Tensor | None = None
    taps: TapShape | None = None
    kv_dtype: torch.dtype | None = None
    batch_invariant: bool = False

    @property
    def num_logits(self) -> int:
        """Number of logits of each token."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    @property
    def weights_type(self) -> str:
        """The quantization of the weights, the types that they are stored in, or their number type."""
        return self.quantization or self.stored_types or str(self.dtype).removeprefix("torch.")

    @property
    def is_quantized(self) -> bool:
        """True if most weights are quantized."""
        return (self.quantization or self.stored_types) is not None

    @property
    def seconds_waiting(self) -> float:
        """Seconds that passes have waited for weights that are not kept in memory."""
        return 0.0 if self.stream is None else self.stream.seconds_waiting


class Transform(NamedTuple):
    """A step from a definition to the model that runs.

    Attributes:
        is_needed: Function of the configuration, and of whether the layers will be fused.
        apply: Function that changes the model in place.
    """

    name: str
    is_needed: Callable[[LoadConfig, bool], bool]
    apply: Callable[[Any, Any], object]


TRANSFORMS = (
    # Needs the definition; makes every linear layer an `nn.Linear`, which the steps below expect.
    Transform("plain linear layers", lambda job, fuses: True, lambda model, job: make_linears_plain(model)),
    # Needs a linear head; leaves the rows of the map's tokens.
    Transform(
        "token map", lambda job, fuses: job.token_map is not None, lambda model, job: cut_head(model, job.token_map)
    ),
    # Needs plain layers; puts quantized ones on the device, one by one, because the whole may not fit there.
    Transform(
        "quantization",
        lambda job, fuses: job.quantization is not None and not fuses,
        lambda model, job: quantize_linears(model, job.quantization, job.config, job.device, native=job.native),
    ),
    Transform("device", lambda job, fuses: True, lambda model, job: model.eval().to(job.device)),
    # Needs all weights, where they are computed with.
    Transform("way", lambda job, fuses: True, choose_way),
    # Needs plain layers on a CPU; packs their weights for native kernels.
    Transform("packing", lambda job, fuses: job.native and not fuses, lambda model, job: pack_linears(model)),
)


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
    kv_dtype: torch.dtype | None = None,
    num_sharing: int = 1,
    max_model_len: int | None = None,
    batch_invariant: bool = False,
) -> LoadedModel:
    """Load weights into transformers' definition, and check that it runs with tree attention.

    Args:
        dtype: Type of the weights; "auto" for the checkpoint's own.
        quantization: One of `config.QUANTIZATIONS`, to which the linear layers are rounded, or None to leave
            them as the checkpoint has them.
        native: Whether to use native kernels on a CPU, and the fused decoder on a GPU. False to run the model with
            transformers and PyTorch, as on a GPU without Triton, which computes with no codes.
        offload: Settings to stream the decoder layers instead of keeping them in memory. At first all layers are
            streamed, see `Stream.settle`.
        progress: Callback for the progress of reading a streamed target.
        shard: The shard that this rank reads and computes, or None for the whole model. It does not wait for other
            ranks.
        token_map: [map] the only tokens whose rows of the output head are kept, or None for all. For drafters only.
        kv_dtype: Type of the keys and values in its cache, or None for that of the model.
        num_sharing: Number of processes that stream their layers from this machine's memory.
        max_model_len: Length of the longest text, or None for the model's own.
        batch_invariant: Whether each row must be computed with one order of sums, see `invariance.py`.

    Raises:
        ModelError: The architecture is not supported, weights are missing, of the wrong shape, not finite, already
            quantized or too large for the GPU, or the model cannot be split like this.
        ValueError: The memory budget is too small, or the GPU cannot be used.
    """
    device = check_gpu(device)
    register()
    config = load_config(folder)
    check_architecture(config)
    fit_to_length(config, max_model_len)
    native = native and (device.type != "cuda" or why_not_on(device) is None)
    offload, shard = offload or OffloadConfig(), shard or ShardSpec()
    rank_layers(config, shard)  # refuses more stages than layers
    check_stages(config, shard.num_stages)
    job = LoadConfig(
        folder, config, dtype, device, quantization, native, offload, shard, token_map, kv_dtype, num_sharing
    )
    if batch_invariant:
        check_can_be_invariant(job)
    loaded = _load(job, progress)
    if batch_invariant:
        make_invariant(loaded)
    return replace(loaded, batch_invariant=batch_invariant)


def _load(job: LoadConfig, progress: ProgressCallback | None) -> LoadedModel:
    if job.offload.offload is not None:
        return _loaded(job, load_streamed(job, progress), ", streamed")
    note = ""
    for attempt in (job, replace(job, allows_fusing=False)):
        try:
            built = _build(attempt)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"{origin_of(job.folder)} does not fit into the memory of {job.device}: {first_line(error)}; set "
                "quantization or offload, or split it over several GPUs"
            ) from error
        if not isinstance(built, str):
            break
        note = f"; the {built} were refused"
    assert not isinstance(built, str)
    return _loaded(attempt, built, note)


def _build(job: LoadConfig) -> BuiltModel | str:
    """Build a model that is in memory as a whole, or return the compute path that was refused."""
    definition = read_shard(job)
    model = definition.model
    fuses = job.fuses(model)
    for transform in TRANSFORMS:
        if transform.is_needed(job, fuses):
            transform.apply(model, job)
    fuses_on_device = job.native and job.allows_fusing and not fuses and can_fuse_on_device(model, job.device)
    probed = probe(model, job.config, job.device, job.layers, records=fuses or fuses_on_device)
    if fuses:
        model = FusedDecoder(model, job.quantization, narrows=True).eval()
    elif fuses_on_device:
        model = DeviceDecoder(model, max_position_of(job.config)).eval()
    else:
        return BuiltModel(model, definition, probed)
    verdict = probed.judge(model, definition.dtype, rounding_of(job, definition) if fuses else None)
    if verdict.is_right:
        return BuiltModel(model, definition, probed)
    logger.warning(
        "the %s of %s are not used, and its layers run as transformers defines them, several times slower: %s",
        path_of(model), origin_of(job.folder), verdict,
    )  # fmt: skip
    return path_of(model)


def _loaded(job: LoadConfig, built: BuiltModel, note: str) -> LoadedModel:
    """Connect a model to the other ranks, and describe it; `note` ends the description of its compute path."""
    model, definition = built.model, built.definition
    warn_of_slow_type(job.device, definition.dtype)
    connect_shards(model, definition.split.sums, job.shard)
    release_freed_memory()
    return LoadedModel(
        model=model,
        folder=job.folder,
        vocab_size=job.config.get_text_config().vocab_size,
        max_position=max_position_of(job.config),
        eos_token_ids=definition.eos_token_ids,
        layer_shapes=with_scales(built.probe.layer_shapes, job.folder, job.layers),
        num_parameters=definition.num_parameters,
        # Attention of layers that were refused on a CPU is PyTorch's: nothing has checked the native one.
        native=job.native and (job.allows_fusing or job.device.type != "cpu"),
        num_bytes=num_bytes_of(model),
        dtype=definition.dtype,
        quantization=job.quantization,
        device=job.device,
        sampling_defaults=sampling_defaults(job.folder),
        compute_path=path_of(model) + note,
        stored_types=definition.stored_types,
        stream=built.stream,
        shard=job.shard,
        layers=job.layers,
        cuts=definition.split.cuts,
        token_map=None if job.token_map is None else job.token_map.to(job.device),
        kv_dtype=job.kv_dtype,
    )


def path_of(model: nn.Module) -> str:
    """Return the description for `LoadedModel.compute_path`."""
    if any(isinstance(module, NativeLayers) for module in model.modules()):
        return "native fused layers"
    if any(isinstance(module, DeviceLayers) for module in model.modules()):
        return "fused device layers"
    linears = [module for module in model.modules() if isinstance(module, PackedLinear | QuantizedLinear)]
    return "native linear layers" if any(layer.call is not None for layer in linears) else "PyTorch"


def num_bytes_of(model: nn.Module) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}  # counts tied ones once
    packed = {id(getattr(m, "call", m)): m.num_bytes for m in model.modules() if isinstance(m, _PACKED)}
    if isinstance(model, FusedDecoder):
        packed = {id(model): model.num_bytes}  # with an embedding of codes
    return sum(packed.values()) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
