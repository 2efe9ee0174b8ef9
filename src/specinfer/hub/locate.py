"""From the name of a model to its folder or file on this machine."""

import re
from pathlib import Path
from typing import NamedTuple

from specinfer.core.errors import ModelError
from specinfer.core.lookups import SELF_DRAFTERS, is_self
from specinfer.core.progress import ProgressCallback
from specinfer.hub.cache import check_intact
from specinfer.hub.files import check_gguf_name, fault_of, folder_refusal, is_gguf, only_gguf

TOKENIZER_FILE = "tokenizer.json"
TOKENIZERS = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "tokenizer_config.json")
_SITE = re.compile(r"^(https?://)?(hf\.co|huggingface\.co)/", re.IGNORECASE)
_NAME = re.compile(r"((?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?::([\w.-]+))?(?:@(\w[\w./-]*))?", re.ASCII)


class HubName(NamedTuple):
    """A model of the hub, as in org/name:Q4_K_M@main.

    Attributes:
        gguf_type: Type of its GGUF file, or None.
        revision: Branch, tag or commit, or None for the main branch.
    """

    name: str
    gguf_type: str | None = None
    revision: str | None = None


def hub_name(model: str | Path) -> HubName | None:
    """Return a model's name on the hub, or None for a path."""
    if not isinstance(model, (str, Path)):
        raise ModelError(f"model: give a folder, a GGUF file or a hub name, not {model!r}")
    match = _NAME.fullmatch(_SITE.sub("", str(model)))
    return None if match is None or ".." in (match[3] or "") else HubName(*match.groups())


def at_revision(field: str, model: str | Path, revision: str) -> str:
    """Return the name of a model of the hub at a revision.

    Raises:
        ValueError: The model is not named as one of the hub, or names a revision already; the message has the field.
    """
    if revision == "main":  # as without one
        return str(model)
    name = hub_name(model)
    if name is None or Path(model).expanduser().exists():
        raise ValueError(f"{field}: {str(model)!r} is not a model of the hub; leave {field} out")
    if name.revision is not None:
        raise ValueError(f"{field}: {str(model)!r} names a revision already; leave one out")
    named = f"{model}@{revision}"
    if hub_name(named) is None:
        raise ValueError(f"{field}: {revision!r:.60} is not a branch, tag or commit")
    return named


def without_revision(model: str | Path) -> str:
    """Return the name of a model as requests have it: without the revision of one of the hub."""
    name = hub_name(model)
    return str(model) if name is None or name.revision is None else str(model).removesuffix(f"@{name.revision}")


def local_path(model: str | Path) -> Path | None:
    """Return the folder or GGUF file that a model names on this machine, or None for a name of the hub.

    Raises:
        ModelError: It can only be a path, and there is none; or the model there is of a kind that cannot be loaded.
    """
    name = hub_name(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if is_gguf(path):
        if (why := check_gguf_name(path.name)) is not None:
            raise ModelError(f"model: {path} cannot be loaded: {why}")
        return path
    if path.is_file():
        why = fault_of(path) or "is not a GGUF file; name one, or the folder with config.json"
        raise ModelError(f"model: {str(model)!r} {why}")
    if path.suffix.lower() == ".gguf":
        raise ModelError(f"model: no file {str(model)!r}; check its name and folder")
    if is_self(str(model)):
        raise ModelError(f"model: {str(model)!r} must be one of {', '.join(SELF_DRAFTERS)}, which are drafters")
    if name is None:
        raise ModelError(
            f"model: no folder {str(model)!r}; name a folder with config.json, a .gguf file, or a hub model"
        )
    return None


def locate(model: str | Path, progress: ProgressCallback | None = None) -> Path:
    """Return the folder or GGUF file of a model, downloaded from the hub if it is nowhere on this machine.

    Raises:
        ModelError: There is no such model, the hub cannot be reached, the model cannot be loaded, or a file in the
            hub's cache does not have the content of its checksum.
    """
    path = local_path(model)
    if path is None:
        from specinfer.hub.cache import find_cached
        from specinfer.hub.store import fetch

        name = hub_name(model)
        assert name is not None
        path = find_cached(*name) or fetch(*name, progress=progress)
    path = only_gguf(path) or path
    if path.is_dir() and (why := folder_refusal(path)) is not None:
        raise ModelError(f"model: {path} cannot be loaded: {why}")
    check_intact(model, path)
    return path


def is_on_hub(model: str | Path) -> bool:
    """Return whether a model is named as one of the hub, and is no folder or file of this machine."""
    try:
        return local_path(model) is None
    except ModelError:
        return False


def locate_tokenizer(tokenizer: str | Path) -> Path:
    """Return the folder or GGUF file of a tokenizer; of a model on the hub only the tokenizer is downloaded.

    Raises:
        ModelError: There is no such tokenizer, or the hub cannot be reached.
    """
    try:
        path = local_path(tokenizer)
        if path is None:
            from specinfer.hub.cache import find_cached
            from specinfer.hub.store import download_tokenizer

            name = hub_name(tokenizer)
            assert name is not None
            path = find_cached(*name) or download_tokenizer(name.name, name.revision)
    except ModelError as error:
        raise ModelError(f"tokenizer: {str(error).removeprefix('model: ')}") from error
    has_tokenizer = any((path / file).is_file() for file in TOKENIZERS)
    if not has_tokenizer and (file := only_gguf(path)) is not None:
        return file
    if path.is_dir() and not has_tokenizer:
        raise ModelError(f"tokenizer: {path} has no tokenizer.json or tokenizer.model; name a folder that has")
    return path
