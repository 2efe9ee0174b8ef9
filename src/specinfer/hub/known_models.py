"""Known targets and their drafters, from `known_models.json`.

A family maps models with one tokenizer to billions of parameters; small ones draft for large ones. Other drafters read
hidden states of their target; all are listed, and some kinds can be loaded.
"""

import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specinfer.core.lookups import reserved_names
from specinfer.hub.files import SUPPORTED_HEADS
from specinfer.hub.locate import without_revision

SMALL_MODEL = "small model"
LARGEST_SHARE = 0.4  # of the target's parameters; a larger drafter takes more time than it saves
_QUANTIZED = re.compile(r"[-._](i?q\d\w*|tq\d\w*|[bf]p?(16|32)|mxfp4|gguf|ud|it-qat)$")
_CACHED = re.compile(r"models--(.+?)--(.+?)$")


@dataclass(frozen=True, slots=True)
class KnownDrafter:
    """A drafter of a known target.

    Attributes:
        name: Name on the hub; that of the target itself for layers in its checkpoint (MTP).
        kind: `SMALL_MODEL`, or a kind that reads hidden states of the target.
        parameters: Billions of parameters, or None if not known.
    """

    name: str
    kind: str
    parameters: float | None = None

    @property
    def is_head(self) -> bool:
        return self.kind != SMALL_MODEL

    @property
    def is_supported(self) -> bool:
        return not self.is_head or self.kind in SUPPORTED_HEADS


def known_drafters(model: str | Path) -> list[KnownDrafter]:
    """Return the drafters of a target, the smallest model first; the target may be a name, a folder or a file."""
    wanted = _key(model)
    found = []
    for family in _table()["families"]:
        size = next((size for name, size in family.items() if _key(name) == wanted), 0.0)
        small = sorted((other, name) for name, other in family.items() if other <= size * LARGEST_SHARE)
        found += [KnownDrafter(name, SMALL_MODEL, other) for other, name in small]
    for target, drafters in _table()["feature_drafters"].items():
        if _key(target) == wanted:
            found += [KnownDrafter(name, kind) for name, kind in drafters.items()]
    return found


def known_names() -> list[str]:
    """Return the names of all targets and drafters of the table."""
    names = [name for family in _table()["families"] for name in family]
    for target, drafters in _table()["feature_drafters"].items():
        names += [target, *drafters]
    return list(dict.fromkeys(names))


def same_model(one: str | Path, other: str | Path) -> bool:
    """Return whether two names, folders or files stand for one model, perhaps quantized."""
    return bool(_key(one)) and _key(one) == _key(other)


def near_names(name: str, others: Iterable[str]) -> list[str]:
    """Return the names of models and drafters that a misspelt name may stand for, at most three, the nearest first."""
    by_key: dict[str, str] = {}
    for other in (*others, *reserved_names(), *known_names()):
        for key in (other.lower(), other.lower().rpartition("/")[2]):
            by_key.setdefault(key, other)
    asked = name.lower().partition(":")[0]
    near = [key for text in (asked, asked.rpartition("/")[2])
            for key in difflib.get_close_matches(text, by_key, n=3, cutoff=0.75)]  # fmt: skip
    return list(dict.fromkeys(by_key[key] for key in near if by_key[key] != name))[:3]


def did_you_mean(name: str, others: Iterable[str]) -> str:
    """Return the end of a message that suggests near names, or an empty string."""
    near = near_names(name, others)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _key(model: str | Path) -> str:
    """Return the part of a name that quantized copies, files and cached folders of a model share."""
    whole = without_revision(model)
    parts = [match for part in _parts(whole) if (match := _CACHED.fullmatch(part))]
    name = parts[-1][2] if parts else [*_parts(whole), ""][0]
    name = name.partition(":")[0].lower().removesuffix(".gguf")
    while (shorter := _QUANTIZED.sub("", name)) != name:
        name = shorter
    return name


def _parts(path: str) -> Iterator[str]:
    """Yield the parts of a path, the last first."""
    return (part for part in reversed(re.split(r"[/\\]", path)) if part)


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
    return table
