"""Models in the hub's cache: which snapshot a name and a revision mean, and the model that is in it.

`huggingface_hub` is imported in this module, where it is used: that takes half a second.
"""

import json
import logging
import re
from pathlib import Path

from specinfer.hub.files import choose_gguf, gguf_parts

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
    found = commits(name) if revision in (None, "main") else []
    if len(found) != 1:
        return None
    logger.warning("%s is taken from commit %s, the only one in the cache", name, found[0].name)
    return found[0]


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
