"""Capture of programs over static buffers as CUDA graphs: one launch in place of hundreds of kernels.

A program reads and writes tensors that exist before it, at fixed addresses. It must not depend on their contents in
shapes or branches, and must not wait for the device. Tensors that it allocates are in memory that all programs of a
`Graphs` share, and are overwritten when another of them runs.
"""

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specinfer.core.errors import first_line
from specinfer.ops.triton import why_not_on
from specinfer.parallel.rank_sums import RankSums, instead_of_sums

logger = logging.getLogger(__name__)

# The results are what it writes to static buffers.
Program: TypeAlias = Callable[[], None]
_WARM_UPS = 2  # the first run compiles kernels and allocates workspaces, which a capture must not do


class CaptureError(Exception):
    """Error for a program that cannot be captured, for example because it waits for the device."""


class Graphs:
    """The captured programs of one device.

    All programs share one capture stream and one memory pool. They take as much memory as the largest needs, and no two
    may run at the same time. Graphs are replayed on the current stream, in order with its other work.

    Args:
        captures: Whether to capture programs on a GPU. On other devices, programs always run uncaptured.

    Attributes:
        num_programs: Runs of programs that took longer than those to come will: with captures, also those that failed,
            and before a capture.
        times: Seconds that each capture took.
    """

    def __init__(self, device: torch.device, *, captures: bool = True) -> None:
        self.captures = captures and device.type == "cuda"
        self.num_programs = self.num_captured = 0
        self.times: list[float] = []
        self._device = device
        self._stream = torch.cuda.Stream(device) if self.captures else None
        self._broken: list[torch.cuda.CUDAGraph] = []  # kept, because PyTorch may still query them
        if self._stream is not None:
            with torch.inference_mode(mode=False):
                self._nothing = torch.zeros(1, device=device)
            self._open_pool()

    def captured(self, program: Program, sums: RankSums | None = None) -> Program:
        """Return the program captured as one launch, or the program itself where nothing is captured.

        The capture runs the program on the current contents of its buffers, so these must be harmless.

        Args:
            sums: Sums over ranks in the program: it becomes a launch between any two of them. No rank waits for another
                during the capture.

        Raises:
            CaptureError: The program cannot be captured. It can still run uncaptured.
            torch.OutOfMemoryError: There is no memory for it; smaller programs may still be captured.
        """
        stream = self._stream
        self.num_programs += 1
        if stream is None:
            return program
        started = time.perf_counter()
        with self._running_on(stream):
            with instead_of_sums(sums):
                self._warm_up(program)
            stream.synchronize()
            captured = None
            with contextlib.suppress(torch.OutOfMemoryError):
                captured = self._capture(program, sums)
            if captured is None:  # the error is gone, and with it what its frames held
                torch.cuda.empty_cache()  # a capture cannot take the memory that is kept of the warm-up
                captured = self._capture(program, sums)
            graphs, summed = captured
        self.num_captured += 1
        self.times.append(time.perf_counter() - started)
        if sums is None:
            replay: Program = graphs[0].replay
            return replay
        return partial(_replay, graphs, summed, sums)

    def compile(
        self,
        programs: Iterable[Callable[[], object]],
        sums: RankSums | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile the kernels of programs that are to be captured, several at a time, on a GPU with Triton.

        The programs run once without their kernels, whose results are zero. So their buffers must be harmless, as for a
        capture, and no request may have state that they write.

        Args:
            sums: As for `captured`.
            progress: Callback with the numbers of compiled kernels and of all.
        """
        stream = self._stream
        if stream is None or why_not_on(self._device) is not None:
            return
        try:
            from specinfer.ops.triton.compilation import compiling

            with self._running_on(stream), compiling(progress), instead_of_sums(sums):
                for program in programs:
                    program()
        except Exception:  # a program that cannot run may raise any type, and its capture reports it
            logger.debug("not all kernels could be compiled before the captures", exc_info=True)

    @contextlib.contextmanager
    def _running_on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Run programs on another stream within the context, in order with the work of the current one."""
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(stream), torch.inference_mode():
                yield
        finally:
            current.wait_stream(stream)

    @property
    def median_seconds(self) -> float:
        """Usual time of a capture; 0 before the first, and where nothing is captured."""
        return statistics.median(self.times) if self.times else 0.0

    def wait(self) -> None:
        """Wait until the programs that were run have ended."""
        if self.captures:  # not for the whole device: CUDA forbids that while another thread captures
            torch.cuda.current_stream(self._device).synchronize()

    def reserved_bytes(self) -> int:
        """Return the device bytes that PyTorch reserves, without unused ones; 0 where nothing is captured."""
        if not self.captures:
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def _warm_up(self, program: Program) -> None:
        for _ in range(_WARM_UPS - 1):
            program()
        try:
            with SynchronizationCheck():  # raises before a capture would break
                program()
        except SynchronizationError as error:
            raise CaptureError(str(error)) from error

    def _capture(self, program: Program, sums: RankSums | None) -> tuple[list[torch.cuda.CUDAGraph], list[Tensor]]:
        """Return the program as graphs, and what is summed between any two of them."""
        graphs, summed = [torch.cuda.CUDAGraph()], list[Tensor]()

        def cut(tensor: Tensor) -> None:
            graphs[-1].capture_end()
            graphs.append(torch.cuda.CUDAGraph())
            summed.append(tensor)
            self._begin(graphs[-1])

        try:
            self._begin(graphs[0])
            with instead_of_sums(sums, cut):
                program()
            graphs[-1].capture_end()
        except BaseException as error:
            self._break_off(graphs[-1])
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                raise CaptureError(first_line(error)) from error
            raise
        return graphs, summed

    def _begin(self, graph: torch.cuda.CUDAGraph) -> None:
        # PyTorch's generator allocates state here for all graphs of the process; others may write to it in any mode.
        with torch.inference_mode(mode=False):
            # Other threads may go on using the device.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _open_pool(self) -> None:
        """Open a memory pool for captures, and keep it alive by a tiny graph: PyTorch frees a pool without graphs."""
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
        """End a capture that failed; otherwise the stream could not be used any more.

        An end that fails leaves PyTorch's allocators and its generator in capture mode. So later programs get another
        pool, and the capture that opens it ends well, which resets the generator.
        """
        try:
            graph.capture_end()
            return  # as without memory; what was captured of the program is free again
        except RuntimeError:  # usually because it has ended or was invalidated
            logger.debug("a capture that failed could not be ended in order", exc_info=True)
        self._broken.append(graph)
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with contextlib.suppress(AttributeError, RuntimeError):  # private in PyTorch; may already have run
            torch._C._cuda_endAllocateToPool(index, self._pool)
        try:
            self._open_pool()
        except RuntimeError:
            logger.warning("nothing is captured any more, since a capture failed", exc_info=True)
            self._stream = None


def _replay(graphs: Sequence[torch.cuda.CUDAGraph], summed: Sequence[Tensor], sums: RankSums) -> None:
    for graph, tensor in zip(graphs, summed, strict=False):
        graph.replay()
        sums.complete(tensor)
    graphs[-1].replay()


def make_graphs(device: torch.device, *, enforce_eager: bool = False) -> Graphs | None:
    """Return the graphs of a device, or None where passes run uncaptured, as on a CPU."""
    if device.type != "cuda" or enforce_eager:
        return None
    try:
        return Graphs(device)
    except RuntimeError as error:
        logger.warning("nothing is captured on %s: %s", device, first_line(error))
        return None


# Operations whose result the host must read: a number, or the size of a result.
_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
# Products of groups of rows with a matrix each, as experts are computed; PyTorch's has kernels for bfloat16 on Hopper
# and Blackwell (compute capability 9 and 10). Otherwise it loops over groups, whose sizes the host reads, until cuBLAS
# of CUDA 13.3 or later takes its place.
_GROUPED, _GROUPED_LOOP = "_grouped_mm", "grouped_mm_fallback"
_WITH_KERNELS, _WITH_CUBLAS = (9, 10), (13, 3)


class SynchronizationError(Exception):
    """Error for a program that waits for the device."""


class SynchronizationCheck(TorchDispatchMode):
    """A mode that refuses operations of this thread that make the host wait for the device.

    A capture that breaks on such an operation leaves state in PyTorch that not all versions remove.

    Raises:
        SynchronizationError: The program reached such an operation, which is not run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _synchronizes(func, args, kwargs):
            raise SynchronizationError(f"{func.overloadpacket.__name__} waits for the device")
        with self:  # in inference mode, a composite operation arrives as a whole
            result = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _synchronizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = func.overloadpacket.__name__
    if name in (_GROUPED, _GROUPED_LOOP):  # they read the sizes where this mode does not see it
        rows: Tensor = args[0]
        return rows.is_cuda and (name == _GROUPED_LOOP or _loops_over_groups(rows.dtype, rows.device))
    if name == "index":  # a mask index counts its true elements
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name in ("copy_", "_to_copy"):
        source, place = (args[1], args[0].device) if name == "copy_" else (args[0], kwargs.get("device"))
        is_asynchronous = kwargs.get("non_blocking", len(args) > 2 and args[2])
        return place is not None and source.device.type != place.type and not is_asynchronous
    if name == "lift_fresh":  # from torch.tensor, whose numbers are on the host
        tensor: Tensor = args[0]
        return tensor.device.type != "cpu"
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return not _TAGS.isdisjoint(func.tags)


def _loops_over_groups(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether PyTorch computes products of groups one after the other."""
    version = torch.version.cuda
    if version is None or tuple(map(int, version.split(".")[:2])) >= _WITH_CUBLAS:
        return False
    return dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in _WITH_KERNELS
