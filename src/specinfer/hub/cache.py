"""The hub's cache: which snapshot a name and a revision mean, the model that is in it, and the checksums of its files.

The cache names the content of each file by its checksum on the hub, SHA-256 for weights and git's SHA-1 for small
files. Reading all of a large model takes long, so a file that has agreed is read again only when its size or times have
changed. `huggingface_hub` is imported where it is used: that takes half a second.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specinfer.core.errors import ModelError
from specinfer.core.files import cache_folder, write_atomically
from specinfer.hub.files import PICKLE, choose_gguf, gguf_parts, needed_files

_CHECKSUM = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
# In SpecInfer's cache, by paths of files: the states of those that agreed, and states with a digest of the content.
_VERIFIED, _DIGESTS = "verified.json", "digests.json"
State = list[int]


def damaged_files(path: Path) -> list[str]:
    """Return the files of a model in the cache whose content is not that of their checksum; all are read.

    A file that is no link into the named contents of the cache has no checksum and is not compared.
    """
    return _compare(_parts(path) if path.is_file() else path.rglob("*"), lambda file, state: False)


def check_intact(model: str | Path, path: Path) -> None:
    """Compare what is loaded of a model in the cache with its checksums, except files that agreed before.

    Raises:
        ModelError: The content of a file is not that of its checksum.
    """
    names = [file.name for file in path.iterdir()] if path.is_dir() else []
    files = [path / name for name in (*needed_files(names), PICKLE) if name in names]
    known = _read_record(_VERIFIED)
    if damaged := _compare(files or _parts(path), lambda file, state: known.get(str(file)) == state):
        raise ModelError(
            f"model: {model} is damaged: {', '.join(damaged)}, compared with the checksums of the hub; remove it with "
            "specinfer rm, and pull it again"
        )


def _parts(path: Path) -> list[Path]:
    return [path.with_name(name) for name in gguf_parts(path.name)]


def _compare(files: Iterable[Path], is_known: Callable[[Path, State], bool]) -> list[str]:
    """Return the names of files that do not agree with their checksums, and record those that do."""
    damaged, agreed = [], {}
    for file in sorted(files):
        content = file.resolve()
        if _CHECKSUM.fullmatch(content.name) is None or not content.is_file():
            continue
        state = _state(content)
        if is_known(content, state):
            continue
        if _digest(content, state[0]) == content.name:
            agreed[str(content)] = state
        else:
            damaged.append(file.name)
    if agreed:
        _write_record(_VERIFIED, agreed)
    return damaged


def _digest(content: Path, size: int) -> str:
    digest = hashlib.sha256() if len(content.name) == 64 else hashlib.sha1(f"blob {size}\0".encode())
    with content.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: digest).hexdigest()


def _state(content: Path) -> State:
    status = content.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def content_digest(file: Path) -> str:
    """Return the SHA-256 of a file, which is read again only if its size or times have changed."""
    content = file.resolve()
    state, known = _state(content), _read_record(_DIGESTS).get(str(content))
    if isinstance(known, list) and known[:-1] == state:
        return str(known[-1])
    with content.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    _write_record(_DIGESTS, {str(content): [*state, digest]})
    return digest


def _read_record(name: str) -> dict[str, Any]:
    try:
        record = json.loads((cache_folder() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_record(name: str, states: Mapping[str, Sequence[object]]) -> None:
    """Add the states of files to a record, which only saves time: what cannot be written is read again."""
    record = {file: state for file, state in _read_record(name).items() if os.path.exists(file)} | dict(states)
    folder = cache_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, lambda partial: partial.write_text(json.dumps(record)), is_shared=True)


logger = logging.getLogger(__name__)
_SHORT_COMMIT = re.compile("[0-9a-f]{4,39}")


def find_cached(name: str, gguf_type: str | None = None, revision: str | None = None) -> Path | None:
    """Return the complete folder, or the GGUF file, of a model in the cache, or None."""
    folder = _snapshot(name, revision)
    return None if folder is None else model_in(folder, gguf_type)


def model_in(folder: Path, gguf_type: str | None = None) -> Path | None:
    """Return a snapshot's folder if its model is complete there, its GGUF file, or None."""
    files = [path.name for path in folder.iterdir()]
    if gguf_type is None and "config.json" in files and any(file.endswith(".safetensors") for file in files):
        return None if missing_weights(folder) else folder
    chosen = choose_gguf([path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")], gguf_type)
    is_whole = chosen is not None and all((folder / part).is_file() for part in gguf_parts(chosen))
    return folder / chosen if chosen is not None and is_whole else None


def commits(name: str) -> list[Path]:
    """Return the folders of a model's commits in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    snapshots = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
    return sorted(snapshots.iterdir()) if snapshots.is_dir() else []


def only_commit(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model's only commit in the cache, if that may be the wanted revision, or None.

    A cache that was copied, or filled by commit, does not know which commit is that of the main branch.
    """
    folders = commits(name) if revision in (None, "main") else []
    if len(folders) != 1:
        return None
    logger.warning("%s is taken from commit %s, the only one in the cache", name, folders[0].name)
    return folders[0]


def missing_weights(folder: Path) -> list[str]:
    """Return the weight files that the index names and the folder lacks."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return sorted({Path(name).name for name in index["weight_map"].values()} - {p.name for p in folder.iterdir()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []  # no index, or a damaged one, which loading refuses


def _snapshot(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model's branch, tag or commit in the cache; a commit may be named by its first digits."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[]))
    except Exception:  # not in the cache, or no name of the hub; each has its own error
        if revision is None or _SHORT_COMMIT.fullmatch(revision) is None:
            return None
    named = [folder for folder in commits(name) if folder.name.startswith(revision)]
    return named[0] if len(named) == 1 else None
