"""What brings a model's layers in, wherever they lie and wherever they are computed."""

from typing import Protocol


class LayerStream(Protocol):
    """What brings a model's layers in: `Stream` for the CPU, `DeviceStream` for others."""

    num_layers: int
    buffer_bytes: int  # of the largest layer
    widest: int  # inputs or outputs of any matrix
    bytes_read: int  # since the model was loaded

    @property
    def num_resident(self) -> int:
        """Layers that stay."""

    @property
    def bytes_per_pass(self) -> int:
        """Brought in for every pass."""

    @property
    def seconds_reading(self) -> float:
        """In which something was brought in."""

    @property
    def seconds_waiting(self) -> float:
        """In which passes waited for weights."""

    def settle(self, num_bytes: int) -> None:
        """As many layers stay as fit into so many bytes. No pass may be running."""

    def acquire(self, layer: int) -> None:
        """Lets a layer compute with its weights."""

    def release(self, layer: int) -> None:
        """It was computed."""

    def close(self) -> None:
        """Gives all back, for good."""
