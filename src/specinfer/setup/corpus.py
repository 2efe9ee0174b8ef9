"""The corpus of the suffix drafter: made of files and folders with a model's tokenizer, and opened for that model."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specinfer.core.errors import ModelError, check_path
from specinfer.core.files import with_home
from specinfer.core.progress import ProgressCallback
from specinfer.drafters.lookup.corpus import MAX_TOKENS, Corpus, CorpusFileError, write_corpus
from specinfer.setup.model_names import named_tokenizer

_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})  # and hidden ones
_MAX_BYTES = 2 << 20  # of a file: larger ones are mostly data
_AT_ONCE = 64  # files that are read into tokens together
TOKEN_FILE = ".tokens"  # end of the name of a file that has tokens in place of text: a JSON list of ids in each line
_MAX_LINE = 64 << 20  # bytes


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """Counts of the files that a corpus was made of.

    Attributes:
        num_skipped: Files that are no text, too large, or copies of others.
        num_left: Files for which no room was left.
    """

    num_files: int
    num_tokens: int
    num_skipped: int
    num_left: int


def open_corpus(path: str | Path | None, tokenizer: Any, vocab_size: int) -> Corpus | None:
    """Return the corpus of a file, or None if there is none.

    Raises:
        ValueError: It cannot be used with this tokenizer; the message names the setting.
    """
    if path is None:
        return None
    if tokenizer is None:
        raise ValueError("suffix_corpus: the model has no tokenizer; leave it out")
    try:
        return Corpus(with_home("suffix_corpus", path), fingerprint(tokenizer), vocab_size)
    except CorpusFileError as error:
        raise ValueError(f"suffix_corpus: {error}") from error


def fingerprint(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def build_corpus(
    paths: Sequence[str | Path], model: str, out: Path, max_tokens: int, progress: ProgressCallback
) -> CorpusReport:
    """Write the texts of files and folders as a corpus for a model.

    Args:
        max_tokens: Most tokens of all texts; files beyond them are left out.

    Raises:
        ModelError: There is no such model.
        ValueError: A path cannot be read, or there is no text; the message names the argument.
    """
    if not 0 < max_tokens <= MAX_TOKENS // 2:
        raise ValueError(f"max_tokens must be from 1 to {MAX_TOKENS // 2}, not {max_tokens}")
    files = [file for path in paths for file in _files(path)]
    try:
        tokenizer = named_tokenizer(model)
    except ModelError as error:
        raise ModelError(f"model: {str(error).removeprefix('tokenizer: ').removeprefix('model: ')}") from error
    texts, known = list[list[int]](), set[bytes]()
    num_tokens = num_skipped = num_left = num_files = 0
    num_ids = len(tokenizer)
    for start in range(0, len(files), _AT_ONCE):
        progress("files", start, len(files))
        batch = []
        for file in files[start : start + _AT_ONCE]:
            if file.name.endswith(TOKEN_FILE):
                added = list(_token_lists(file, num_ids, max_tokens - num_tokens))
                num_tokens += sum(map(len, added))
                num_files += bool(added)
                num_left += not added
                texts += added
                continue
            text = _read_text(file)
            digest = hashlib.sha256((text or "").encode()).digest()
            if text is None or digest in known:
                num_skipped += 1
            else:
                known.add(digest)
                batch.append(text)
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"] if batch else ():
            if num_tokens + len(ids) > max_tokens:
                num_left += 1
            elif ids:
                num_tokens += len(ids)
                num_files += 1
                texts.append(ids)
    progress("files", len(files), len(files))
    if num_left and not texts:
        raise ValueError(f"max_tokens: each file has more than {max_tokens} tokens; raise it, or name shorter files")
    if not texts:
        raise ValueError(f"path: no text in {', '.join(map(str, paths))}; name files or folders of code or documents")
    write_corpus(out, texts, fingerprint(tokenizer), model)
    return CorpusReport(num_files, num_tokens, num_skipped, num_left)


def _files(name: str | Path) -> Iterator[Path]:
    """Yield a file, or the files of a folder in the order of their names, without links and hidden ones.

    Raises:
        ValueError: There is no such file or folder.
    """
    check_path("path", name)
    path = with_home("path", name)
    if os.path.isfile(path):  # unlike Path.is_file, it raises no error for a name that is too long
        yield path
        return
    if not os.path.isdir(path):
        raise ValueError(f"path: there is no file or folder {str(path)!r:.200}")
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
        files = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        yield from (file for file in files if file.is_file() and not file.is_symlink())


def _read_text(file: Path) -> str | None:
    """Return the text of a file, or None if it is no text, empty, too large, or cannot be read."""
    try:
        data = file.read_bytes() if file.stat().st_size <= _MAX_BYTES else b""
        return None if not data.strip() or b"\0" in data else data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None


def _token_lists(file: Path, num_ids: int, most: int) -> Iterator[list[int]]:
    """Yield the lists of token ids of a file, as far as they have no more tokens than this together.

    Raises:
        ValueError: A line is no list of ids of the model; the message names the line.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(_MAX_LINE), b""), start=1):
            if not line.strip():
                continue
            try:
                ids = json.loads(line)
            except (ValueError, RecursionError):
                ids = None
            if type(ids) is not list or not all(type(each) is int and 0 <= each < num_ids for each in ids):
                raise ValueError(
                    f"path: line {number} of {file} is no JSON list of token ids from 0 to {num_ids - 1}, the last one "
                    "of the model"
                )
            most -= len(ids)
            if most < 0:
                return
            if ids:
                yield ids
