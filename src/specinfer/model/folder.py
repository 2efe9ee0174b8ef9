"""Resolution of a folder, GGUF file or hub name to a complete model folder, whose weight files are checked."""

import contextlib
import json
import logging
import math
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specinfer.core.errors import ModelError, WeightsError, first_line
from specinfer.core.sampling import SamplingParams
from specinfer.hub.files import fault_of, gguf_parts, is_gguf
from specinfer.hub.locate import locate
from specinfer.model.gguf.folder import find_gguf_folder, weights_file
from specinfer.model.offload.shards import Shards, has_usual_names, weight_paths

logger = logging.getLogger(__name__)
TOKEN_MAP = "token_map.json"  # in a drafter's folder: the only tokens whose logits it computes
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def find_folder(model: str | Path) -> Path:
    """Return the local folder of a model. A name that is no folder or GGUF file is downloaded from the hub.

    Raises:
        ModelError: There is no such folder, and the hub does not have it or cannot be reached; or the weights are
            neither safetensors nor GGUF, or are damaged.
    """
    folder = locate(model)
    if is_gguf(folder):
        return find_gguf_folder(folder)
    _check_files(folder)
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the files that a folder's weights are read from.

    Raises:
        ModelError: As `weight_paths`.
    """
    gguf = weights_file(folder)
    return weight_paths(folder) if gguf is None else [gguf.with_name(name) for name in gguf_parts(gguf.name)]


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Return a context with an empty folder that takes the place of `folder` at the end, unless an error occurs.

    Raises:
        OSError: A folder cannot be written.
    """
    partial, old = (folder.with_name(f".{folder.name}-{kind}") for kind in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        readable = (partial / "config.json").stat().st_mode
        for file in partial.glob("*.safetensors"):  # these are written with permissions for the owner only
            file.chmod(readable)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a folder's weights, read from the headers of its files; a tied matrix is listed once."""
    with Shards(folder) as shards:
        return {name: source.shape for name, source in shards.sources.items()}


def read_weight(folder: Path, *endings: str) -> Tensor:
    """Read the first weight of a folder whose name ends with one of these, by their order, in float32.

    Raises:
        ModelError: There is none, or it cannot be read.
    """
    try:
        with Shards(folder, torch.float32) as shards:
            for ending in endings:
                for name, source in shards.sources.items():
                    if name.endswith(ending):
                        return source.read().float()
    except WeightsError as error:
        raise ModelError(str(error)) from error
    raise ModelError(f"model: {folder} has no weight {endings[0]}")


def count_parameters(folder: Path) -> int:
    """Return a model's number of parameters from the headers of its weight files; a tied matrix counts once."""
    return sum(map(math.prod, weight_shapes(folder).values()))


def sampling_defaults(folder: Path) -> dict[str, float]:
    """Return the model's recommended sampling settings, by names of `SamplingParams`, without unusable values."""
    file = folder / "generation_config.json"
    written = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    settings: dict[str, float] = {}
    for name in _RECOMMENDED:
        value = written.get(name) if isinstance(written, dict) else None
        try:
            if value is not None:
                SamplingParams(**{name: value})
                settings[name] = value
        except ValueError as error:
            logger.warning("%s is not followed: %s", file, error)
    return settings


def read_token_map(folder: Path, vocab_size: int) -> Tensor | None:
    """Return the [map] int64 token ids in a drafter's `token_map.json`, or None if it has none; as `read_token_ids`."""
    file = folder / TOKEN_MAP
    return read_token_ids(file, vocab_size) if file.is_file() else None


def read_token_ids(file: Path, vocab_size: int) -> Tensor:
    """Return the [map] int64 token ids in a JSON file, the only ones that a drafter proposes.

    Most tokens of a large vocabulary are hardly ever generated, and their rows of the head take most of a small
    drafter's time (frequency-ranked vocabulary compression: FR-Spec, arXiv 2502.14856).

    Raises:
        ModelError: The file cannot be used; the message gives the reason.
    """
    try:
        ids = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model: {file} is damaged; fetch the model again") from error
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ModelError(f"model: {file} is not a list of token ids; write such a list, or remove the file")
    if any(a >= b for a, b in pairwise(ids)):
        raise ModelError(f"model: the token ids of {file} do not ascend; sort them, and let none occur twice")
    if not 0 <= ids[0] <= ids[-1] < vocab_size:
        wrong = ids[-1] if ids[0] >= 0 else ids[0]
        raise ModelError(
            f"model: token id {wrong} of {file} is not in the vocabulary of {vocab_size} tokens; take a drafter that "
            "was made for this target"
        )
    return torch.tensor(ids)


def _check_files(folder: Path) -> None:
    # transformers would ignore a damaged file, and miss the end tokens in it.
    generation = folder / "generation_config.json"
    try:
        json.loads(generation.read_text(encoding="utf-8") if generation.is_file() else "{}")
    except (ValueError, RecursionError) as error:
        raise ModelError(f"model: {generation} is damaged; fetch the model again") from error
    if weights_file(folder) is not None:
        return  # made from a file that was checked
    # Heads may have files of any names.
    for file in weight_paths(folder) if has_usual_names(folder) else sorted(folder.glob("*.safetensors")):
        if (fault := fault_of(file)) is not None:
            raise ModelError(f"model: {file} {fault}")
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"model: {file} is damaged ({first_line(error)}); fetch the model again") from error
