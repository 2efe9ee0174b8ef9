"""From a model folder to a model that runs with tree attention. transformers enters here.

Only safetensors are read, no code comes with a model, and what would be silently wrong is refused by
name: layers that do not call our attention, missing or misshapen weights, values that are not finite.
"""

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from specinfer.config import OffloadConfig
from specinfer.errors import ModelError, WeightsError, first_line
from specinfer.kernels import PackedLinear, QuantizedLinear, pack_linears
from specinfer.model.attention import ATTENTION_NAME, register
from specinfer.model.families import REPLACED
from specinfer.model.folder import sampling_defaults
from specinfer.model.fused import FusedDecoder, can_fuse
from specinfer.model.held import held_layers, hold, join
from specinfer.model.kv_cache import LayerShape
from specinfer.model.linears import layer_names, make_linears_plain, quantize_linears
from specinfer.model.offload.budget import Budget
from specinfer.model.offload.checkpoint import Checkpoint
from specinfer.model.offload.layer_stream import LayerStream
from specinfer.model.probe import agrees, probe
from specinfer.model.streamed import Settings, Streamed, layer_tensors, stream_layers
from specinfer.parallel.share import Share
from specinfer.progress import Tell

logger = logging.getLogger(__name__)
_PACKED = (PackedLinear, QuantizedLinear, FusedDecoder)  # they hold weights that are no parameters
_LAYER_WEIGHT = re.compile(r"\b(layers|h|blocks)\.\d+\..*weight$")
_MAX_LAYERS = 2000  # the definition is made before the weights are looked at
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what was learned of it.

    Attributes:
        num_parameters: Of the checkpoint, whatever they became.
        num_bytes: That the weights take as they are held.
        dtype: Of keys, values and activations, and of the weights that are not quantized.
        quantization: "int8", "int4" or None.
        stream: Brings in the layers that are not held; None: all are.
        share: What of the model this is.
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
    stream: LayerStream | None = None
    share: Share = field(default_factory=Share)


def load_config(folder: Path) -> Any:
    """The model's configuration.

    Raises:
        ModelError: config.json is unreadable, or names an architecture transformers does not have.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each family checks its fields with exceptions of its own
        raise ModelError(f"model: config.json of {folder} cannot be used: {first_line(error)}") from error
    text_config = config.get_text_config()
    for name in _SIZES:
        value = getattr(text_config, name, 1)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"model: {name} in config.json of {folder} is {value!r}, not a number of at least 1")
    num_layers = getattr(text_config, "num_hidden_layers", 1)
    if num_layers > _MAX_LAYERS:
        raise ModelError(f"model: num_hidden_layers in config.json of {folder} is {num_layers}, above {_MAX_LAYERS}")
    return config


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None if it has none: then only token ids can be prompts."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizer back ends raise bare Exception
        raise ModelError(f"tokenizer of {folder} cannot be used: {first_line(error)}") from error


def load_model(
    folder: Path,
    dtype: str | torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    *,
    native: bool = True,
    offload: OffloadConfig | None = None,
    progress: Tell | None = None,
    share: Share | None = None,
) -> LoadedModel:
    """Loads weights into transformers' definition and checks that it runs with tree attention.

    Args:
        dtype: "auto" is the checkpoint's own.
        quantization: "int8" or "int4": what the linear layers are rounded to.
        native: Use native kernels where they are faster; else the model runs as PyTorch has it.
        offload: Its decoder layers are not held, but streamed; at first all of them, see `Stream.settle`.
        progress: Told of what is read of a target that is streamed.
        share: What of it this rank reads and holds; None: all. Other ranks are not waited for.

    Raises:
        ModelError: Architecture not supported, weights missing, misshapen, not finite or quantized already, or the
            model cannot be shared so.
        ValueError: The memory budget is too small.
    """
    register()
    config = load_config(folder)
    _check_architecture(config)
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
        fuses = native and device.type == "cpu" and can_fuse(model)
        if quantization is not None and not fuses:  # before the others are moved: the whole model may not fit there
            quantize_linears(model, quantization, config, device, native=native)
        model.eval().to(device)
        if native and not fuses:
            pack_linears(model)
        probed = probe(model, config, device, layers)
        if fuses:
            model = FusedDecoder(model, quantization).eval()
            if quantization is None and not agrees(model, probed, definition.dtype, device):
                logger.warning("the native layers of %s compute something else than it does: they are not used", folder)
                return load_model(folder, dtype, device, native=False, share=share)
    join(model, definition.sums, share)
    return LoadedModel(
        model=model,
        folder=folder,
        vocab_size=config.get_text_config().vocab_size,
        max_position=_max_position(config),
        eos_token_ids=definition.eos_token_ids,
        layer_shapes=probed.layer_shapes,
        num_parameters=definition.num_parameters,
        native=native,
        num_bytes=_num_bytes(model),
        dtype=definition.dtype,
        quantization=quantization,
        device=device,
        sampling_defaults=sampling_defaults(folder),
        stream=stream,
        share=share,
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
        dtype, eos_token_ids = next(model.parameters()).dtype, _eos_token_ids(model, config)
        model.requires_grad_(False)
        sums = hold(model, config, share, quantization)
        return cls(model, num_parameters, dtype, eos_token_ids, sums)


def _load_held(
    folder: Path, config: Any, dtype: str | torch.dtype, share: Share, quantization: str | None
) -> _Definition:
    """A definition with the weights that this rank holds. Of a model that is split nothing else is held at any time."""
    read = partial(_read, folder, config, dtype)
    if share.is_whole:
        return _Definition.of(read(), config, share, quantization)
    with _opened(folder) as checkpoint:
        definition = _Definition.of(read(checkpoint.stand_ins()), config, share, quantization)

        def read_held(state_dict: dict[str, Tensor]) -> Any:
            return _Definition.of(read(state_dict), config, share, quantization).model

        prefixes = layer_names(definition.model, config.get_text_config().num_hidden_layers)
        checkpoint.converts_by(partial(layer_tensors, read_held, checkpoint), prefixes)
        checkpoint.fill(definition.model)
        return definition


@contextlib.contextmanager
def _opened(folder: Path, progress: Tell | None = None, *, stays: bool = False) -> Iterator[Checkpoint]:
    """A folder's weights; closed in the end, or if an error comes."""
    checkpoint = Checkpoint(folder, progress)
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
    progress: Tell | None,
) -> tuple[_Definition, Streamed]:
    if device.type == "cpu" and offload.offload == "cpu":
        raise ValueError('offload: the target runs on the CPU, whose memory "cpu" stands for; use offload="disk"')
    budget = Budget(offload.budget_bytes, device)
    with _opened(folder, progress, stays=True) as checkpoint:
        budget.spare(checkpoint.least_bytes(), budget.cache_bytes, "two layers, the cache, embeddings and head")

        def define(state_dict: dict[str, Tensor]) -> _Definition:
            return _Definition.of(_read(folder, config, dtype, state_dict), config, share, quantization)

        def read(state_dict: dict[str, Tensor]) -> Any:
            return define(state_dict).model

        definition = define(checkpoint.state_dict() if share.is_whole else checkpoint.stand_ins())
        settings = Settings(config, device, quantization, native, offload, share)
        return definition, stream_layers(definition.model, read, checkpoint, settings)


def _read(folder: Path, config: Any, dtype: str | torch.dtype, state_dict: dict[str, Tensor] | None = None) -> Any:
    """The family's definition with the folder's weights, or those given."""
    family = config.model_type
    try:
        model, info = _load_quietly(
            folder if state_dict is None else None,
            state_dict=state_dict,
            config=config,
            dtype=dtype,
            # Falcon and MPT know nothing of our attention; their replacements call it themselves.
            attn_implementation="eager" if family in REPLACED else ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except Exception as error:  # whatever a definition meets in a folder it does not fit
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):  # a table of attention classes
            raise ModelError(f"model: family {family!r} is not supported: its attention cannot be replaced") from error
        raise ModelError(f"model: {folder} ({family}) cannot be loaded: {first_line(error)}") from error
    _check_weights(model, info, folder)
    if state_dict is not None and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return REPLACED[family](model) if family in REPLACED else model


def _load_quietly(folder: Path | None, **options: Any) -> Any:
    with quietly():
        # Tensors that are given go to the family's own class only.
        kind = (
            AutoModelForCausalLM if folder is not None else AutoModelForCausalLM._model_mapping[type(options["config"])]
        )
        return kind.from_pretrained(folder, **options)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """What transformers would say beside, in bars and reports, is checked and said by us."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _check_architecture(config: Any) -> None:
    if config.is_encoder_decoder or type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(f"model: {config.model_type!r} is not a decoder that generates text")
    for part in (config, config.get_text_config()):
        if (done := getattr(part, "quantization_config", None)) is not None:
            method = done.get("quant_method") if isinstance(done, dict) else getattr(done, "quant_method", None)
            raise ModelError(
                f"model: the weights are quantized already ({method or 'method not named'}), and such are not read; "
                'take the checkpoint they were made of, with quantization="int8" or "int4"'
            )
    types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if types:
        raise ModelError(f"model: {config.model_type!r} has layers not supported: {', '.join(sorted(types))}")


def _check_weights(model: Any, info: Any, folder: Path) -> None:
    for kind in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, info[kind])):
            raise ModelError(
                f"model: {folder} has {len(names)} {kind.replace('_keys', '')} weights, {names[0]} among them; "
                "config.json and the weights do not belong together"
            )
    if unused := sorted(str(key) for key in info["unexpected_keys"] if _LAYER_WEIGHT.search(str(key))):
        raise ModelError(
            f"model: config.json of {folder} has no place for {len(unused)} weights, {unused[0]} among them; "
            "config.json and the weights do not belong together"
        )
    for name, weight in model.named_parameters():
        if weight.is_meta:
            continue  # read later, and looked at then
        if not bool(torch.isfinite(weight.sum(dtype=torch.float32))) and not bool(weight.isfinite().all()):
            raise ModelError(f"model: weight {name} of {folder} holds NaN or infinity; fetch the model again")


def _num_bytes(model: nn.Module) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}  # tied ones once
    packed = sum(module.num_bytes for module in model.modules() if isinstance(module, _PACKED))
    return packed + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _max_position(config: Any) -> int:
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this the rotation of all texts in a pass changes with the longest of them.
        return int(rope.get("original_max_position_embeddings") or config.original_max_position_embeddings)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    return 2048


def _eos_token_ids(model: Any, config: Any) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = config.get_text_config().eos_token_id if ids is None else ids
    if ids is None:
        return ()
    ids = ids if isinstance(ids, (list, tuple)) else (int(ids),)
    # Some configs name an end token that the vocabulary lacks: it is never said.
    return tuple(i for i in ids if 0 <= i < config.get_text_config().vocab_size)
