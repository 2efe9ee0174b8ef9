"""From the name of a model to its folder or file on this machine."""

import re
from pathlib import Path

from specinfer.core.errors import ModelError
from specinfer.core.progress import ProgressCallback
from specinfer.hub.files import check_gguf_name, folder_refusal

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_SITE = re.compile(r"^(https?://)?(hf\.co|huggingface\.co)/", re.IGNORECASE)
_NAME = re.compile(r"(([\w-][\w.-]*/)?[\w-][\w.-]*)(:([\w.-]+))?", re.ASCII)


def hub_name(model: str | Path) -> tuple[str, str | None] | None:
    """Return a model's name on the hub and the type of its GGUF file, as in org/name:Q4_K_M; None for a path."""
    if not isinstance(model, (str, Path)):
        raise ModelError(f"model: give a folder or a hub name, not {model!r}")
    match = _NAME.fullmatch(_SITE.sub("", str(model)))
    return None if match is None else (match[1], match[4])


def local_path(model: str | Path) -> Path | None:
    """Return the folder or GGUF file that a model names on this machine, or None for a name of the hub.

    Raises:
        ModelError: It can only be a path, and there is none; or the model there is of a kind that cannot be loaded.
    """
    name = hub_name(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix.lower() == ".gguf":
        if (why := check_gguf_name(path.name)) is not None:
            raise ModelError(f"model: {path} cannot be loaded: {why}")
        return path
    if path.is_file() or name is None or path.suffix.lower() == ".gguf":
        raise ModelError(
            f"model: no folder {str(model)!r}; name a folder with config.json, a .gguf file, or a hub model"
        )
    return None


def locate(model: str | Path, progress: ProgressCallback | None = None) -> Path:
    """Return the folder or GGUF file of a model, downloaded from the hub if it is nowhere on this machine.

    Raises:
        ModelError: There is no such model, the hub cannot be reached, or the model cannot be loaded.
    """
    path = local_path(model)
    if path is None:
        from specinfer.hub.store import download, find_cached

        name = hub_name(model)
        assert name is not None
        path = find_cached(*name) or download(*name, progress)
    if path.is_dir() and (why := folder_refusal(path)) is not None:
        raise ModelError(f"model: {path} cannot be loaded: {why}")
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
            from specinfer.hub.store import download_tokenizer, find_cached

            name = hub_name(tokenizer)
            assert name is not None
            path = find_cached(*name) or download_tokenizer(name[0])
    except ModelError as error:
        raise ModelError(f"tokenizer: {str(error).removeprefix('model: ')}") from error
    if path.is_dir() and not any((path / file).is_file() for file in TOKENIZERS):
        raise ModelError(f"tokenizer: {path} has no tokenizer.json or tokenizer.model; name a folder that has")
    return path
