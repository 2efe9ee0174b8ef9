"""A model folder in the user's cache for a GGUF file; the weights stay in the file.

config.json, generation_config.json, the tokenizer and the chat template are written once for each file. `WEIGHTS` links
to the file. Code that reads a model folder need not know where it came from.
"""

import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from specinfer.core.errors import ModelError
from specinfer.core.files import cache_folder
from specinfer.hub.files import GGUF_LINK, TEMPLATE_FOLDER
from specinfer.model.gguf.config import read_config
from specinfer.model.gguf.header import GgufError, GgufHeader, read_header
from specinfer.model.gguf.tokenizer import build_tokenizer, end_token_ids

WEIGHTS = GGUF_LINK
_FORMAT = 4  # of the written files; a new number creates all folders again
_TEMPLATE = "tokenizer.chat_template"
_NAMED_TEMPLATE = re.compile(rf"{re.escape(_TEMPLATE)}\.([A-Za-z0-9_-]{{1,64}})")
_MAX_TEMPLATES = 16  # of those with a name
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def weights_file(folder: Path) -> Path | None:
    """Return the GGUF file that a model folder stands for, or None if it is an ordinary folder."""
    link = folder / WEIGHTS
    if not link.is_file():
        return None
    return link.readlink() if link.is_symlink() else link  # other parts of a split file are next to it by their names


def origin_of(folder: Path) -> Path:
    """Return the path to show to users: the GGUF file that a folder stands for, or the folder itself."""
    return weights_file(folder) or folder


def find_gguf_folder(path: Path) -> Path:
    """Return the folder that stands for a GGUF file, and create it if it does not exist.

    Raises:
        GgufError: The file cannot be used.
        ModelError: The cache cannot be written.
    """
    path = path.absolute()
    state = path.stat()
    key = hashlib.sha256(f"{_FORMAT} {path} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache_folder() / f"gguf-{path.stem}-{key}"
    if weights_file(folder) is None:
        try:
            _write(path, folder)
        except OSError as error:
            raise ModelError(
                f"model: {folder.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder that can"
            ) from error
    return folder


def _write(path: Path, folder: Path) -> None:
    header = read_header(path)
    config = read_config(header)
    tokenizer, tokenizer_config = _tokenizer(header)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", _generation_fields(header))
        _write_json(partial / "tokenizer_config.json", tokenizer_config)
        tokenizer.save(str(partial / "tokenizer.json"))
        _write_templates(partial, header)
        _link(path, partial / WEIGHTS)
        partial.chmod(0o755)  # mkdtemp makes it private
        try:
            partial.rename(folder)
        except OSError:  # it exists: another process was first, or an old folder lost its file
            if weights_file(folder) is None:
                shutil.rmtree(folder)
                partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _link(path: Path, place: Path) -> None:
    try:
        place.symlink_to(path)
    except OSError:  # Windows asks for a privilege; a second name of a file needs none, but must be on the same disk
        try:
            place.hardlink_to(path)
        except OSError:
            shutil.copyfile(path, place)


def _tokenizer(header: GgufHeader) -> tuple[Any, dict[str, Any]]:
    try:
        return build_tokenizer(header)
    except GgufError:
        raise
    except Exception as error:  # the library's errors have no common base
        raise GgufError(header.path, f"its tokenizer cannot be used ({error})") from error


def _write_templates(folder: Path, header: GgufHeader) -> None:
    """Write the chat template, and others by their names, such as the one for conversations with tools."""
    if template := header.get(_TEMPLATE, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    names = [match[1] for key in header.metadata if (match := _NAMED_TEMPLATE.fullmatch(key))]
    for name in names[:_MAX_TEMPLATES]:
        (folder / TEMPLATE_FOLDER).mkdir(exist_ok=True)
        text = header.get(f"{_TEMPLATE}.{name}", str)
        (folder / TEMPLATE_FOLDER / f"{name}.jinja").write_text(text, encoding="utf-8")


def _generation_fields(header: GgufHeader) -> dict[str, Any]:
    """Return the end tokens, and the recommended sampling settings, which are checked when they are used."""
    recommended = {ours: header.metadata.get(f"general.sampling.{name}") for name, ours in _SAMPLING.items()}
    return {"eos_token_id": end_token_ids(header)} | {
        name: value for name, value in recommended.items() if value is not None
    }


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
