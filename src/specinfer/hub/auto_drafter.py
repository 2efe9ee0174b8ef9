"""The drafters that "auto" chooses for a target that is not embedded."""

import filecmp
import itertools
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from specinfer.core.errors import ModelError
from specinfer.core.lookups import MTP
from specinfer.core.progress import ProgressCallback
from specinfer.hub.files import SUPPORTED_HEADS, folder_refusal, head_format, read_object, stated_target
from specinfer.hub.known_models import LARGEST_SHARE, known_drafters, same_model
from specinfer.hub.locate import TOKENIZER_FILE, is_on_hub, local_path

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
    known = [one for one in known_drafters(model) if not one.is_head or (one.kind in heads and one.kind != "MTP")]
    names = [one.name for one in sorted(known, key=lambda one: not one.is_head)]
    if not names:
        return DrafterChoice((LOOKUP,), "no head or small model is known for it")
    from specinfer.hub.snapshots import find_cached
    from specinfer.hub.store import download

    for name in names:
        if find_cached(name) is not None:
            return DrafterChoice((name, LOOKUP_WITH_MODEL), f"{name} is in the cache")
    if not is_on_hub(model):
        return DrafterChoice((LOOKUP,), f"{names[0]} could draft, but is not in the cache")
    reasons = []
    for name in dict.fromkeys((names[0], next((one.name for one in known if not one.is_head), names[0]))):
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
            found, drafts = heads, kind in kinds and _is_head_of(config, folder, target)
        else:
            found, drafts = small, _drafts_for(folder, target)
        if drafts and folder_refusal(folder) is None:
            found.append(folder)
    return next(iter([*sorted(heads), *sorted(small, key=_num_bytes)]), None)


def _neighbours(target: Path) -> Iterator[Path]:
    target = target.resolve()
    try:
        found = sorted(itertools.islice(target.parent.iterdir(), _MOST_FOLDERS))
    except OSError:
        return
    yield from (path for path in found if path.is_dir() and path != target)


def _is_head_of(config: dict[str, object], folder: Path, target: Path) -> bool:
    """Return whether a head was made for this target, by its own words or by the table of known models."""
    name = stated_target(config)
    known = (one.name for one in known_drafters(target) if one.is_head)
    return (name is not None and same_model(name, target)) or any(same_model(one, folder) for one in known)


def _drafts_for(folder: Path, target: Path) -> bool:
    """Return whether a model is small enough to draft for another, and has its tokenizer."""
    files = folder / TOKENIZER_FILE, target / TOKENIZER_FILE
    if not all(file.is_file() for file in files) or _num_bytes(folder) > LARGEST_SHARE * _num_bytes(target):
        return False
    return filecmp.cmp(*files, shallow=False)


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
