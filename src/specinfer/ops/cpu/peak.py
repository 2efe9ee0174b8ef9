"""Peak rate of products of codes."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from specinfer.core.systems import usable_cpus
from specinfer.ops.cpu.library import address, library

_STEPS = 100_000
_ROUNDS = 10


def multiply_adds_per_second() -> float:
    """Measure the multiply-adds of 4-bit codes per second, by a loop on each core that loads nothing."""
    results = np.zeros((min(torch.get_num_threads(), usable_cpus()), 16), np.float32)
    best = 0.0
    with ThreadPoolExecutor(len(results)) as pool:
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            count = sum(pool.map(lambda row: library().specinfer_multiply(_STEPS, address(row)), results))
            best = max(best, count / (time.perf_counter() - started))
    return best
