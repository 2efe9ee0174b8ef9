"""Known targets and their drafters, from `known_models.json`, and those that "auto" chooses for a target.

A family maps models with one tokenizer to billions of parameters; small ones draft for large ones. Other drafters read
hidden states of their target; all are listed, and some kinds can be loaded.
"""

import difflib
import filecmp
import functools
import itertools
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specinfer.core.errors import ModelError
from specinfer.core.lookups import MTP, reserved_names
from specinfer.core.progress import ProgressCallback
from specinfer.hub.files import SUPPORTED_HEADS, folder_refusal, head_format, read_object, stated_target
from specinfer.hub.locate import TOKENIZER_FILE, is_on_hub, local_path, without_revision

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
    all_drafters = []
    for family in _table()["families"]:
        size = next((size for name, size in family.items() if _key(name) == wanted), 0.0)
        small = sorted((parameters, name) for name, parameters in family.items() if parameters <= size * LARGEST_SHARE)
        all_drafters += [KnownDrafter(name, SMALL_MODEL, parameters) for parameters, name in small]
    for target, drafters in _table()["feature_drafters"].items():
        if _key(target) == wanted:
            all_drafters += [KnownDrafter(name, kind) for name, kind in drafters.items()]
    return all_drafters


def known_names() -> list[str]:
    """Return the names of all targets and drafters of the table."""
    names = [name for family in _table()["families"] for name in family]
    for target, drafters in _table()["feature_drafters"].items():
        names += [target, *drafters]
    return list(dict.fromkeys(names))


def same_model(first: str | Path, second: str | Path) -> bool:
    """Return whether two names, folders or files stand for one model, perhaps quantized."""
    return bool(_key(first)) and _key(first) == _key(second)


def near_names(name: str, others: Iterable[str]) -> list[str]:
    """Return the names that a misspelt name may stand for, at most three, the nearest first.

    Args:
        others: Names of models, to which those of lookups are added.
    """
    by_key: dict[str, str] = {}
    for known in (*others, *reserved_names()):
        for key in (known.lower(), known.lower().rpartition("/")[2]):
            by_key.setdefault(key, known)
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


logger = logging.getLogger(__name__)
LOOKUP, LOOKUP_WITH_MODEL = "ngram", "suffix"  # the drafter without a model, and the one with
_MOST_FOLDERS = 256  # next to the target's that are looked at


class DrafterChoice(NamedTuple):
    """Names of the drafters chosen for a target, and why these, as a phrase."""

    names: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{' and '.join(self.names)}: {self.reason}"


def auto_drafters(
    model: str | Path,
    *,
    has_mtp: bool = False,
    heads: Collection[str] = SUPPORTED_HEADS,
    progress: ProgressCallback | None = None,
) -> DrafterChoice:
    """Return the drafter that should pay most for a target, with a lookup, or a lookup alone.

    The first one of these is chosen: the target's own MTP layers; a head or small model in a folder next to the
    target's; a known one in the cache; a known one of the hub, which is downloaded, if the target itself is a model of
    the hub: whoever names a folder or a file expects no download. Heads come before small models, because they were
    trained for the target.

    Args:
        has_mtp: Whether the target's checkpoint has MTP layers that can be loaded.
        heads: Kinds of heads that can read what the target shows.
    """
    choice = _choose(model, has_mtp, heads, progress)
    logger.info("drafters: auto chooses for %s %s", model, choice)
    return choice


def _choose(
    model: str | Path, has_mtp: bool, heads: Collection[str], progress: ProgressCallback | None
) -> DrafterChoice:
    if has_mtp:
        return DrafterChoice((MTP, LOOKUP_WITH_MODEL), "its checkpoint has MTP layers")
    if (partner := _partner(model, heads)) is not None:
        return DrafterChoice((str(partner), LOOKUP_WITH_MODEL), f"{partner.name} is in a folder next to it")
    kinds = {*heads, SMALL_MODEL} - {"MTP"}
    known = [drafter for drafter in known_drafters(model) if drafter.kind in kinds]
    names = [drafter.name for drafter in sorted(known, key=lambda drafter: not drafter.is_head)]
    if not names:
        return DrafterChoice((LOOKUP,), "no head or small model is known for it")
    from specinfer.hub.cache import find_cached
    from specinfer.hub.store import download

    for name in names:
        if find_cached(name) is not None:
            return DrafterChoice((name, LOOKUP_WITH_MODEL), f"{name} is in the cache")
    if not is_on_hub(model):
        return DrafterChoice((LOOKUP,), f"{names[0]} could draft, but is not in the cache")
    reasons = []
    for name in dict.fromkeys((names[0], next((drafter.name for drafter in known if not drafter.is_head), names[0]))):
        try:
            download(name, progress=progress)
        except ModelError as error:
            reasons.append(f"{name} cannot be downloaded: {error}")
        else:
            return DrafterChoice((name, LOOKUP_WITH_MODEL), f"{name} was downloaded")
    return DrafterChoice((LOOKUP,), "; ".join(reasons))


def _partner(model: str | Path, kinds: Collection[str]) -> Path | None:
    """Return the best drafter in a folder next to the target's, or None."""
    try:
        target = local_path(model)
    except ModelError:
        return None
    if target is None or not target.is_dir():
        return None
    heads: list[Path] = []
    small: list[Path] = []
    for folder in _neighbours(target):
        if (config := read_object(folder / "config.json")) is None:
            continue
        if (kind := head_format(config)) is not None:
            group, drafts = heads, kind in kinds and _is_head_of(config, folder, target)
        else:
            group, drafts = small, _drafts_for(folder, target)
        if drafts and folder_refusal(folder) is None:
            group.append(folder)
    return next(iter([*sorted(heads), *sorted(small, key=_num_bytes)]), None)


def _neighbours(target: Path) -> Iterator[Path]:
    target = target.resolve()
    try:
        paths = sorted(itertools.islice(target.parent.iterdir(), _MOST_FOLDERS))
    except OSError:
        return
    yield from (path for path in paths if path.is_dir() and path != target)


def _is_head_of(config: dict[str, object], folder: Path, target: Path) -> bool:
    """Return whether a head was made for this target, by its own words or by the table of known models."""
    name = stated_target(config)
    if name is not None and same_model(name, target):
        return True
    return any(drafter.is_head and same_model(drafter.name, folder) for drafter in known_drafters(target))


def _drafts_for(folder: Path, target: Path) -> bool:
    """Return whether a model is small enough to draft for another, and has its tokenizer."""
    files = folder / TOKENIZER_FILE, target / TOKENIZER_FILE
    if not all(file.is_file() for file in files) or _num_bytes(folder) > LARGEST_SHARE * _num_bytes(target):
        return False
    return filecmp.cmp(*files, shallow=False)


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
