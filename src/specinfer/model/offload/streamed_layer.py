"""A layer whose weights come and go: what a stream has to do to bring it in, and which layers need not come and go."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from specinfer.model.offload.direct import pages


class Room:
    """A reader thread's own memory, which it keeps from chunk to chunk."""

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    def get(self, name: str, num_bytes: int) -> Tensor:
        """[at least `num_bytes`] uint8 that begins with a page; what was in it before may still be."""
        room = self._rooms.get(name)
        if room is None or len(room) < num_bytes:
            room = self._rooms[name] = pages(num_bytes)
        return room


# Reads a part of a layer and puts it in its place; the bytes that were read.
Chunk = Callable[[Room], int]


class StreamedLayer(Protocol):
    """A layer's weights, in a buffer while they are needed."""

    num_bytes: int  # of its buffer
    num_read: int  # bytes read for it
    widest: int  # inputs or outputs of its matrices

    def chunks(self, buffer: Tensor) -> Sequence[Chunk]:
        """What must be done to fill a buffer [num_bytes], in any order and by several threads."""

    def bind(self, buffer: Tensor) -> None:
        """From now on the layer computes with what is in the buffer."""

    def check(self) -> None:
        """Refuses weights that are others than when the model was loaded.

        Raises:
            WeightsError: They are.
        """


def spread(fitting: int, num_layers: int, num_buffers: int) -> list[int]:
    """Which of the layers stay if so many fit beside a ring of buffers: all if the ring holds the rest, else evenly."""
    fitting = min(max(fitting, 0), num_layers)
    if fitting + num_buffers >= num_layers:
        fitting = num_layers
    return [i * num_layers // fitting for i in range(fitting)]
