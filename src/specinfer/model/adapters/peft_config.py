"""adapter_config.json of PEFT: which layers an adapter changes, and by how much. What cannot be applied is refused."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from specinfer.core.errors import ModelError

CONFIG = "adapter_config.json"
_MERGE = "merge the adapter into the model with peft's merge_and_unload and load that"
_MAX_BYTES = 1 << 20
_MAX_PATTERN = 200  # characters of a key of rank_pattern or alpha_pattern
_MAX_REPEATS = 3  # quantifiers of such a key: matching takes the length of a name to this power
_REPEAT = re.compile(r"(?<!\\d)[*+?{]\??")  # a number of a layer has few digits
_Patterns = tuple[tuple[re.Pattern[str], float], ...]
# Fields that change what an adapter computes, and the values that change nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "bias": ("none", None),
    "kasa_config": (None,),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "megatron_config": (None,),
    "modules_to_save": (None, []),
    "monteclora_config": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None, False),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "velora_config": (None,),
}
# Ways to begin training that also change the weights of the model.
_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of an adapter's configuration that decide what it adds.

    Attributes:
        targets: Names of layers or ends of them, or None for those that have tensors.
        layers: Numbers of the changed layers, or None for all.
        base: Name of the model that it was trained with.
    """

    rank: int
    alpha: float
    uses_sqrt: bool
    rank_pattern: _Patterns
    alpha_pattern: _Patterns
    targets: tuple[str, ...] | None
    excluded: tuple[str, ...]
    layers: tuple[int, ...] | None
    lists: tuple[str, ...]
    base: str | None

    def rank_of(self, name: str) -> int:
        """Return the rank of a linear layer's matrices."""
        return int(_matching(self.rank_pattern, name, self.rank))

    def scale_of(self, name: str) -> float:
        """Return the factor of a linear layer's addition."""
        rank = self.rank_of(name)
        alpha = float(_matching(self.alpha_pattern, name, self.alpha))
        return alpha / (math.sqrt(rank) if self.uses_sqrt else rank)

    def targeted(self, names: Iterable[str]) -> set[str]:
        """Return those of the linear layers that the adapter must have tensors for."""
        if self.targets is None:
            return set()
        found = {name for name in names if _ends_with(name, self.targets) and not _ends_with(name, self.excluded)}
        return found if self.layers is None else {name for name in found if self._layer_of(name) in self.layers}

    def _layer_of(self, name: str) -> int | None:
        parts = name.split(".")
        numbers = (
            int(part)
            for before, part in pairwise(parts)
            if part.isdecimal() and (not self.lists or before in self.lists)
        )
        return next(numbers, None)


def read_config(folder: Path, linears: Iterable[str]) -> PeftConfig:
    """Read the configuration of an adapter.

    Args:
        linears: Names of all linear layers, which "all-linear" stands for.

    Raises:
        ModelError: It is not the configuration of a LoRA adapter, or has a feature that cannot be applied.
    """
    fields = _load(folder / CONFIG)
    if (kind := fields.get("peft_type")) != "LORA":
        raise ModelError(f"lora_path: {folder}: peft_type {kind!r:.60} cannot be applied, only LORA; {_MERGE}")
    for name, harmless in _UNSUPPORTED.items():
        if (value := fields.get(name)) not in harmless:
            raise ModelError(f"lora_path: {folder}: {name} {value!r:.60} cannot be applied; {_MERGE}")
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_INITS):
        raise ModelError(
            f"lora_path: {folder}: init_lora_weights {init!r:.60} changed the weights of the model, too; save it with "
            "path_initial_model_for_weight_conversion, or merge it with peft's merge_and_unload"
        )
    targets = fields.get("target_modules")
    if targets == "all-linear":
        targets = list(linears)
    layers, excluded = fields.get("layers_to_transform"), fields.get("exclude_modules") or None
    # A regular expression is not matched: those of strangers may take forever, and the tensors say the same.
    is_matched = isinstance(targets, str) or isinstance(excluded, str)
    base = fields.get("base_model_name_or_path")
    return PeftConfig(
        rank=_whole(folder, "r", fields.get("r", 8)),
        alpha=_number(folder, "lora_alpha", fields.get("lora_alpha", 8)),
        uses_sqrt=fields.get("use_rslora") is True,
        rank_pattern=_patterns(folder, fields, "rank_pattern", _whole),
        alpha_pattern=_patterns(folder, fields, "alpha_pattern", _number),
        targets=None if is_matched else _names(folder, "target_modules", targets),
        excluded=() if is_matched else _names(folder, "exclude_modules", excluded),
        layers=None if layers in (None, []) else _numbers(folder, layers),
        lists=_names(folder, "layers_pattern", fields.get("layers_pattern")),
        base=base if isinstance(base, str) and base else None,
    )


def _load(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_BYTES + 1)
        fields = json.loads(content) if len(content) <= _MAX_BYTES else None
    except FileNotFoundError as error:
        raise ModelError(f"lora_path: {file.parent} has no {CONFIG}; name a folder in PEFT's format") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"lora_path: {file} cannot be read: {error}") from error
    if len(content) > _MAX_BYTES:
        raise ModelError(f"lora_path: {file} is larger than {_MAX_BYTES} bytes, and no configuration")
    if not isinstance(fields, dict):
        raise ModelError(f"lora_path: {file} is not an object")
    return fields


def _whole(folder: Path, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"lora_path: {folder}: {name} must be a whole number of at least 1, not {value!r:.60}")
    return value


def _number(folder: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e9:
        raise ModelError(f"lora_path: {folder}: {name} must be a number, not {value!r:.60}")
    return float(value)


def _names(folder: Path, name: str, value: Any) -> tuple[str, ...]:
    names = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(one, str) for one in names):
        raise ModelError(f"lora_path: {folder}: {name} must be a list of names, not {value!r:.60}")
    return tuple(names)


def _numbers(folder: Path, value: Any) -> tuple[int, ...]:
    numbers = value if isinstance(value, list) else [value]
    if not all(type(one) is int for one in numbers):
        raise ModelError(f"lora_path: {folder}: layers_to_transform must be a list of numbers, not {value!r:.60}")
    return tuple(numbers)


def _patterns(
    folder: Path, fields: Mapping[str, Any], name: str, check: Callable[[Path, str, Any], float]
) -> _Patterns:
    """Return a field that maps regular expressions to values; expressions that may take long are refused.

    An expression matches the end of a name, as in PEFT.
    """
    found = fields.get(name) or {}
    if not isinstance(found, dict):
        raise ModelError(f"lora_path: {folder}: {name} must be an object, not {found!r:.60}")
    patterns = []
    for key, value in found.items():
        if len(key) > _MAX_PATTERN or len(_REPEAT.findall(key)) > _MAX_REPEATS or re.search(r"\)[*+{]", key):
            raise ModelError(f"lora_path: {folder}: {name} has a pattern that may take long, {key!r:.60}; {_MERGE}")
        try:
            pattern = re.compile(rf"(.*\.)?({key})$")
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(f"lora_path: {folder}: {name} has a pattern that cannot be read, {key!r:.60}") from error
        patterns.append((pattern, check(folder, name, value)))
    return tuple(patterns)


def _matching(patterns: _Patterns, name: str, default: float) -> float:
    """Return the value of the first expression that matches a name."""
    return next((value for pattern, value in patterns if pattern.match(name)), default)


def _ends_with(name: str, ends: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)
