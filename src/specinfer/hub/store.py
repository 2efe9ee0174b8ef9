"""The Hugging Face Hub and its cache: what is there, downloads with their progress, and removal.

`huggingface_hub` is imported in this module, where it is used: that takes half a second.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specinfer.core.errors import ModelError
from specinfer.core.progress import DOWNLOADING, ProgressCallback
from specinfer.hub.cache import commits, damaged_files, missing_weights, model_in, only_commit
from specinfer.hub.files import (
    NEEDED,
    NOT_NEEDED,
    PICKLE,
    check_gguf_name,
    choose_gguf,
    folder_refusal,
    gguf_parts,
    head_format,
    may_be_eagle,
    needed_files,
    read_object,
    refusal,
)
from specinfer.hub.known_drafters import did_you_mean, known_names

_SHOWN_DIGITS = 12  # of a commit


class UnreachableError(ModelError):
    """Error for a hub that cannot be reached."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the hub's cache.

    Attributes:
        format: "safetensors", "GGUF", or "other".
        num_bytes: Bytes on disk.
        modified: Time of the last change, in seconds since 1970.
        refusal: Why it cannot be loaded, or None if nothing is known against it.
    """

    name: str
    format: str
    num_bytes: int
    modified: float
    refusal: str | None


def cached_models(*, verify: bool = False) -> list[CachedModel]:
    """Return the models in the cache, by name.

    Args:
        verify: Whether to read all files and compare them with their checksums; a damaged one is a refusal.
    """
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    models = []
    for repository in sorted(repositories, key=lambda each: each.repo_id.lower()):
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda each: each.last_modified)
            model = _describe(
                repository.repo_id, newest.snapshot_path, repository.size_on_disk, repository.last_modified
            )
            folders = [revision.snapshot_path for revision in repository.revisions] if verify else []
            if damaged := sorted({file for folder in folders for file in damaged_files(folder)}):
                model = replace(model, refusal=f"damaged: {', '.join(damaged)}; remove it, and pull it again")
            models.append(model)
    return models


def _describe(name: str, folder: Path, num_bytes: int, modified: float) -> CachedModel:
    files = [path.name for path in folder.iterdir()]
    gguf = sorted(file for file in files if file.lower().endswith(".gguf"))
    if gguf and "config.json" not in files:
        return CachedModel(name, "GGUF", num_bytes, modified, check_gguf_name(gguf[0]))
    has_weights = any(file.endswith(".safetensors") for file in files)
    why = folder_refusal(folder) or ("incomplete; pull it again" if missing_weights(folder) else None)
    return CachedModel(name, "safetensors" if has_weights else "other", num_bytes, modified, why)


def remove(name: str) -> int:
    """Remove a model from the cache and return the freed bytes.

    Raises:
        ModelError: It is not in the cache.
    """
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
        models = [each for each in cache.repos if each.repo_type == "model"]
        repositories = [each for each in models if each.repo_id.lower() == name.lower()]
    except CacheNotFound:
        repositories = []
    if not repositories:
        names = [each.name for each in cached_models()]
        raise ModelError(f"model: {name!r} is not in the cache{did_you_mean(name, names)} (specinfer list shows all)")
    plan = cache.delete_revisions(*(each.commit_hash for each in repositories[0].revisions))
    plan.execute()
    return int(plan.expected_freed_size)


def download(
    name: str, gguf_type: str | None = None, revision: str | None = None, progress: ProgressCallback | None = None
) -> Path:
    """Download what is needed of a model and return its folder or GGUF file; existing files are not downloaded again.

    Args:
        gguf_type: Type of the GGUF file to take, such as Q4_K_M, or None for safetensors, or else the usual type.
        revision: Branch, tag or commit, or None for the main branch.
        progress: Callback for the downloaded bytes, or None for the hub's own progress bars.

    Raises:
        ModelError: The hub does not have the model or cannot be reached, or it is not of a kind that can be loaded.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    with _plain_errors(name, revision):
        model = HfApi().model_info(name, revision=revision, files_metadata=True)
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in model.siblings or ()}
        chosen = choose_gguf(sizes, gguf_type)
        has_weights = any(file.endswith(".safetensors") for file in sizes)
        if chosen is None or (gguf_type is None and has_weights):
            if gguf_type is not None:
                kinds = ", ".join(sorted(file for file in sizes if file.lower().endswith(".gguf"))) or "none"
                raise ModelError(f"model: {name} has no GGUF file of type {gguf_type}; it has {kinds}")
            read = {file: read_object(Path(hf_hub_download(name, file, revision=revision)))
                    for file in ("config.json", "adapter_config.json") if file in sizes}  # fmt: skip
            damaged = next((f"{file} is damaged; pull it again" for file, content in read.items() if not content), None)
            why = damaged or refusal(sizes, read.get("config.json"), read.get("adapter_config.json"))
            files = needed_files(sizes)
            config = read.get("config.json") or {}
            if not has_weights and (head_format(config) or may_be_eagle(config)):
                files.append(PICKLE)  # read without running code
        else:
            why, files = check_gguf_name(chosen), gguf_parts(chosen)
            if missing := [file for file in files if file not in sizes]:
                why = why or f"its part {missing[0]} is missing"
        if why is not None:
            raise ModelError(f"model: {name} cannot be loaded: {why}")
        options: dict[str, Any] = {"revision": revision, "allow_patterns": files}
        if progress is not None:
            total = sum(sizes[file] for file in files)
            options["tqdm_class"] = _reporter(name, total, progress)
        folder = Path(snapshot_download(name, **options))
        if progress is not None:
            progress(f"{DOWNLOADING} {name}", total, total)
    return folder if chosen is None or chosen not in files else folder / chosen


def fetch(name: str, gguf_type: str | None, revision: str | None, progress: ProgressCallback | None = None) -> Path:
    """Download a model as `download` does; if the hub cannot be reached, return the only commit in the cache.

    Raises:
        ModelError: The hub does not have the model, or it cannot be loaded; or the hub cannot be reached, and the cache
            does not have exactly one commit of it.
    """
    try:
        return download(name, gguf_type, revision, progress)
    except UnreachableError:
        folder = only_commit(name, revision)
        if folder is None or (model := model_in(folder, gguf_type)) is None:
            raise
        return model


def download_tokenizer(name: str, revision: str | None = None) -> Path:
    """Download the files of a model that are no weights, and return their folder.

    Raises:
        ModelError: The hub does not have the model; or it cannot be reached, and the cache does not have exactly one
            commit of the model.
    """
    from huggingface_hub import snapshot_download

    try:
        with _plain_errors(name, revision):
            patterns = [pattern for pattern in NEEDED if pattern != "*.safetensors"]
            others = [*NOT_NEEDED, "*.index.json"]
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=others))
    except UnreachableError:
        if (folder := only_commit(name, revision)) is None:
            raise
        return folder


def _reporter(name: str, total: int, progress: ProgressCallback) -> type:
    """Return a class that takes the place of the hub's progress bars and reports the bytes of all files."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    done = 0

    class Reporter(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **options | {"file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal done
            shown: bool | None = super().update(n)
            if self.unit == "B":
                done = max(done, min(int(self.n), total))
                progress(f"{DOWNLOADING} {name}", done, total)
            return shown

    return Reporter


@contextlib.contextmanager
def _plain_errors(name: str, revision: str | None) -> Iterator[None]:
    """Turn the hub's errors into messages for users."""
    from huggingface_hub import constants, errors

    named = name if revision is None else f"{name}@{revision}"

    def near(*others: str) -> str:
        return did_you_mean(name, [*(cached.name for cached in cached_models()), *others])

    try:
        yield
    except ModelError:
        raise
    except errors.GatedRepoError as error:
        raise ModelError(
            f"model: {name} is gated: accept its terms at {constants.ENDPOINT}/{name}, then log in with hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"model: {name} has no revision {revision!r}; {constants.ENDPOINT}/{name}/commits/main has its commits"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(
            f"model: there is no model {name!r} on the hub, or it is private (hf auth login)"
            f"{near(*known_names()) or '; check the name, or give a folder'}"
        ) from error
    except OSError as error:  # the hub's own errors of the network are among them
        if error.errno is not None and error.errno in _OF_THE_DISK:
            raise ModelError(
                f"model: {name} cannot be written to {constants.HF_HUB_CACHE}: {os.strerror(error.errno)}; make space "
                "with specinfer rm, or set HF_HOME to another disk"
            ) from error
        raise UnreachableError(_unreachable(name, named) + near()) from error
    except Exception as error:  # errors of the network have no common base
        raise UnreachableError(_unreachable(name, named) + near()) from error


_OF_THE_DISK = (13, 28, 30, 122)  # no permission, no space, read-only, quota


def _unreachable(name: str, named: str) -> str:
    from huggingface_hub import constants

    why = f"the hub ({constants.ENDPOINT}) cannot be reached; check the network, set HF_ENDPOINT to a mirror,"
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE forbids asking the hub; unset it,"
    others = "give a folder or a GGUF file"
    if folders := commits(name):
        others = "name what the cache has: " + ", ".join(f"{name}@{folder.name[:_SHOWN_DIGITS]}" for folder in folders)
    return f"model: {named!r} is not in the cache, and {why} or {others}"
