"""Models that can be trained: as transformers defines them, in float32, from an ordinary folder and back into one."""

import shutil
from pathlib import Path
from typing import Any

import torch

from specinfer.errors import ModelError, first_line
from specinfer.model.definition import load_plain, quietly
from specinfer.model.folder import TOKEN_MAP
from specinfer.model.gguf.folder import origin_of

# What stands beside the weights, and is taken over as it is.
_BESIDE = (
    "generation_config.json", "tokenizer*", "*_tokens*.json", TOKEN_MAP, "vocab.*", "merges.txt", "*.jinja", "*.model"
)  # fmt: skip


def load_trainable(folder: Path, device: torch.device) -> Any:
    """A model in float32 whose weights take gradients, without dropout.

    Raises:
        ModelError: transformers cannot make it of the folder.
    """
    try:
        with quietly():
            model = load_plain(folder, torch.float32)
    except Exception as error:  # whatever a definition meets in a folder it does not fit
        raise ModelError(f"model: {origin_of(folder)} cannot be loaded for training: {first_line(error)}") from error
    # The folder's own is taken over as a file; what transformers finds wrong with it must not keep us from saving.
    model.generation_config = type(model.generation_config)()
    return model.eval().requires_grad_(True).to(device)


def save_trainable(model: Any, origin: Path, folder: Path) -> None:
    """Writes an ordinary Hugging Face folder; tokenizer and generation settings are those of `origin`.

    Raises:
        OSError, SafetensorError: It cannot be written.
    """
    with quietly():
        model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    for pattern in _BESIDE:
        for file in origin.glob(pattern):
            shutil.copyfile(file, folder / file.name)
