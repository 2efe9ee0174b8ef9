"""Loading of transformers' definition of a model, with the weights of its folder.

Only safetensors and GGUF weights are read, and no code from the model folder is run. Weights that are missing, of the
wrong shape or not finite are refused with an error that names them. Names are taken from `transformers` where they are
used: it imports its models then, which takes seconds.
"""

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn

from specinfer.core.errors import ModelError, first_line
from specinfer.hub.files import read_object
from specinfer.hub.locate import TOKENIZER_FILE, TOKENIZERS
from specinfer.model.attention import register
from specinfer.model.families import REPLACED
from specinfer.model.gguf.folder import origin_of, weights_file
from specinfer.model.offload.checkpoint import is_finite
from specinfer.model.offload.shards import Shards, has_safetensors, has_usual_names
from specinfer.model.past import OWN, PACKED
from specinfer.model.recurrent.layers import FEED_FORWARD_TYPES, LAYER_TYPES, replace_layers

logger = logging.getLogger(__name__)
_LAYER_WEIGHT = re.compile(r"\b(layers|h|blocks)\.\d+\..*weight(.?\w*scale\w*)?$")  # scales belong to codes
_MAX_LAYERS = 2000  # the definition is made before the weights are read
# What is missing by less than this is refused by name, after it has been allocated.
_MOST_MISSING, _SPARE_PARAMETERS = 4, 10**7
_SAME_AS = {"mimo": "qwen2"}  # families that transformers does not have, and one that computes the same
_BLOCK_TYPES = {"recurrent": "linear_attention", "attention": "sliding_attention"}
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_LAYER_TYPES = {"full_attention", "sliding_attention", *LAYER_TYPES, *FEED_FORWARD_TYPES}


def import_models() -> None:
    """Import what every definition needs of transformers, before memory that is in use is counted."""
    _ = transformers.PreTrainedModel


def load_config(folder: Path) -> Any:
    """Load the model's configuration.

    Raises:
        ModelError: config.json is unreadable, or names an architecture that transformers does not have.
    """
    try:
        config = _read_config(folder)
    except Exception as error:  # each family raises its own exceptions
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


def _read_config(folder: Path) -> Any:
    fields = read_object(folder / "config.json") or {}
    if (family := _SAME_AS.get(fields.get("model_type", ""))) is None:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    else:
        fields.pop("auto_map", None)
        config = transformers.AutoConfig.for_model(**(fields | {"model_type": family}))
    if config.model_type == "recurrent_gemma" and not hasattr(config, "layer_types"):  # before transformers 5.23
        config.layer_types = [_BLOCK_TYPES[kind] for kind in config.layers_block_type]
    for part in (config, config.get_text_config()):  # weights are decoded by `Shards`, not by transformers
        vars(part).pop("quantization_config", None)
    return config


def known_positions(folder: Path) -> int | None:
    """Return the model's number of positions, or None if its config uses another name (known only after loading)."""
    return getattr(load_config(folder).get_text_config(), "max_position_embeddings", None)


def load_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer, or None if it has none. Without a tokenizer, prompts must be token ids."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return None
    # A family's own class would replace the rule of a GGUF file by that of the family.
    kinds: list[Any] = [transformers.PreTrainedTokenizerFast]
    if weights_file(folder) is None:
        kinds.insert(0, transformers.AutoTokenizer)
    for kind in kinds:
        try:
            tokenizer = kind.from_pretrained(folder, trust_remote_code=False)
            tokenizer.encode("a 1\n\u00e9\u2603")  # a class that does not fit tokenizer.json raises here
            break
        except Exception as error:  # tokenizer back ends raise bare Exception
            if kind is kinds[-1] or not (folder / TOKENIZER_FILE).is_file():
                raise ModelError(
                    f"model: the tokenizer of {folder} cannot be used ({first_line(error)}); fetch the model again, or "
                    "name another tokenizer"
                ) from error
            logger.warning("%s: tokenizer.json is used alone: %s", folder, first_line(error))
    tokenizer.chat_template = _chat_template(folder, getattr(tokenizer, "chat_template", None))
    return tokenizer


def _chat_template(folder: Path, template: Any) -> Any:
    """Return the chat template, or templates by name, with those in files where transformers does not look."""
    if template is None:  # as processors save it
        return (read_object(folder / "chat_template.json") or {}).get("chat_template")
    if isinstance(template, Mapping) and "default" not in template:
        named = (read_object(folder / "tokenizer_config.json") or {}).get("chat_template")
        return {"default": named if isinstance(named, str) else template.get("tool_use")} | dict(template)
    return template


def token_ids(folder: Path, *, with_added_tokens: bool) -> dict[str, int] | None:
    """Return the ids of the tokens in a folder's tokenizer.json, or None if it has none that can be read."""
    try:
        return Tokenizer.from_file(str(folder / TOKENIZER_FILE)).get_vocab(with_added_tokens=with_added_tokens)
    except Exception:  # tokenizers raises bare Exception
        return None


def read_definition(
    folder: Path, config: Any, dtype: str | torch.dtype, state_dict: dict[str, Tensor] | None = None
) -> Any:
    """Return the family's definition with the folder's weights, or with those of `state_dict`."""
    _check_size(config, folder, state_dict)
    family, weights = config.model_type, folder if state_dict is None else state_dict
    try:
        try:
            # Some do not use the attention interface; their replacements call our attention themselves.
            model, info = _checked(config, weights, dtype, OWN if family in REPLACED else PACKED)
        except KeyError as error:  # from a table of attention classes
            if error.args != (PACKED,):
                raise
            model, info = _checked(config, weights, dtype, OWN)
    except Exception as error:  # transformers raises many types for a folder that it cannot load
        raise ModelError(f"model: {origin_of(folder)} ({family}) cannot be loaded: {first_line(error)}") from error
    _check_weights(model, info, origin_of(folder))
    if state_dict is not None and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    _fix_rotations(model)
    return REPLACED[family](model) if family in REPLACED else replace_layers(model)


def _checked(
    config: Any, weights: Path | dict[str, Tensor], dtype: str | torch.dtype, way: str
) -> tuple[Any, Mapping[str, Any]]:
    """Return the definition that attends in this way, and what `_check_weights` reads."""
    model, info = _with_weights(
        config,
        weights,
        dtype=dtype,
        attn_implementation=way,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # such weights are refused by name
    )
    return model, info


def _fix_rotations(model: nn.Module) -> None:
    """Keep rotations as `fit_to_length` chose them.

    Some would change for all texts of a pass with the longest of them. To see whether they do, a pass would wait for
    the device, and could not be captured.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
            module.rope_type = "default"  # type: ignore[assignment]


def make_trunk(fields: Mapping[str, Any]) -> Any:
    """Return a family's definition without its output head, from the fields of a config.json.

    Its attention is the tree attention. Its parameters are on the meta device, ready to be replaced.

    Raises:
        ModelError: The fields are not those of a configuration of the family.
    """
    register()
    try:
        config = transformers.AutoConfig.for_model(**fields)
        with quietly(), torch.device("meta"):
            trunk = transformers.AutoModel.from_config(config, attn_implementation=PACKED)
        trunk.rotary_emb = type(trunk.rotary_emb)(config=config)  # computed, not read from a checkpoint
    except Exception as error:  # each family raises its own exceptions
        raise ModelError(f"drafters: config.json of a drafter cannot be used: {first_line(error)}") from error
    return trunk.eval().requires_grad_(False)


def precise_names(trunk: Any, dtype: torch.dtype) -> re.Pattern[str]:
    """Return the pattern of the names in a definition that its family computes with in float32 if the dtype is this."""
    names = set(trunk._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        names |= set(trunk._keep_in_fp32_modules or ())
    return re.compile("|".join(rf"(.*\.)?{name}(\..*)?" for name in sorted(names)) or r"(?!)")


def outline(folder: Path, weights: dict[str, Tensor] | None = None) -> Any:
    """Return the family's definition of a folder's model, with parameters on the meta device.

    Args:
        weights: Meta weights by their names in the files, which become the parameters; None for parameters of its own.
    """
    config = load_config(folder)
    if weights is not None:
        return _with_weights(config, weights, dtype="auto", ignore_mismatched_sizes=True)
    with quietly(), torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def load_plain(folder: Path, dtype: str | torch.dtype, **options: Any) -> Any:
    """Load the family's definition with the folder's weights and transformers' own attention.

    Raises:
        Exception: Any error that transformers raises for a folder that it cannot load.
    """
    config = load_config(folder)
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        options["attn_implementation"] = "eager"  # SDPA has no soft cap, and transformers before 5.21 leaves it out
    if has_safetensors(folder) and has_usual_names(folder):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True, **options
        )
    with Shards(folder, dtype if isinstance(dtype, torch.dtype) else None) as shards:
        weights = {name: source.read() for name, source in shards.sources.items()}
    model = _with_weights(config, weights, dtype=dtype, **options)
    model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _with_weights(config: Any, weights: Path | dict[str, Tensor], **options: Any) -> Any:
    """Return the family's definition with the weights of a folder, or with these, by their names in the files."""
    with quietly():
        if isinstance(weights, Path):
            return transformers.AutoModelForCausalLM.from_pretrained(
                weights, config=config, use_safetensors=True, trust_remote_code=False, **options
            )
        # A state_dict is only accepted by the family's own class.
        kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
        return kind.from_pretrained(None, config=config, state_dict=weights, **options)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers' progress bars and reports; this package makes its own checks and messages."""
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def check_architecture(config: Any) -> None:
    if config.is_encoder_decoder or type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ModelError(f"model: {config.model_type!r} is not a decoder that generates text")


def has_known_layers(config: Any) -> bool:
    """Return whether every layer sees all before it, or the window that it hands to attention."""
    return set(getattr(config.get_text_config(), "layer_types", None) or ()) <= _LAYER_TYPES


def _check_size(config: Any, folder: Path, state_dict: dict[str, Tensor] | None) -> None:
    """Refuse a configuration of a far larger model than the weights are of: what they lack would be allocated.

    Raises:
        ModelError: The definition has more than four times as many parameters.
    """
    if state_dict is None:
        with Shards(folder) as shards:
            num_stored = sum(math.prod(source.shape) for source in shards.sources.values())
    else:
        num_stored = sum(weight.numel() for weight in state_dict.values())
    try:
        with quietly(), torch.device("meta"):
            num_described = sum(
                one.numel() for one in transformers.AutoModelForCausalLM.from_config(config).parameters()
            )
    except Exception as error:  # transformers raises many types for a configuration that it cannot use
        raise ModelError(
            f"model: config.json of {origin_of(folder)} cannot be used: {first_line(error)}; fetch the model again"
        ) from error
    if num_described > _MOST_MISSING * num_stored + _SPARE_PARAMETERS:
        raise ModelError(
            f"model: config.json of {origin_of(folder)} describes {num_described:,} parameters, and its files have "
            f"{num_stored:,}; they do not belong together: fetch the model again"
        )


def _check_weights(model: Any, info: Any, folder: Path) -> None:
    for kind in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, info[kind])):
            raise ModelError(
                f"model: {folder} has {len(names)} {kind.replace('_keys', '')} weights, {names[0]} among them; "
                "config.json and the weights do not belong together"
            )
    unused = sorted(str(key) for key in info["unexpected_keys"] if _LAYER_WEIGHT.search(str(key)))
    if unused := [name for name in unused if not _is_mtp(name, model.config.get_text_config())]:
        raise ModelError(
            f"model: config.json of {folder} has no place for {len(unused)} weights, {unused[0]} among them; "
            "config.json and the weights do not belong together"
        )
    for name, weight in model.named_parameters():
        if weight.is_meta:
            continue  # this weight is read, and checked, later
        if not is_finite(weight):
            raise ModelError(f"model: weight {name} of {folder} has NaN or infinity; fetch the model again")


def _is_mtp(name: str, config: Any) -> bool:
    """Return whether a weight is of the layers for several tokens after the last one, which are a drafter."""
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    first = config.num_hidden_layers if count else 0
    return any(f".layers.{i}." in f".{name}" for i in range(first, first + count))


def storing_layers(config: Any) -> dict[str, int]:
    """Return, by kind of attention, the last layer that computes keys and values of its own."""
    text = config.get_text_config()
    count = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * count
    return {kind: layer for layer, kind in enumerate(kinds[:count])}


def shared_layers(config: Any) -> dict[int, int]:
    """Return, by number, the layers that read the keys and values of an earlier layer, and that layer of each."""
    text = config.get_text_config()
    count, stored = getattr(text, "num_kv_shared_layers", 0) or 0, storing_layers(config)
    layers = range(text.num_hidden_layers - count, text.num_hidden_layers)
    return {layer: stored[text.layer_types[layer]] for layer in layers}


def eos_token_ids_of(model: Any, config: Any, folder: Path) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = config.get_text_config().eos_token_id if ids is None else ids
    if ids is None:
        return ()
    ids = ids if isinstance(ids, (list, tuple)) else (ids,)
    if not all(type(i) is int for i in ids):
        raise ModelError(
            f"model: eos_token_id in generation_config.json or config.json of {origin_of(folder)} is {ids!r:.60}, not "
            "token ids; mend the file, or fetch the model again"
        )
    # Some configs name an end token outside the vocabulary, which is never generated.
    return tuple(i for i in ids if 0 <= i < config.get_text_config().vocab_size)
