"""Drafters for the comparison of drafters, and worse copies of a good one."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specinfer.core.errors import ModelError
from specinfer.core.lookups import LOOKUPS, MTP, SELF_DRAFTERS
from specinfer.model.gguf.folder import origin_of, weights_file
from specinfer.model.heads.load import find_format

# (noise, seed) of the embedded drafter's copies: one drafts a little worse, one much worse.
_DISTURBANCES = ((0.1, 1), (0.2, 2))
_KNOWN = {
    "demo": "the embedded drafter",
    "demo-chat": "the drafter tuned to the chat model",
    MTP: "the target's own layers for multi-token prediction",
    **{name: kind.help for name, kind in SELF_DRAFTERS.items()},
    **{name: kind.help for name, kind in LOOKUPS.items()},
}


def disturbed_copy(folder: Path, destination: Path, noise: float, seed: int) -> Path:
    """Write a copy of a model with Gaussian noise on each matrix, and return its folder.

    Args:
        noise: Scale of the noise, as a multiple of the standard deviation of the matrix's entries.

    Raises:
        ModelError: The folder holds a GGUF file.
    """
    if weights_file(folder) is not None:
        raise ModelError(
            f"drafter: {origin_of(folder)} is a GGUF file, and noise is added to safetensors; take a folder"
        )
    destination.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, destination / file.name)
    source = torch.Generator().manual_seed(seed)
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                values = tensor.float()
                added = noise * values.std() * torch.randn(values.shape, generator=source)
                tensors[name] = (values + added).to(tensor.dtype)
        save_file(tensors, destination / file.name, metadata={"format": "pt"})
    return destination


def disturbed_copies(folder: Path, place: Path) -> dict[str, str]:
    """Write increasingly worse copies of a drafter, and return a description of each by its folder."""
    copies = {}
    for noise, seed in _DISTURBANCES:
        copy = disturbed_copy(folder, place / f"noise-{noise:g}", noise, seed)
        copies[str(copy)] = f"the embedded drafter with noise of {noise:g} deviations on each matrix (seed {seed})"
    return copies


def describe(name: str) -> str:
    """Return a description of a drafter in words."""
    kind = find_format(Path(name))
    return _KNOWN.get(name, f"the small model {name}" if kind is None else f"the {kind} head {name}")
