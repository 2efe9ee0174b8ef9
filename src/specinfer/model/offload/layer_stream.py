"""The interface of streams, which bring a model's layers from any storage to any device."""

from typing import Protocol


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
