"""Initial weights of a drafter: an ordinary checkpoint, a few layers of the target, or a new random model."""

import copy
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from specinfer.core.errors import ModelError, first_line
from specinfer.core.lookups import LOOKUPS, is_self
from specinfer.learning.heads.files import NEW_HEADS, export_head, new_head, read_head
from specinfer.learning.heads.trainable import HeadSizes, TrainableHead
from specinfer.learning.tune.hybrid_drafter import NUM_LAYERS, check_sizes, new_hybrid, take_embeddings
from specinfer.model.definition import load_config, load_plain, token_ids
from specinfer.model.folder import TOKEN_MAP, replacing
from specinfer.model.heads.load import find_format
from specinfer.setup.model_names import find_drafter

_FORMS = (
    'a folder or hub name, "layers:N" cut out of the target, "new:N" or "new:NxHIDDEN" from nothing, '
    f"new:hybrid or new:hybrid:LAYERSxWIDTH, most of whose layers are recurrences, or "
    f"{', '.join(NEW_HEADS)} or new:dspark:LAYERSxWIDTH[xRANK] (of MLP and pairwise head), a head on the target's "
    "hidden states"
)
_CUT = re.compile(r"layers:(\d+)", re.ASCII)
_NEW = re.compile(r"new:(\d+)(?:x(\d+))?", re.ASCII)
_SIZED_HEAD = re.compile(r"(new:dspark):(\d+)x(\d+)(?:x(\d+))?", re.ASCII)
_HYBRID = re.compile(r"new:hybrid(?::(\d+)x(\d+))?", re.ASCII)
_LAYER_LISTS = ("layers", "h", "blocks")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_MAX_HIDDEN, _MAX_LAYERS = 65_536, 1_000
_TOKENIZER_FILES = (
    "tokenizer*",
    "*.model",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "added_tokens.json",
)


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """The initial weights of a drafter, as named by `--drafter`.

    Attributes:
        folder: The folder of a checkpoint; None for the other two kinds.
        num_layers: The number of layers to cut out or to create.
        hidden_size: The hidden size of a new drafter, or None for a quarter of the target's.
        is_cut: True if the layers are the target's own.
        is_hybrid: True if all layers of a new drafter but the last are recurrences, whatever the target's are.
        new_head: The kind of a new head, one of `NEW_HEADS`, or None.
        head_sizes: The sizes of a new head, or None for the usual ones.
    """

    name: str
    folder: Path | None = None
    num_layers: int = 0
    hidden_size: int | None = None
    is_cut: bool = False
    is_hybrid: bool = False
    new_head: str | None = None
    head_sizes: HeadSizes | None = None

    @property
    def is_head(self) -> bool:
        """True for a head on the target's hidden states."""
        return self.new_head is not None if self.folder is None else find_format(self.folder) is not None


def parse_initial_weights(name: str) -> InitialWeights:
    """Return the initial weights that a `--drafter` option of `specinfer tune` names.

    Raises:
        ValueError: The name has none of the forms, or there is no such folder.
    """
    if name in NEW_HEADS:
        return InitialWeights(name, new_head=name)
    if sized := _SIZED_HEAD.fullmatch(name):
        rank = None if sized[4] is None else _size(name, "rank", sized[4], _MAX_HIDDEN)
        sizes = HeadSizes(_layers(name, sized[2]), _size(name, "width", sized[3], _MAX_HIDDEN), rank)
        return InitialWeights(name, new_head=sized[1], head_sizes=sizes)
    if hybrid := _HYBRID.fullmatch(name):
        num_layers, width = _layers(name, hybrid[1] or NUM_LAYERS), _hidden(name, hybrid[2])
        if width is not None:
            check_sizes(name, num_layers, width)
        return InitialWeights(name, num_layers=num_layers, hidden_size=width, is_hybrid=True)
    if cut := _CUT.fullmatch(name):
        return InitialWeights(name, num_layers=_layers(name, cut[1]), is_cut=True)
    if new := _NEW.fullmatch(name):
        return InitialWeights(name, num_layers=_layers(name, new[1]), hidden_size=_hidden(name, new[2]))
    if name in LOOKUPS:
        raise ValueError(f"drafter: {name!r} looks tokens up and learns nothing; give {_FORMS}")
    if is_self(name):
        raise ValueError(f"drafter: {name!r} is the target itself and is not trained; give {_FORMS}")
    if name.startswith(("layers:", "new:")):
        raise ValueError(f"drafter: {name!r} has none of the forms with sizes; give {_FORMS}")
    try:
        return InitialWeights(name, find_drafter(name))
    except ModelError as error:
        raise ValueError(f"drafter: {str(error).removeprefix('model: ')}; or give {_FORMS}") from error


def _layers(name: str, given: str | int) -> int:
    return _size(name, "number of layers", given, _MAX_LAYERS)


def _hidden(name: str, given: str | None) -> int | None:
    return None if given is None else _size(name, "hidden size", given, _MAX_HIDDEN)


def _size(name: str, what: str, given: str | int, most: int) -> int:
    if not 1 <= int(given) <= most:
        raise ValueError(f"drafter: {name}: the {what}, {given}, is not from 1 to {most}; give {_FORMS}")
    return int(given)


def check_vocabulary(start: InitialWeights, target: Path) -> None:
    """Check that a drafter can be tuned to this target: distributions are compared token by token.

    Raises:
        ValueError: Its tokens are not the target's; the message says what to do.
    """
    if start.folder is None or start.is_head:
        return
    wanted, given = (load_config(folder).get_text_config().vocab_size for folder in (target, start.folder))
    of_target, of_drafter = (token_ids(folder, with_added_tokens=False) for folder in (target, start.folder))
    is_same = of_target == of_drafter if of_target is not None and of_drafter is not None else wanted == given
    if not is_same or given < _num_used(of_target, wanted):
        raise ValueError(
            f"drafter: {start.name} has other tokens ({given}) than the target ({wanted}), and is tuned token by "
            'token; start with one of the target\'s family, or with "layers:N" or "new:N"'
        )


def _num_used(token_ids: dict[str, int] | None, vocab_size: int) -> int:
    return vocab_size if not token_ids else min(max(token_ids.values()) + 1, vocab_size)


def build(start: InitialWeights, target: Path, seed: int, token_map: Sequence[int] | None = None) -> Any:
    """Return the drafter before tuning, in float32.

    Args:
        token_map: The only tokens that a new head predicts, or None for all. Other drafters keep their heads whole.

    Raises:
        ValueError: It cannot be made from this target.
    """
    torch.manual_seed(seed)
    if start.new_head is not None:
        return new_head(start.new_head, target, seed, token_map, start.head_sizes)
    if start.is_head:
        assert start.folder is not None
        return read_head(start.folder, target)
    if start.folder is not None:
        model = _load_checkpoint(start.folder, target)
    elif start.is_hybrid:
        model = _make_hybrid(start, target)
    else:
        model = _cut(start, target) if start.is_cut else _make(start, target)
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise ValueError(f"drafter: {start.name} has weights that are not finite; start from another")
    model.config.use_cache = False  # training reads whole texts
    return model


def _load_checkpoint(folder: Path, target: Path) -> Any:
    model = _load(folder)
    wanted = load_config(target).get_text_config().vocab_size
    if model.config.get_text_config().vocab_size < wanted:  # both have the same tokens, but the target has more padding
        model.resize_token_embeddings(wanted, mean_resizing=False)
    return model


def _load(folder: Path) -> Any:
    try:
        return load_plain(folder, torch.float32, attn_implementation="sdpa")
    except ValueError:  # a family without sdpa
        try:
            return load_plain(folder, torch.float32)
        except Exception as error:
            raise ValueError(f"drafter: {folder} cannot be loaded: {first_line(error)}") from error
    except Exception as error:  # any error of a definition with a folder it does not fit
        raise ValueError(f"drafter: {folder} cannot be loaded: {first_line(error)}") from error


def _cut(start: InitialWeights, target: Path) -> Any:
    """Return the target with a few of its layers, evenly spread from the first to the last."""
    model = _load(target)
    owner, name = _layer_list(model)
    layers = getattr(owner, name)
    if start.num_layers > len(layers):
        raise ValueError(f"drafter: {start.name}: the target has {len(layers)} layers; ask for fewer")
    spread = torch.linspace(0, len(layers) - 1, start.num_layers).round().long().tolist()
    setattr(owner, name, nn.ModuleList([layers[i] for i in spread]))
    _set_layers(model.config, start.num_layers, spread)
    for i, layer in enumerate(getattr(owner, name)):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = i
    return model


def _layer_list(model: Any) -> tuple[nn.Module, str]:
    for module in model.modules():
        for name in _LAYER_LISTS:
            if isinstance(getattr(module, name, None), nn.ModuleList):
                return module, name
    raise ValueError("drafter: the layers of this target cannot be found; start from a checkpoint or from new:N")


def _set_layers(config: Any, count: int, kept: Sequence[int]) -> None:
    config.num_hidden_layers = count
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kinds[i] for i in kept]


def _make(start: InitialWeights, target: Path) -> Any:
    """Return a new, narrower model of the target's family."""
    config = copy.deepcopy(load_config(target).get_text_config())
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    wanted = start.hidden_size or max(config.hidden_size // 4, head_dim)
    new_heads = max(wanted // head_dim, 1)
    if start.hidden_size is not None and wanted % head_dim:
        raise ValueError(f"drafter: {start.name}: the hidden size must be a multiple of the target's heads' {head_dim}")
    kv_heads = next((n for n in (getattr(config, name, None) for name in _KV_HEADS) if n), heads)
    ratio = new_heads * head_dim / config.hidden_size
    if hasattr(config, "intermediate_size"):
        config.intermediate_size = max(round(config.intermediate_size * ratio), 1)
    config.hidden_size = new_heads * head_dim
    config.num_attention_heads = new_heads
    for name in _KV_HEADS:
        if hasattr(config, name):
            fitting = [n for n in range(1, min(kv_heads, new_heads) + 1) if new_heads % n == 0]
            setattr(config, name, fitting[-1])
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kinds[i % len(kinds)] for i in range(start.num_layers)]
    config.num_hidden_layers = start.num_layers
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # each family has its own requirements
        raise ValueError(f"drafter: {start.name} cannot be made of this target: {first_line(error)}") from error
    return model


def _make_hybrid(start: InitialWeights, target: Path) -> Any:
    """Return a new hybrid, with the target's embeddings if it has the target's hidden size."""
    model = new_hybrid(target, start.num_layers, start.hidden_size)
    if model.config.hidden_size == load_config(target).get_text_config().hidden_size:
        take_embeddings(model, _load(target))
    return model


def export(model: Any, target: Path, folder: Path, token_map: Sequence[int] | None = None) -> None:
    """Write an ordinary Hugging Face folder with the target's tokenizer and a token map, if any, atomically.

    A head is written by `export_head`.

    Raises:
        OSError: The folder cannot be written.
    """
    if isinstance(model, TrainableHead):
        export_head(model, folder)
        return
    with replacing(folder) as partial:
        model.config.use_cache = True
        # The target's is copied below: a drafter generates nothing alone, and its own might be rejected here.
        model.generation_config = type(model.generation_config)()
        model.save_pretrained(partial)
        for pattern in _TOKENIZER_FILES:
            for file in target.glob(pattern):
                shutil.copyfile(file, partial / file.name)
        if token_map is not None:
            (partial / TOKEN_MAP).write_text(json.dumps(list(token_map)) + "\n", encoding="utf-8")
