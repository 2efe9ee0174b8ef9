"""From a model folder to a model that runs with tree attention. transformers enters here.

Only safetensors are read, no code comes with a model, and what would be silently wrong is refused by
name: layers that do not call our attention, missing or misshapen weights, values that are not finite.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from specinfer.errors import ModelError
from specinfer.kernels import pack_linears
from specinfer.model.attention import ATTENTION_NAME, UnsupportedAttentionError, register
from specinfer.model.batch import Piece, pack
from specinfer.model.families import REPLACED
from specinfer.model.kv_cache import LayerShape
from specinfer.model.linears import make_linears_plain, quantize_linears
from specinfer.tree import TokenTree

_LAYER_WEIGHT = re.compile(r"\b(layers|h|blocks)\.\d+\..*weight$")
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
    """

    model: nn.Module
    folder: Path
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    layer_shapes: tuple[LayerShape, ...]
    num_parameters: int
    num_bytes: int
    dtype: torch.dtype
    quantization: str | None
    device: torch.device


def load_config(folder: Path) -> Any:
    """The model's configuration.

    Raises:
        ModelError: config.json is unreadable, or names an architecture transformers does not have.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each family checks its fields with exceptions of its own
        raise ModelError(f"model: config.json of {folder} cannot be used: {_first_line(error)}") from error
    text_config = config.get_text_config()
    for name in _SIZES:
        value = getattr(text_config, name, 1)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"model: {name} in config.json of {folder} is {value!r}, not a number of at least 1")
    return config


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None if it has none: then only token ids can be prompts."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizer back ends raise bare Exception
        raise ModelError(f"tokenizer of {folder} cannot be used: {_first_line(error)}") from error


def load_model(
    folder: Path, dtype: str | torch.dtype, device: torch.device, quantization: str | None = None
) -> LoadedModel:
    """Loads weights into transformers' definition and checks that it runs with tree attention.

    Args:
        dtype: "auto" is the checkpoint's own.
        quantization: "int8" or "int4": what the linear layers are rounded to.

    Raises:
        ModelError: Architecture not supported, weights missing, misshapen, not finite or quantized already.
    """
    register()
    config = load_config(folder)
    family = config.model_type
    _check_architecture(config)
    try:
        model, info = _load_quietly(
            folder,
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
        raise ModelError(f"model: {folder} ({family}) cannot be loaded: {_first_line(error)}") from error
    _check_weights(model, info, folder)
    if family in REPLACED:
        model = REPLACED[family](model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    computed_in = next(model.parameters()).dtype
    model.requires_grad_(False)
    make_linears_plain(model)
    if quantization is not None:  # before the others are moved: the whole model may not fit there
        quantize_linears(model, quantization, config, device)
    model.eval().to(device)
    pack_linears(model)
    shapes = _probe(model, family, config, device)
    return LoadedModel(
        model=model,
        folder=folder,
        vocab_size=config.get_text_config().vocab_size,
        max_position=_max_position(config),
        eos_token_ids=_eos_token_ids(model, config),
        layer_shapes=shapes,
        num_parameters=num_parameters,
        num_bytes=_num_bytes(model),
        dtype=computed_in,
        quantization=quantization,
        device=device,
    )


def _load_quietly(folder: Path, **options: Any) -> Any:
    """What transformers would say beside, in bars and reports, is checked and said by us."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(folder, **options)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


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
        if not bool(torch.isfinite(weight.sum(dtype=torch.float32))) and not bool(weight.isfinite().all()):
            raise ModelError(f"model: weight {name} of {folder} holds NaN or infinity; fetch the model again")


class _ProbeStore:
    """Stands in for the cache in the probing pass and notes what each layer stores."""

    def __init__(self, num_layers: int) -> None:
        self.keys: list[Tensor] = [torch.empty(0)] * num_layers
        self.values: list[Tensor] = [torch.empty(0)] * num_layers
        self.num_calls = [0] * num_layers

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        del slots  # always 0, 1, 2, ... here
        self.num_calls[layer] += 1
        self.keys[layer], self.values[layer] = key, value


def _probe(model: nn.Module, family: str, config: Any, device: torch.device) -> tuple[LayerShape, ...]:
    """One tiny pass: does every layer call our attention exactly once, and what does it store?"""
    store = _ProbeStore(config.get_text_config().num_hidden_layers)
    tree = TokenTree.chain(0, [0, 0])
    none, slots = torch.arange(0).numpy(), torch.arange(3).numpy()
    batch = pack([Piece.of_span([0], tree, none, slots)], store, device)
    try:
        with torch.inference_mode():
            logits = forward(model, batch)
    except UnsupportedAttentionError as error:
        raise ModelError(f"model: family {family!r} is not supported: {error}") from error
    except Exception as error:
        raise ModelError(
            f"model: family {family!r} is not supported: it does not run with tree attention ({_first_line(error)})"
        ) from error
    if silent := [layer for layer, calls in enumerate(store.num_calls) if calls != 1]:
        raise ModelError(
            f"model: family {family!r} is not supported: layers {_ranges(silent)} of {len(store.num_calls)} "
            "do not call the attention interface of transformers once a pass"
        )
    if _has_window(config) and batch.groups[0].windows() == {None}:
        raise ModelError(
            f"model: family {family!r} is not supported with a sliding window: it does not hand the window to attention"
        )
    if not bool(logits.isfinite().all()):
        raise ModelError(
            f"model: {family!r} computes values that are not finite in this dtype; try bfloat16 or float32"
        )
    return tuple(LayerShape(k.shape[1], k.shape[2], v.shape[2]) for k, v in zip(store.keys, store.values, strict=True))


def _has_window(config: Any) -> bool:
    config = config.get_text_config()
    if (types := getattr(config, "layer_types", None)) is not None:
        return "sliding_attention" in types
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))


def forward(model: nn.Module, batch: Any) -> Tensor:
    """[rows, vocab] float32 logits of the tokens the batch asks for."""
    output = model(
        input_ids=batch.token_ids.unsqueeze(0),
        position_ids=batch.positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=batch.logit_rows,
        forward_batch=batch,
    )
    logits: Tensor = output.logits[0]
    return logits.float()


def _num_bytes(model: nn.Module) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}  # tied ones once
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


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


def _ranges(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return said[:300] or type(error).__name__
