"""Layers brought in ahead of their use.

A pass takes the layers in order, 0 to n-1. Reader threads run ahead of it through a ring of buffers, and into the next
pass's first layers while the engine drafts and samples. The layers themselves define where bytes come from and which
device a buffer is on. A layer that stays in memory is read once, into a buffer of its own.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from specinfer.core.errors import WeightsError
from specinfer.model.offload.direct import Scratch, pages
from specinfer.model.offload.streamed_layer import Chunk, StreamedLayer, spread
from specinfer.ops import compute_alone

NUM_BUFFERS = 2  # in the ring: one is used for computing while the other is filled
NUM_READERS = 3  # while one unpacks what it read, the disk still has requests to serve


class _Entry:
    """A layer that is being read, or was read and is waiting to be used."""

    def __init__(self, layer: int, buffer: Tensor, chunks: Sequence[Chunk]) -> None:
        self.layer, self.buffer = layer, buffer
        self.chunks = deque(chunks)
        self.num_left = len(chunks)
        self.error: Exception | None = None


class Stream:
    """All layers of a model, some of which stay in memory.

    Args:
        close: Releases the files that the layers are read from.

    Attributes:
        bytes_read: Bytes read since the model was loaded.
    """

    def __init__(
        self, layers: Sequence[StreamedLayer], close: Callable[[], None], make_buffer: Callable[[int], Tensor] = pages
    ) -> None:
        assert layers
        self._layers, self._close = layers, close
        self._make_buffer = make_buffer
        self.num_layers = len(layers)
        self.bytes_read = self.settled_bytes = 0
        self._seconds_reading = 0.0  # up to the last time that no read was in progress
        self._seconds_waiting = 0.0  # without the current wait
        self._waits_since: float | None = None
        self.buffer_bytes = max(layer.num_bytes for layer in layers)
        self.widest = max(layer.widest for layer in layers)
        self._own: dict[int, Tensor] = {}  # buffers of the layers that stay
        self._is_filled: set[int] = set()  # the staying layers that have been read
        self._ring = self._new_ring()
        self._queue: deque[_Entry] = deque()  # in the order of use; ring buffers in no entry are free
        self._next = 0  # the layer to read after those of the queue
        self._is_paused = True  # until a pass begins
        self._num_busy = 0  # chunks being read
        self._busy_since = 0.0
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    @property
    def num_resident(self) -> int:
        """Number of layers that stay in memory."""
        return len(self._own)

    @property
    def seconds_reading(self) -> float:
        """Seconds in which at least one read was in progress, since the model was loaded."""
        with self._changed:
            now = time.perf_counter() - self._busy_since if self._num_busy else 0.0
            return self._seconds_reading + now

    @property
    def seconds_waiting(self) -> float:
        """Seconds that passes waited for weights, since the model was loaded."""
        with self._changed:
            now = 0.0 if self._waits_since is None else time.perf_counter() - self._waits_since
            return self._seconds_waiting + now

    @property
    def bytes_per_pass(self) -> int:
        """Bytes read for every pass, once the layers that stay have been read."""
        return sum(layer.num_read for i, layer in enumerate(self._layers) if i not in self._own)

    def settle(self, num_bytes: int) -> None:
        """Keep as many layers as fit into `num_bytes` in addition to the ring, spread evenly over the depth.

        No pass may be running.
        """
        self._restart()
        self.settled_bytes = num_bytes
        with self._changed:
            resident = spread(num_bytes // self.buffer_bytes, self.num_layers, NUM_BUFFERS)
            self._is_filled = set()
            # Keep the ring: layers still point into it, so a new one would take memory in addition.
            ring, self._ring, self._own = self._ring, [], {}
            self._own = {layer: self._make_buffer(self._layers[layer].num_bytes) for layer in resident}
            if len(resident) < self.num_layers:
                self._ring = ring or self._new_ring()

    def _new_ring(self) -> list[Tensor]:
        ring = [self._make_buffer(self.buffer_bytes) for _ in range(min(NUM_BUFFERS, self.num_layers))]
        for buffer in ring:
            buffer.zero_()  # allocates the pages now, so that memory left for other uses is known
        return ring

    def is_ready(self, layer: int) -> bool:
        """Return whether `acquire` would not have to wait."""
        with self._changed:
            if layer in self._is_filled:
                return True
            first = self._queue[0] if self._queue else None
            return first is not None and first.layer == layer and not first.num_left and first.error is None

    def acquire(self, layer: int) -> None:
        """Wait until the layer's weights are in memory, and make the layer compute with them.

        Raises:
            WeightsError: The weights cannot be read. The next pass reads again.
        """
        try:
            self._acquire(layer)
        except BaseException:
            self._restart()
            raise

    def _acquire(self, layer: int) -> None:
        if self._is_closed:
            raise WeightsError("weights: the model was shut down; load it again")
        if layer not in self._is_filled:
            entry = self._wait(layer)
            if entry.error is not None:  # the read may have failed long ago, and its cause may be gone
                self._restart(layer)
                entry = self._wait(layer)
                if entry.error is not None:
                    raise entry.error
            self._layers[layer].bind(entry.buffer)
        self._layers[layer].check()

    def _wait(self, layer: int) -> _Entry:
        self._waits_since = time.perf_counter()
        try:
            return self._await(layer)
        finally:
            with self._changed:
                self._seconds_waiting += time.perf_counter() - self._waits_since
                self._waits_since = None

    def _await(self, layer: int) -> _Entry:
        with self._changed:
            is_expected = self._queue[0].layer == layer if self._queue else self._next_missing() == layer
        if not is_expected or self._is_paused:
            self._restart(layer)
        with self._changed:
            self._start()
            self._is_paused = False
            self._changed.notify_all()
            while not self._queue or (self._queue[0].num_left and self._queue[0].error is None):
                if self._is_closed:
                    raise WeightsError("weights: the model was shut down; load it again")
                self._changed.wait()
            entry = self._queue[0]
            assert entry.layer == layer
            return entry

    def release(self, layer: int) -> None:
        """Mark the layer as computed, so that its buffer may be filled with another."""
        with self._changed:
            if layer in self._is_filled or self._is_closed:
                return
            entry = self._queue.popleft()
            assert entry.layer == layer
            if layer in self._own:
                self._is_filled.add(layer)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads, and release buffers and files. The stream cannot be used afterwards."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads = []
        self._queue.clear()
        self._ring, self._own, self._is_filled = [], {}, set()
        self._close()

    def _restart(self, layer: int = 0) -> None:
        """Discard what was read ahead. `layer` is read next, when a pass asks for it."""
        with self._changed:
            self._is_paused = True
            while self._num_busy:
                self._changed.wait()
            self._queue.clear()
            self._next = layer

    def _start(self) -> None:
        while len(self._threads) < NUM_READERS:  # an interrupt may have come between two
            thread = threading.Thread(target=self._read, name=f"weights-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _read(self) -> None:
        """Read chunks until the stream is closed; runs in each reader thread."""
        compute_alone()
        scratch = Scratch()
        while (job := self._take()) is not None:
            entry, chunk = job
            num_read, error = 0, None
            try:
                num_read = chunk(scratch)
            except Exception as failure:
                error = failure
            with self._changed:
                self.bytes_read += num_read
                self._num_busy -= 1
                if not self._num_busy:
                    self._seconds_reading += time.perf_counter() - self._busy_since
                entry.num_left -= 1
                entry.error = entry.error or error
                # Wake other threads only for what they wait for: a complete layer, an error, or no read in progress.
                if not entry.num_left or entry.error is not None or not self._num_busy:
                    self._changed.notify_all()

    def _take(self) -> tuple[_Entry, Chunk] | None:
        """Return the next chunk as soon as there is one, or None after the stream is closed."""
        with self._changed:
            while not self._is_closed:
                entry = None if self._is_paused else self._unfinished()
                if entry is not None:
                    if not self._num_busy:
                        self._busy_since = time.perf_counter()
                    self._num_busy += 1
                    return entry, entry.chunks.popleft()
                self._changed.wait()
            return None

    def _unfinished(self) -> _Entry | None:
        """Return the first layer with chunks left to read, if there is a buffer for it."""
        if any(entry.error is not None for entry in self._queue):
            return None
        for entry in self._queue:
            if entry.chunks:
                return entry
        layer = self._next_missing()
        if layer is None:
            return None
        buffer = self._own.get(layer)
        if buffer is None:
            used = {entry.buffer.data_ptr() for entry in self._queue}
            buffer = next((one for one in self._ring if one.data_ptr() not in used), None)
        if buffer is None:
            return None
        entry = _Entry(layer, buffer, self._layers[layer].chunks(buffer))
        self._queue.append(entry)
        self._next = (layer + 1) % self.num_layers
        return entry

    def _next_missing(self) -> int | None:
        """Return the layer to read after those of the queue, or None if no layer is missing."""
        coming = {entry.layer for entry in self._queue if entry.layer in self._own}
        for i in range(self.num_layers):
            layer = (self._next + i) % self.num_layers
            if layer not in self._is_filled and layer not in coming:
                return layer
        return None
