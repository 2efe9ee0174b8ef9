"""The interfaces of streams and of the layers that they bring, and the choice of layers that stay in memory."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from specinfer.model.offload.direct import Scratch

# Reads a part of a layer and puts it in its place; returns the number of bytes read.
Chunk = Callable[[Scratch], int]


class StreamedLayer(Protocol):
    """A layer whose weights are in a buffer while they are needed."""

    num_bytes: int  # of its buffer
    num_read: int  # bytes read to fill it
    widest: int  # inputs or outputs of its matrices

    def chunks(self, buffer: Tensor) -> Sequence[Chunk]:
        """Return the work that fills a buffer [num_bytes]; chunks may run in any order and in several threads."""

    def bind(self, buffer: Tensor) -> None:
        """Make the layer compute with the buffer's contents from now on."""

    def check(self) -> None:
        """Refuse weights that have changed since the model was loaded.

        Raises:
            WeightsError: The weights have changed.
        """


def spread(fitting: int, num_layers: int, num_buffers: int) -> list[int]:
    """Return the layers that stay if `fitting` fit in addition to a ring of buffers.

    If the ring has buffers for the rest, all stay. Otherwise they are spread evenly.
    """
    fitting = min(max(fitting, 0), num_layers)
    if fitting + num_buffers >= num_layers:
        fitting = num_layers
    return [i * num_layers // fitting for i in range(fitting)]


class LayerStream(Protocol):
    """A source of a model's layers: `Stream` for the CPU, `DeviceStream` for other devices."""

    num_layers: int
    buffer_bytes: int  # of the largest layer
    widest: int  # inputs or outputs of any matrix
    bytes_read: int  # since the model was loaded
    settled_bytes: int  # given to layers that stay, in addition to the ring

    @property
    def num_resident(self) -> int:
        """Number of layers that stay in memory."""

    @property
    def bytes_per_pass(self) -> int:
        """Bytes brought in for every pass."""

    @property
    def seconds_reading(self) -> float:
        """Seconds in which something was brought in."""

    @property
    def seconds_waiting(self) -> float:
        """Seconds that passes waited for weights."""

    def settle(self, num_bytes: int) -> None:
        """Keep as many layers in memory as fit into `num_bytes`. No pass may be running."""

    def acquire(self, layer: int) -> None:
        """Make a layer's weights available for computing."""

    def release(self, layer: int) -> None:
        """Mark a layer as computed."""

    def close(self) -> None:
        """Release all memory and files. The stream cannot be used afterwards."""
