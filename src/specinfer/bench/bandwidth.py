"""How fast this machine reads its memory: the limit of a pass over few rows, which reads every weight once.

There is no one operation that is fastest everywhere, so several are tried and the fastest counts. All of them are
PyTorch's, with all threads, over far more than any cache holds. A machine that is shared gives now more, now less:
what each round gave is kept beside the best.
"""

from collections.abc import Callable

import torch

from specinfer.bench.clock import now

NUM_BYTES = 2**30
_COLUMNS = 2**14


class Bandwidth:
    """Ways to read one buffer, and bytes per second of each, round by round."""

    def __init__(self, device: torch.device, num_bytes: int = NUM_BYTES) -> None:
        assert num_bytes % (8 * _COLUMNS) == 0
        # Ones: pages of zeros that were never written may all be one page, which stays in the cache.
        floats = torch.ones(num_bytes // 4, device=device)
        one, other = floats.chunk(2)
        rows, vector = floats.view(-1, _COLUMNS), torch.ones(_COLUMNS, device=device)
        self._ways: dict[str, Callable[[], object]] = {
            "sum of int64": floats.view(torch.int64).sum,
            "sum of float32": floats.sum,
            "sums of rows": lambda: rows.sum(dim=1),
            "dot product": lambda: torch.dot(one, other),
            "matrix by vector": lambda: torch.mv(rows, vector),
            "copy": lambda: one.copy_(other),  # half is read, half written
        }
        self._device, self._num_bytes = device, num_bytes
        self.rates: dict[str, list[float]] = {name: [] for name in self._ways}

    def measure(self) -> None:
        """Each way once more."""
        for name, run in self._ways.items():
            started = now(self._device)
            run()
            self.rates[name].append(self._num_bytes / (now(self._device) - started))
