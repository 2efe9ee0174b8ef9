"""From a model folder to a model that runs with tree attention, or to what one rank holds of it.

What would be silently wrong is refused by name: layers that do not call our attention, and what `definition` refuses.
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

from specinfer.config import OffloadConfig
from specinfer.errors import ModelError, WeightsError
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
from specinfer.model.held import held_layers, hold, join
from specinfer.model.kv_cache import LayerShape
from specinfer.model.linears import cut_head, layer_names, make_linears_plain, quantize_linears
from specinfer.model.offload.budget import Budget, give_back
from specinfer.model.offload.checkpoint import Checkpoint
from specinfer.model.offload.layer_stream import LayerStream
from specinfer.model.probe import probe
from specinfer.model.streamed import Settings, Streamed, layer_tensors, stream_layers
from specinfer.parallel.share import Share
from specinfer.progress import ProgressCallback

logger = logging.getLogger(__name__)
_PACKED = (PackedLinear, QuantizedLinear, FusedDecoder)  # they hold weights that are no parameters


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what was learned of it.

    Attributes:
        num_parameters: Of the checkpoint, whatever they became.
        num_bytes: That the weights take as they are held.
        dtype: Of keys, values and activations, and of the weights that are not quantized.
        quantization: One of `config.QUANTIZATIONS`, or None.
        compute_path: What computes its layers, in words.
        stream: Brings in the layers that are not held; None: all are.
        share: What of the model this is.
        token_map: [map] the only tokens that it computes logits of; None: it does of all.
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
    sampling_defaults: Mapping[str, float]  # what the folder recommends, by names of `SamplingParams`
    compute_path: str
    stream: LayerStream | None = None
    share: Share = field(default_factory=Share)
    token_map: Tensor | None = None

    @property
    def num_logits(self) -> int:
        """Of each token it is asked about."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    @property
    def seconds_waiting(self) -> float:
        """In which passes waited for weights that are not held."""
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
    share: Share | None = None,
    token_map: Tensor | None = None,
) -> LoadedModel:
    """Loads weights into transformers' definition and checks that it runs with tree attention.

    Args:
        dtype: "auto" is the checkpoint's own.
        quantization: One of `config.QUANTIZATIONS`: what the linear layers are rounded to.
        native: Use native kernels where they are faster, and the fused decoder on a GPU; else the model runs as
            transformers and PyTorch have it.
        offload: Its decoder layers are not held, but streamed; at first all of them, see `Stream.settle`.
        progress: Told of what is read of a target that is streamed.
        share: What of it this rank reads and holds; None: all. Other ranks are not waited for.
        token_map: [map] the only tokens whose rows of the output head are kept; None: all. Not of a target.

    Raises:
        ModelError: Architecture not supported, weights missing, misshapen, not finite or quantized already, or the
            model cannot be shared so.
        ValueError: The memory budget is too small.
    """
    register()
    config = load_config(folder)
    check_architecture(config)
    share = share or Share()
    layers = held_layers(config, share)
    if offload is not None and offload.offload is not None:
        definition, streamed = _load_streamed(
            folder, config, dtype, device, quantization, offload, share, native=native, progress=progress
        )
        model, probed, stream = streamed.model, streamed.probe, streamed.stream
    else:
        definition, stream = _load_held(folder, config, dtype, share, quantization), None
        model = definition.model
        make_linears_plain(model)
        if token_map is not None:
            cut_head(model, token_map)
        fuses = native and device.type == "cpu" and quantization != "fp8" and can_fuse(model)
        if quantization is not None and not fuses:  # before the others are moved: the whole model may not fit there
            quantize_linears(model, quantization, config, device, native=native)
        model.eval().to(device)
        if native and not fuses:
            pack_linears(model)
        fuses_on_device = native and not fuses and share.is_whole and can_fuse_on_device(model, device)
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
                del model  # before its weights are read again
                slow = load_model(folder, dtype, device, quantization, native=False, share=share, token_map=token_map)
                return replace(slow, compute_path=f"{slow.compute_path}; the {path} were refused")
    join(model, definition.sums, share)
    give_back()
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
        share=share,
        token_map=None if token_map is None else token_map.to(device),
    )


@dataclass(frozen=True, slots=True)
class _Definition:
    """A rank's part of a family's definition, and what was learned of the whole."""

    model: Any
    num_parameters: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    sums: list[str]  # see `held.join`

    @classmethod
    def of(cls, model: Any, config: Any, share: Share, quantization: str | None) -> "_Definition":
        """Takes a whole definition; it is cut."""
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        dtype, eos_token_ids = next(model.parameters()).dtype, eos_token_ids_of(model, config)
        model.requires_grad_(False)
        sums = hold(model, config, share, quantization)
        return cls(model, num_parameters, dtype, eos_token_ids, sums)


def _load_held(
    folder: Path, config: Any, dtype: str | torch.dtype, share: Share, quantization: str | None
) -> _Definition:
    """A definition with the weights that this rank holds. Of a model that is split nothing else is held at any time."""
    read = partial(read_definition, folder, config, dtype)
    is_gguf = weights_file(folder) is not None
    if share.is_whole and not is_gguf:
        return _Definition.of(read(), config, share, quantization)
    with _opened(folder, dtype) as checkpoint:
        if share.is_whole:  # transformers would take the file for a quantized model, and reads only some files right
            return _Definition.of(read(checkpoint.read_all()), config, share, quantization)
        definition = _Definition.of(read(checkpoint.stand_ins()), config, share, quantization)

        def read_held(state_dict: dict[str, Tensor]) -> Any:
            return _Definition.of(read(state_dict), config, share, quantization).model

        prefixes = layer_names(definition.model, config.get_text_config().num_hidden_layers)
        checkpoint.converts_by(partial(layer_tensors, read_held, checkpoint), prefixes)
        checkpoint.fill(definition.model)
        return definition


@contextlib.contextmanager
def _opened(
    folder: Path, dtype: str | torch.dtype, progress: ProgressCallback | None = None, *, stays: bool = False
) -> Iterator[Checkpoint]:
    """A folder's weights; closed in the end, or if an error comes."""
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
    share: Share,
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
            return _Definition.of(read_definition(folder, config, dtype, state_dict), config, share, quantization)

        def read(state_dict: dict[str, Tensor]) -> Any:
            return define(state_dict).model

        definition = define(checkpoint.state_dict() if share.is_whole else checkpoint.stand_ins())
        settings = Settings(config, device, quantization, native, offload, share)
        return definition, stream_layers(definition.model, read, checkpoint, settings)


def _path_of(model: nn.Module) -> str:
    """See `LoadedModel.compute_path`."""
    if isinstance(model, FusedDecoder):
        return "native fused layers"
    if isinstance(model, DeviceDecoder):
        return "fused device layers"
    linears = [module for module in model.modules() if isinstance(module, PackedLinear | QuantizedLinear)]
    return "native linear layers" if any(layer.call is not None for layer in linears) else "PyTorch"


def _num_bytes(model: nn.Module) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}  # tied ones once
    packed = sum(module.num_bytes for module in model.modules() if isinstance(module, _PACKED))
    return packed + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
