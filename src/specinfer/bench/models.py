"""Model folders that a measurement loads."""

from dataclasses import dataclass
from pathlib import Path

import torch

from specinfer.core.config import OffloadConfig
from specinfer.core.drafter_forms import parse_drafters
from specinfer.core.lookups import reserved_names
from specinfer.model.definition import load_config
from specinfer.model.device import DTYPES, find_device
from specinfer.model.folder import count_parameters
from specinfer.policy.offload_choice import usual_copy
from specinfer.setup.model_names import find_drafter, find_target, usual_drafters


@dataclass(frozen=True, slots=True)
class Models:
    """Folder of the target, and for each drafter its folder, or a name that stands for none."""

    target: Path
    drafters: tuple[str, ...]

    @property
    def drafter_parameters(self) -> dict[str, int]:
        """Number of parameters of each drafter by its name; 0 for one without weights of its own."""
        return {
            Path(name).name: 0 if name in reserved_names() else count_parameters(Path(name)) for name in self.drafters
        }


def find_models(
    model: str,
    drafters: str | tuple[str, ...],
    offload: OffloadConfig | None = None,
    quantization: str | None = None,
    device: str = "auto",
) -> Models:
    """Return the folders of the target and its drafters. "auto" chooses the same drafters as `LLM`.

    Args:
        offload: Settings of a streamed target, or None.
        quantization: What the target's weights are rounded to, or None.
        device: Where they are.

    Raises:
        ModelError: A model cannot be found.
        ValueError: The list of drafters is malformed or empty.
    """
    names = parse_drafters(drafters)
    if names == ():
        raise ValueError('drafters: empty, and trees need at least one; use "auto", "ngram" or a model')
    target = find_target(model)
    if names is None:
        offload = offload or OffloadConfig()
        place = find_device(device)
        copy = usual_copy(target, offload, quantization, place)
        names = usual_drafters(model, target, place, small_models=offload.offload is None, copy=copy).names
    folders = tuple(name if name in reserved_names() else str(find_drafter(name)) for name in names)
    return Models(target, folders)


def dtype_of(folder: Path, name: str) -> torch.dtype:
    """Return the dtype that a folder's model is loaded in; "auto" is the checkpoint's own."""
    kind = DTYPES[name]
    own = load_config(folder).dtype if kind == "auto" else kind
    return own if isinstance(own, torch.dtype) else torch.float32
