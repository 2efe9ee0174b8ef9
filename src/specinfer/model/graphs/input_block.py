"""InputBlock: memory for the inputs of passes, on the host and on the device."""

import torch


class InputBlock:
    """Bytes that are written on the host and sent to the device in one copy, which nobody waits for.

    Attributes:
        host, there: [num_bytes] uint8, the first pinned for a GPU.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self.there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None

    def wait(self) -> None:
        """Wait until the last copy has read the host's bytes, so that they may be written again."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, num_bytes: int) -> None:
        """Send the first bytes, in order with the other work of the device."""
        self.there[:num_bytes].copy_(self.host[:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
