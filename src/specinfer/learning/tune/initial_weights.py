"""Initial weights of a drafter: an ordinary checkpoint, a few layers of the target, or a new random model or head."""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from specinfer.core.errors import ModelError, first_line
from specinfer.core.lookups import LOOKUPS, is_self
from specinfer.learning.heads.files import read_head
from specinfer.learning.heads.new import NEW_HEADS, HeadSizes, new_head
from specinfer.learning.trainable import TrainableDrafter, TrainableModel, load_float32
from specinfer.model.definition import known_positions, load_config, token_ids
from specinfer.model.folder import read_token_map
from specinfer.model.heads.load import find_format
from specinfer.setup.model_names import find_drafter

_FORMS = (
    'a folder or hub name, "layers:N" cut out of the target, "new:N" or "new:NxHIDDEN" from nothing, '
    f"new:hybrid or new:hybrid:LAYERSxWIDTH, most of whose layers are recurrences, or "
    f"{', '.join(NEW_HEADS)} or new:dspark:LAYERSxWIDTH[xRANK] (of MLP and pairwise head), a head on the target's "
    "hidden states"
)
Kind = Literal["folder", "layers", "new", "hybrid", "head"]
_PATTERNS: dict[Kind, re.Pattern[str]] = {
    "layers": re.compile(r"layers:(?P<layers>\d+)", re.ASCII),
    "new": re.compile(r"new:(?P<layers>\d+)(?:x(?P<hidden>\d+))?", re.ASCII),
    "hybrid": re.compile(r"new:hybrid(?::(?P<layers>\d+)x(?P<hidden>\d+))?", re.ASCII),
    "head": re.compile(r"new:eagle3|new:dspark(?::(?P<layers>\d+)x(?P<width>\d+)(?:x(?P<rank>\d+))?)?", re.ASCII),
}
# Sizes by their names in the patterns: what they are, and the largest one.
_SIZES = {
    "layers": ("number of layers", 1_000), "hidden": ("hidden size", 65_536), "width": ("width", 65_536),
    "rank": ("rank", 65_536),
}  # fmt: skip
_LAYER_LISTS = ("layers", "h", "blocks")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
# The family of hybrids, whose training pass in transformers is matrix products over chunks and needs no kernels.
_HYBRID_FAMILY = "qwen3_5_text"
_HYBRID_LAYERS, _HYBRID_HEAD_DIM, _HYBRID_MLP_RATIO = 4, 64, 3
_POSITIONS = 2**20  # of a target whose config does not limit them


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """The initial weights of a drafter, as named by `--drafter`.

    Attributes:
        folder: The folder of a checkpoint; None for the other kinds.
        kind: "folder"; "layers" of the target; "new", of the target's family; "hybrid", whose layers but the last are
            recurrences, whatever the target's are; or "head", a new one.
        layers: The number of layers to cut out or to create.
        hidden: The hidden size of a new drafter, or None for a quarter of the target's.
        width, rank: Sizes of a new block head, see `HeadSizes`.
    """

    name: str
    folder: Path | None = None
    kind: Kind = "folder"
    layers: int | None = None
    hidden: int | None = None
    width: int | None = None
    rank: int | None = None

    @property
    def is_head(self) -> bool:
        """True for a head on the target's hidden states."""
        return self.kind == "head" or (self.folder is not None and find_format(self.folder) is not None)


def parse_initial_weights(name: str) -> InitialWeights:
    """Return the initial weights that a `--drafter` option of `specinfer tune` names.

    Raises:
        ValueError: The name has none of the forms, or there is no such folder.
    """
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(name):
            given = match.groupdict().items()
            sizes = {key: _checked_size(name, key, int(size)) for key, size in given if size is not None}
            start = InitialWeights(name, None, kind, **sizes)
            if kind == "hybrid":
                _check_hybrid(start)
            return start
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


def _checked_size(name: str, key: str, size: int) -> int:
    what, most = _SIZES[key]
    if not 1 <= size <= most:
        raise ValueError(f"drafter: {name}: the {what}, {size}, is not from 1 to {most}; give {_FORMS}")
    return size


def _check_hybrid(start: InitialWeights) -> None:
    if start.layers == 1:
        raise ValueError(
            f"drafter: {start.name}: the last layer has attention and the others none; take at least 2 layers"
        )
    if start.hidden is not None and start.hidden % _HYBRID_HEAD_DIM:
        nearest = max(round(start.hidden / _HYBRID_HEAD_DIM), 1) * _HYBRID_HEAD_DIM
        raise ValueError(
            f"drafter: {start.name}: the hidden size {start.hidden} is not a multiple of the {_HYBRID_HEAD_DIM} of a "
            f"head; take {nearest}"
        )


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
    num_used = min(max(of_target.values()) + 1, wanted) if of_target else wanted
    if not is_same or given < num_used:
        raise ValueError(
            f"drafter: {start.name} has other tokens ({given}) than the target ({wanted}), and is tuned token by "
            'token; start with one of the target\'s family, or with "layers:N" or "new:N"'
        )


def build(start: InitialWeights, target: Path, seed: int, token_map: Sequence[int] | None = None) -> TrainableDrafter:
    """Return the drafter before tuning, in float32.

    Args:
        token_map: The only tokens that it is to predict, or None for those that its folder names, or all. A head that
            exists keeps its own.

    Raises:
        ValueError: It cannot be made from this target.
    """
    torch.manual_seed(seed)
    if start.kind == "head":
        kind = next(kind for kind in NEW_HEADS if start.name.startswith(kind))
        return new_head(kind, target, seed, token_map, HeadSizes(start.layers, start.width, start.rank))
    if start.folder is not None and start.is_head:
        return read_head(start.folder, target)
    ids: Tensor | None = None
    if start.folder is not None:
        model = _load_checkpoint(start.folder, target)
        ids = read_token_map(start.folder, int(model.config.get_text_config().vocab_size))
    else:
        model = {"layers": _cut, "new": _make, "hybrid": _make_hybrid}[start.kind](start, target)
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise ValueError(f"drafter: {start.name} has weights that are not finite; start from another")
    return TrainableModel(model, ids if token_map is None else torch.tensor(list(token_map)))


def _load_checkpoint(folder: Path, target: Path) -> Any:
    model = load_float32(folder)
    wanted = load_config(target).get_text_config().vocab_size
    if model.config.get_text_config().vocab_size < wanted:  # both have the same tokens, but the target has more padding
        model.resize_token_embeddings(wanted, mean_resizing=False)
    return model


def _cut(start: InitialWeights, target: Path) -> Any:
    """Return the target with a few of its layers, evenly spread from the first to the last."""
    model = load_float32(target)
    owner, name = _layer_list(model)
    layers = getattr(owner, name)
    assert start.layers is not None
    if start.layers > len(layers):
        raise ValueError(f"drafter: {start.name}: the target has {len(layers)} layers; ask for fewer")
    spread = torch.linspace(0, len(layers) - 1, start.layers).round().long().tolist()
    setattr(owner, name, nn.ModuleList([layers[i] for i in spread]))
    _set_layers(model.config, spread)
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


def _set_layers(config: Any, places: Sequence[int]) -> None:
    """Give a configuration the layers at these places of its own; a place beyond the last begins again."""
    config.num_hidden_layers = len(places)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kinds[i % len(kinds)] for i in places]


def _make(start: InitialWeights, target: Path) -> Any:
    """Return a new, narrower model of the target's family."""
    config = copy.deepcopy(load_config(target).get_text_config())
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    wanted = start.hidden or max(config.hidden_size // 4, head_dim)
    new_heads = max(wanted // head_dim, 1)
    if start.hidden is not None and wanted % head_dim:
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
    assert start.layers is not None
    _set_layers(config, range(start.layers))
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # each family has its own requirements
        raise ValueError(f"drafter: {start.name} cannot be made of this target: {first_line(error)}") from error
    return model


def _make_hybrid(start: InitialWeights, target: Path) -> Any:
    """Return a new model whose layers but the last are recurrences, so that a level costs the same at any context.

    If it has the target's hidden size, it starts with the target's embeddings and output head.
    """
    of_target = load_config(target).get_text_config()
    width = start.hidden or max(of_target.hidden_size // 4 // _HYBRID_HEAD_DIM, 1) * _HYBRID_HEAD_DIM
    heads, num_layers = width // _HYBRID_HEAD_DIM, start.layers or _HYBRID_LAYERS
    config = AutoConfig.for_model(
        _HYBRID_FAMILY,
        vocab_size=of_target.vocab_size,
        hidden_size=width,
        intermediate_size=_HYBRID_MLP_RATIO * width,
        num_hidden_layers=num_layers,
        layer_types=[*["linear_attention"] * (num_layers - 1), "full_attention"],
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=_HYBRID_HEAD_DIM,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=_HYBRID_HEAD_DIM,
        linear_value_head_dim=_HYBRID_HEAD_DIM,
        max_position_embeddings=known_positions(target) or _POSITIONS,
        tie_word_embeddings=bool(getattr(of_target, "tie_word_embeddings", True)),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if width == of_target.hidden_size:
        original = load_float32(target)
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(original.get_input_embeddings().weight)
            if not config.tie_word_embeddings:
                model.get_output_embeddings().weight.copy_(original.get_output_embeddings().weight)
    return model
