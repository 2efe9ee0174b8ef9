"""Clock of the measurements."""

import time

import torch


def now(device: torch.device) -> float:
    """Wait for all work of the device, and return the time in seconds. GPU work outlasts the call that starts it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
