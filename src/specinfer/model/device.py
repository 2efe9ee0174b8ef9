"""Where a model runs and in which type: names as the command line has them, checked before anything is loaded."""

import torch

DTYPES: dict[str, str | torch.dtype] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float": torch.float32,
}


def find_device(name: str) -> torch.device:
    """The device of this name; "auto" is the GPU if there is one.

    Raises:
        ValueError: No such device is known or at hand.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f'device: {name!r} is not known; use "auto", "cpu" or "cuda"') from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f'device: {name!r} is not supported; use "cpu" or "cuda"')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f'device: no CUDA device {name!r} is at hand; use "cpu" or "auto"')
    return device
