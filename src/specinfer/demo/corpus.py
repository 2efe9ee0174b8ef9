"""The demo pair's text: Python's own standard library, split into training and held-out files.

A file is held out by the hash of its path alone, so the split is the same on each machine and for each Python version,
and a prompt from a held-out file is never seen in training.
"""

import hashlib
import os
import sysconfig
from pathlib import Path

_HELDOUT_ONE_IN = 50
# Tests repeat themselves, character maps are tables, and the rest differs from machine to machine.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


def stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(relative_path: str) -> bool:
    """Return whether the file at this posix path, relative to the standard library, is held out."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELDOUT_ONE_IN == 0


def _is_skipped(name: str) -> bool:
    return name in _SKIPPED_FOLDERS or name.startswith(_SKIPPED_PREFIXES)


def _files() -> list[tuple[str, Path]]:
    """Return all (relative posix path, file) pairs in the order of the relative path."""
    root, files = stdlib_folder(), []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not _is_skipped(name)]  # site-packages may hold very many files
        files += [Path(folder, name) for name in names if name.endswith(".py") and not _is_skipped(name)]
    return sorted((path.relative_to(root).as_posix(), path) for path in files)


def training_files() -> list[Path]:
    return [path for rel, path in _files() if not is_held_out(rel)]


def heldout_files() -> list[Path]:
    return [path for rel, path in _files() if is_held_out(rel)]


def read_text(path: Path) -> str:
    """Return the file's text with plain newlines; bytes that are not UTF-8 are replaced."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    return text.replace("\r\n", "\n")


def heldout_prompts(count: int, *, num_chars: int = 600) -> list[str]:
    """Return whole lines from the middle of held-out files, about `num_chars` long, the same each time.

    The files take turns, so that a few prompts already come from different files; if none has four times as many
    characters, those with twice as many do. A prompt does not end in a line break, because the tokenizer joins that to
    the indentation after it.
    """
    every = [read_text(path) for path in heldout_files()]
    long_texts = ([text for text in every if len(text) >= times * num_chars] for times in (4, 2))
    texts = next(filter(None, long_texts), [])
    prompts: dict[str, None] = {}  # an ordered set
    for turn in range(20 * count):
        if len(prompts) == count or not texts:
            break
        text = texts[turn % len(texts)]
        # Steps of the golden ratio spread the turns of one file evenly over its middle part.
        place = min(0.2 + 0.6 * ((0.5 + 0.618034 * (turn // len(texts))) % 1.0), 1 - num_chars / len(text))
        prompt = _whole_lines(text, int(place * len(text)), num_chars)
        if prompt.strip():
            prompts.setdefault(prompt)
    if len(prompts) < count:
        raise ValueError(
            f"the held-out files of {stdlib_folder()} give only {len(prompts)} prompts of "
            f"{num_chars} characters: ask for fewer or shorter ones"
        )
    return list(prompts)


def _whole_lines(text: str, place: int, num_chars: int) -> str:
    """Return the lines after `place`, at least one and otherwise at most `num_chars` characters."""
    start = text.find("\n", place) + 1
    while text.startswith("\n", start):
        start += 1
    end = text.rfind("\n", start, start + num_chars)
    if end <= start:
        end = text.find("\n", start)
    return text[start:end].rstrip()
