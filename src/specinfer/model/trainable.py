"""Loading and saving of models for training: transformers' definition in float32, in ordinary model folders."""

import shutil
from pathlib import Path
from typing import Any

import torch

from specinfer.core.errors import ModelError, first_line
from specinfer.model.definition import load_plain, quietly
from specinfer.model.folder import TOKEN_MAP
from specinfer.model.gguf.folder import origin_of

# Files of a model folder other than weights, which are copied unchanged.
_BESIDE = (
    "generation_config.json", "tokenizer*", "*_tokens*.json", TOKEN_MAP, "vocab.*", "merges.txt", "*.jinja", "*.model"
)  # fmt: skip


def load_trainable(folder: Path, device: torch.device) -> Any:
    """Load a model in float32 for training: its weights take gradients, and dropout is off.

    Raises:
        ModelError: transformers cannot load the folder.
    """
    try:
        with quietly():
            model = load_plain(folder, torch.float32)
    except Exception as error:  # transformers raises many types for a folder that it cannot load
        raise ModelError(f"model: {origin_of(folder)} cannot be loaded for training: {first_line(error)}") from error
    # The folder's own file is copied instead; an error that transformers sees in it must not prevent saving.
    model.generation_config = type(model.generation_config)()
    _use_cache(model, False)  # which transformers cannot make for models without attention
    return model.eval().requires_grad_(True).to(device)


def save_trainable(model: Any, origin: Path, folder: Path) -> None:
    """Write an ordinary Hugging Face folder, with the tokenizer and generation settings of `origin`.

    Raises:
        OSError, SafetensorError: The folder cannot be written.
    """
    _use_cache(model, True)  # in the folder
    with quietly():
        model.save_pretrained(folder)
    _use_cache(model, False)
    (folder / "generation_config.json").unlink()
    copy_beside(origin, folder)


def _use_cache(model: Any, uses: bool) -> None:
    model.config.get_text_config().use_cache = uses


def copy_beside(origin: Path, folder: Path) -> None:
    """Copy the files other than weights and configuration, such as those of the tokenizer."""
    for pattern in _BESIDE:
        for file in origin.glob(pattern):
            shutil.copyfile(file, folder / file.name)
