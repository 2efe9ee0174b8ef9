"""LoRA adapters as callers name them, and the limits of an engine for them."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specinfer.core.errors import check_int
from specinfer.core.options import check_settings, setting

MAX_RANK = 4096


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for a request; the names are vLLM's.

    Attributes:
        lora_name: Name in messages, and of the model that clients of a server ask for.
        lora_int_id: Number of the adapter from 1, different for each.
        lora_path: Folder in PEFT's format, with adapter_config.json.

    Raises:
        ValueError: A value is not valid; the message names the field.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise ValueError(f"{name}: give text that is not empty, not {value!r:.60}")
        check_int("lora_int_id", self.lora_int_id, 1)


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Limits for adapters.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    max_loras: int = setting(8, "Model", "Maximum number of LoRA adapters in a batch.", low=1)
    max_lora_rank: int = setting(64, "Model", "Maximum rank of a LoRA adapter.", low=1, high=MAX_RANK)
    max_cpu_loras: int = setting(
        8, "Model", "Maximum number of LoRA adapters in memory. (default: the same as --max-loras)", low=1
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras: {self.max_cpu_loras} is less than max_loras, {self.max_loras}; raise it")


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter that was loaded.

    Attributes:
        salt: Digest of its matrices; what is cached has it in its key.
        table: Its matrices, an `AdapterTable`.
    """

    request: LoRARequest
    salt: str
    table: Any

    @property
    def name(self) -> str:
        return self.request.lora_name


def parse_modules(given: Sequence[str]) -> dict[str, LoRARequest]:
    """Return the adapters of --lora-modules by name, from NAME=PATH or JSON with name and path.

    Raises:
        ValueError: One of them cannot be read, or two have the same name.
    """
    adapters: dict[str, LoRARequest] = {}
    ids = itertools.count(1)
    for text in given:
        for name, path in _parse(text):
            if name in adapters:
                raise ValueError(f"lora_modules: {name!r:.80} is named twice; give each adapter a name of its own")
            adapters[name] = LoRARequest(name, next(ids), path)
    return adapters


def _parse(text: str) -> list[tuple[str, str]]:
    if not text.lstrip().startswith(("{", "[")):
        name, _, path = text.partition("=")
        if not name or not path:
            raise ValueError(f"lora_modules: {text!r:.80} is not an adapter; write NAME=PATH")
        return [(name, path)]
    try:
        fields = json.loads(text)
        listed = fields if isinstance(fields, list) else [fields]
        return [(module["name"], module["path"]) for module in listed]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f'lora_modules: {text!r:.80} is not an adapter; write {{"name": "NAME", "path": "PATH"}}'
        ) from error
