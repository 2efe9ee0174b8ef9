"""Layers in pinned host memory on their way to a device: all of them, or two at a time as the disk delivers them."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from specinfer.core.progress import ProgressCallback
from specinfer.model.offload.direct import Scratch
from specinfer.model.offload.stream import Stream
from specinfer.model.offload.streamed_layer import Chunk, StreamedLayer
from specinfer.model.offload.transfer import DeviceTransfer, Event


class _HostLayer:
    """A layer as seen by `Stream`, which leaves its bytes in the host buffer they were read into."""

    def __init__(self, layer: StreamedLayer, pin: Callable[[Tensor], None], copies: dict[int, Event]) -> None:
        self._layer, self._pin, self._copies = layer, pin, copies
        self.num_bytes, self.num_read, self.widest = layer.num_bytes, layer.num_read, layer.widest
        self.buffer: Tensor | None = None
        self.is_loaded = False

    def chunks(self, buffer: Tensor) -> list[Chunk]:
        copied = self._copies.get(buffer.data_ptr())
        return [partial(_fill, copied, chunk) for chunk in self._layer.chunks(buffer)]

    def bind(self, buffer: Tensor) -> None:
        self._pin(buffer)
        self.buffer = buffer

    def check(self) -> None:
        if not self.is_loaded:
            self._layer.check()


def _fill(copied: Event | None, chunk: Chunk, scratch: Scratch) -> int:
    """Run a chunk in a reader thread, after the device has copied the buffer's old contents."""
    if copied is not None:
        copied.synchronize()
    return chunk(scratch)


class HostLayers:
    """Some of a model's layers in host memory, in order.

    Args:
        in_host_memory: Whether all layers are read now and kept. Otherwise each is read again for every pass.
        progress: Callback for the progress of reading them.

    Raises:
        ModelError: The memory cannot be pinned.
        WeightsError: Layers that are to be kept cannot be read.
    """

    def __init__(
        self,
        layers: Sequence[StreamedLayer],
        transfer: DeviceTransfer,
        *,
        in_host_memory: bool,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._transfer = transfer
        self._pinned: dict[int, Tensor] = {}
        self._copies: dict[int, Event] = {}  # by buffer: the event after the copy of its contents
        self._layers = [_HostLayer(layer, self._pin, self._copies) for layer in layers]
        self._in_host_memory = in_host_memory
        self._stream = Stream(self._layers, lambda: None)
        if in_host_memory:
            try:
                self._fill(progress or (lambda *_: None))
            except BaseException:
                self.close()
                raise

    def _fill(self, progress: ProgressCallback) -> None:
        done, total = 0, sum(layer.num_bytes for layer in self._layers)
        self._stream.settle(self._stream.buffer_bytes * len(self._layers))
        for i, layer in enumerate(self._layers):
            self._stream.acquire(i)
            self._stream.release(i)
            layer.is_loaded = True
            done += layer.num_bytes
            progress("reading", done, total)

    @property
    def seconds_reading(self) -> float:
        """Seconds in which at least one read from the disk was in progress."""
        return self._stream.seconds_reading

    def fetch(self, position: int, *, wait: bool) -> Tensor | None:
        """Return a pinned uint8 tensor that begins with the layer's bytes.

        Without `wait`, return None if the layer has not been read yet.

        Raises:
            WeightsError: The layer cannot be read.
        """
        if not wait and not self._stream.is_ready(position):
            return None
        self._stream.acquire(position)
        return self._layers[position].buffer

    def leave(self, position: int, copied: Event) -> None:
        """Allow overwriting a fetched layer after the event."""
        buffer = self._layers[position].buffer
        if not self._in_host_memory:
            assert buffer is not None
            self._copies[buffer.data_ptr()] = copied
        self._stream.release(position)

    def close(self) -> None:
        """Release the memory. No copy may be in progress."""
        self._stream.close()
        for memory in self._pinned.values():
            self._transfer.unpin(memory)
        self._pinned = {}
        for layer in self._layers:
            layer.buffer = None  # layers and stream form a cycle, and would keep the memory

    def _pin(self, memory: Tensor) -> None:
        if memory.data_ptr() not in self._pinned:
            self._transfer.pin(memory)
            self._pinned[memory.data_ptr()] = memory
