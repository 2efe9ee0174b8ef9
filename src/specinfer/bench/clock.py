"""The time, as measurements take it."""

import time

import torch


def now(device: torch.device) -> float:
    """Seconds, when all that was asked of the device is done: on a GPU, passes run on after their call returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
