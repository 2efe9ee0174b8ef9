"""Layers brought to a device ahead of their use, from host memory or through it from the disk.

A pass computes with one of a few buffers on the device, while the device itself copies the next layers into the others.
The pass only defines the order of the work. Its thread waits for the disk, and for nothing else.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specinfer.core.errors import WeightsError
from specinfer.core.progress import ProgressCallback
from specinfer.model.offload.budget import available_bytes
from specinfer.model.offload.host import HostLayers
from specinfer.model.offload.streamed_layer import StreamedLayer, spread
from specinfer.model.offload.transfer import DeviceTransfer, Event, Stopwatch

NUM_BUFFERS = 3  # one is used, one is filled; the third keeps the bus busy between passes


class _Coming(NamedTuple):
    """A layer that is on the device, or will be after an event."""

    layer: int
    buffer: Tensor
    copied: Event


class DeviceStream:
    """All layers of a model, some of which stay on the device; the same interface as `Stream`.

    Args:
        close: Releases the files that the layers are read from.
        in_host_memory: Whether layers that do not stay on the device are kept in host memory, or read for every pass.
        progress: Callback for the progress of reading them into host memory.
        num_sharing: Number of processes that share the host memory.

    Attributes:
        bytes_read: Bytes brought to the device for passes, or bytes read from the disk unless `in_host_memory`.
    """

    def __init__(
        self,
        layers: Sequence[StreamedLayer],
        close: Callable[[], None],
        transfer: DeviceTransfer,
        *,
        in_host_memory: bool,
        progress: ProgressCallback | None = None,
        num_sharing: int = 1,
    ) -> None:
        assert layers
        self._progress, self._num_sharing = progress, num_sharing
        self._layers, self._close, self._transfer, self._in_host_memory = layers, close, transfer, in_host_memory
        self.num_layers = len(layers)
        self.buffer_bytes = max(layer.num_bytes for layer in layers)
        self.widest = max(layer.widest for layer in layers)
        self.bytes_read = self.settled_bytes = 0
        self._own: dict[int, Tensor] = {}  # buffers of the layers that stay
        # Free buffers, and the event after which each may be filled.
        self._free: deque[tuple[Tensor, Event | None]] = deque(self._ring())
        self._coming: deque[_Coming] = deque()  # in the order of use; the first may be in use
        self._streamed: list[int] = []  # the layers that do not stay
        self._host: HostLayers | None = None  # the streamed layers in host memory
        self._next = 0  # index into `_streamed` of the layer to copy next
        self._is_closed, self._is_settled = False, False
        self._copying, self._stalled, self._waited = Stopwatch(), Stopwatch(), 0.0

    @property
    def num_resident(self) -> int:
        """Number of layers that stay on the device."""
        return len(self._own)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes brought in for every pass."""
        return sum(self._cost(i) for i in range(self.num_layers) if i not in self._own)

    @property
    def seconds_reading(self) -> float:
        """Seconds in which layers were copied from host memory to the device, or read from the disk."""
        if self._in_host_memory or self._host is None:
            return self._copying.seconds
        return self._host.seconds_reading

    @property
    def seconds_waiting(self) -> float:
        """Seconds that passes waited for the disk, or the device for a copy."""
        return self._waited + self._stalled.seconds

    def settle(self, num_bytes: int) -> None:
        """Keep as many layers on the device as fit into `num_bytes` in addition to the ring.

        No pass may be running.

        Raises:
            ValueError: The other layers do not fit into host memory.
            ModelError: Host memory cannot be pinned.
            WeightsError: Layers cannot be read.
        """
        self._release_all()
        self.settled_bytes = num_bytes
        self._own = {}
        self._free = deque(self._ring())
        resident = spread(num_bytes // self.buffer_bytes, self.num_layers, len(self._free))
        self._streamed = [i for i in range(self.num_layers) if i not in resident]
        if self._in_host_memory:
            self._check_host()
        if not self._streamed:
            self._free.clear()
        if resident:
            self._fill_own(resident)
        if self._streamed:
            streamed = [self._layers[i] for i in self._streamed]
            self._host = HostLayers(
                streamed, self._transfer, in_host_memory=self._in_host_memory, progress=self._progress
            )
        self._is_settled = True

    def _check_host(self) -> None:
        needed = sum(self._layers[i].num_bytes for i in self._streamed)
        if needed > (available := available_bytes() // self._num_sharing):
            raise ValueError(
                f"offload: the layers that do not stay on the device take {needed / 2**20:.0f} MiB of host memory, and "
                f'{available / 2**20:.0f} are available; raise memory_budget, set quantization, or use offload="disk"'
            )

    def _fill_own(self, resident: Sequence[int]) -> None:
        host = HostLayers([self._layers[i] for i in resident], self._transfer, in_host_memory=False)
        try:
            for position, i in enumerate(resident):
                layer = self._layers[i]
                found = host.fetch(position, wait=True)
                assert found is not None
                self._own[i] = self._transfer.buffer(layer.num_bytes)
                copy = self._transfer.copy(found[: layer.num_bytes], self._own[i], self._transfer.record())
                host.leave(position, copy.done)
                layer.bind(self._own[i])
        finally:
            self._transfer.finish()
            host.close()

    def acquire(self, layer: int) -> None:
        """Make the layer's weights available to all work that is queued from now on.

        Raises:
            WeightsError: The weights cannot be read. The next pass reads again.
        """
        if self._is_closed:
            raise WeightsError("weights: the model was shut down; load it again")
        if not self._is_settled:
            self.settle(0)
        if layer in self._own:
            return
        if layer != (self._coming[0].layer if self._coming else self._streamed[self._next]):
            self._restart(layer)
        if not self._coming:
            before = time.perf_counter()
            self._bring(wait=True)
            self._waited += time.perf_counter() - before
        coming = self._coming[0]
        before_copy = self._transfer.record()
        self._transfer.wait(coming.copied)
        self._stalled.add(before_copy, self._transfer.record())
        self._layers[layer].bind(coming.buffer)

    def release(self, layer: int) -> None:
        """Mark the layer's work as queued: after it, the buffer may be filled with another layer."""
        if layer in self._own:
            return
        coming = self._coming.popleft()
        assert coming.layer == layer
        self._free.append((coming.buffer, self._transfer.record()))
        while self._free and self._bring(wait=False):
            pass

    def close(self) -> None:
        """Release buffers, host memory and files. The stream cannot be used afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        self._release_all()
        self._own = {}
        for layer in self._layers:  # views would keep a buffer alive as long as the model
            layer.bind(torch.empty(layer.num_bytes, dtype=torch.uint8, device="meta"))
        self._close()

    def _bring(self, *, wait: bool) -> bool:
        """Queue the copy of the next layer to a free buffer; return False if it has not been read from the disk yet."""
        assert self._host is not None
        position, layer = self._next, self._streamed[self._next]
        found = self._host.fetch(position, wait=wait)
        if found is None:
            return False
        size = self._layers[layer].num_bytes
        buffer, used = self._free.popleft()
        copy = self._transfer.copy(found[:size], buffer[:size], used)
        self._host.leave(position, copy.done)
        self._copying.add(copy.started, copy.done)
        self._coming.append(_Coming(layer, buffer, copy.done))
        self._next = (position + 1) % len(self._streamed)
        self.bytes_read += self._cost(layer)
        return True

    def _restart(self, layer: int) -> None:
        """Discard the upcoming layers after an interrupted pass; `layer` is next."""
        if self._coming:
            used = self._transfer.record()
            self._free.extend((coming.buffer, used) for coming in self._coming)
            self._coming.clear()
        self._next = self._streamed.index(layer)

    def _release_all(self) -> None:
        self._transfer.finish()
        self._coming.clear()
        self._free.clear()
        self._next = 0
        if self._host is not None:
            self._host.close()
            self._host = None

    def _ring(self) -> list[tuple[Tensor, Event | None]]:
        # Their memory may have belonged to another tensor that queued work still uses.
        used = self._transfer.record()
        return [(self._transfer.buffer(self.buffer_bytes), used) for _ in range(min(NUM_BUFFERS, self.num_layers))]

    def _cost(self, layer: int) -> int:
        return self._layers[layer].num_bytes if self._in_host_memory else self._layers[layer].num_read
