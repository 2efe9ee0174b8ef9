"""Programs over static buffers, and their captured form: one launch of a CUDA graph in place of hundreds of kernels.

A program reads and writes tensors that were made before it and stay where they are; nothing in it depends on their
contents but values: no shape, no branch, no wait for the device. What it makes itself lies in memory that all programs
of a `Graphs` share, and is overwritten when any other of them runs.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TypeAlias

import torch

from specinfer.model.graphs.waits import Waits, WaitsError

logger = logging.getLogger(__name__)

# Its results are what it has written to static buffers.
Program: TypeAlias = Callable[[], None]
_WARM_UPS = 2  # the first run compiles kernels and makes workspaces, which must not happen in a capture


class CaptureError(Exception):
    """A program does what cannot be captured, such as waiting for the device."""


class Graphs:
    """Captures the programs of one device.

    All share a stream to be captured on, and a memory pool: so they take as much as the largest, and no two of them may
    run at the same time. They are replayed on the current stream, and order themselves among what else is on it.

    Args:
        captures: On a GPU, whether programs are captured; elsewhere they never are, and run as they are written.
    """

    def __init__(self, device: torch.device, *, captures: bool = True) -> None:
        self.captures = captures and device.type == "cuda"
        self.num_captured = 0
        self.seconds = 0.0  # spent on captures
        self._device = device
        self._stream = torch.cuda.Stream(device) if self.captures else None
        self._broken: list[torch.cuda.CUDAGraph] = []  # PyTorch may still ask them whose memory a stream's is
        if self._stream is not None:
            with torch.inference_mode(mode=False):
                self._nothing = torch.zeros(1, device=device)
            self._open_pool()

    def captured(self, program: Program) -> Program:
        """The same program as one launch; where nothing is captured, itself.

        It is run with what its buffers hold now: they must be such that this does no harm.

        Raises:
            CaptureError: It cannot be captured; nothing else is the matter.
        """
        stream = self._stream
        if stream is None:
            return program
        started = time.perf_counter()
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(stream), torch.inference_mode():
                self._warm_up(program)
                stream.synchronize()
                self._capture(graph, program)
        finally:
            current.wait_stream(stream)
        self.num_captured += 1
        self.seconds += time.perf_counter() - started
        replay: Program = graph.replay
        return replay

    def wait(self) -> None:
        """Until the device has run all that it was asked for."""
        if self.captures:
            torch.cuda.synchronize(self._device)

    def held_bytes(self) -> int:
        """What PyTorch holds of the device's memory, once unused parts are given back; 0 where nothing is captured."""
        if not self.captures:
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def _warm_up(self, program: Program) -> None:
        for _ in range(_WARM_UPS - 1):
            program()
        try:
            with Waits():  # told before a capture breaks on it
                program()
        except WaitsError as error:
            raise CaptureError(str(error)) from error

    def _capture(self, graph: torch.cuda.CUDAGraph, program: Program) -> None:
        try:
            self._begin(graph)
            program()
            graph.capture_end()
        except BaseException as error:
            self._break_off(graph)
            if isinstance(error, RuntimeError):
                raise CaptureError(str(error).partition("\n")[0]) from error
            raise

    def _begin(self, graph: torch.cuda.CUDAGraph) -> None:
        # What PyTorch's generator then makes for all graphs of the process others may write to in any mode.
        with torch.inference_mode(mode=False):
            # Other threads may go on using the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _open_pool(self) -> None:
        """Memory for captures to come. PyTorch gives a pool up once no graph uses it: one of next to nothing does."""
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper = torch.cuda.CUDAGraph()
        assert self._stream is not None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._nothing.add_(0)  # loads the kernel
            self._stream.synchronize()
            self._begin(self._keeper)
            self._nothing.add_(0)
            self._keeper.capture_end()

    def _break_off(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that failed, or the stream would be of no use any more.

        An end that fails leaves PyTorch's allocators and its generator as in a capture: others get another pool, and
        the capture that opens it ends well, which puts the generator right.
        """
        self._broken.append(graph)
        try:
            graph.capture_end()
        except RuntimeError:  # mostly: it has ended, or was made void
            logger.debug("a capture that failed could not be ended in order", exc_info=True)
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with contextlib.suppress(AttributeError, RuntimeError):  # PyTorch's own, and it may have been done
            torch._C._cuda_endAllocateToPool(index, self._pool)
        try:
            self._open_pool()
        except RuntimeError:
            logger.warning("nothing is captured any more, since a capture failed", exc_info=True)
            self._stream = None


def make_graphs(device: torch.device, *, enforce_eager: bool = False) -> Graphs | None:
    """Of everything that runs on a GPU; None: passes run as they come, as they do on a CPU."""
    return Graphs(device) if device.type == "cuda" and not enforce_eager else None
