"""Captures on a GPU that is made up: what PyTorch keeps between them, and what it may leave of one that failed."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specinfer.model.graphs import capture
from specinfer.model.graphs import capture as synchronization
from specinfer.model.graphs.capture import CaptureError, Graphs, SynchronizationCheck, SynchronizationError, make_graphs

GPU = torch.device("cuda", 0)


class Gpu:
    """State that all captures of a process share."""

    def __init__(self) -> None:
        self.uses: Counter[tuple[int, int]] = Counter()  # graphs of each pool
        self.recording: set[tuple[int, int]] = set()  # pools
        self.is_capturing = self.is_void = self.generator_captures = False
        self.num_begun = 0
        self.num_unused = 0  # bytes that PyTorch keeps of earlier work, which no capture can take
        self.calls: list[str] = []

    def break_capture(self) -> None:
        """As an operation that is not permitted does."""
        if self.is_capturing:
            self.is_void = True
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    def free_unused(self) -> None:
        assert not self.is_capturing
        self.num_unused = 0


class FakeGraph:
    gpu: Gpu  # of the test

    def __init__(self) -> None:
        self.gpu = self.gpu
        self.pool: tuple[int, int] | None = None
        self.is_ended = False

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        gpu = self.gpu
        assert capture_error_mode == "thread_local"
        assert not torch.is_inference_mode_enabled(), "what is made now is written to outside of it, too"
        if pool in gpu.recording:
            raise RuntimeError("already recording to pool_id")
        if gpu.uses.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.pool = pool
        gpu.num_begun += 1
        gpu.uses[pool] += 1
        gpu.recording.add(pool)
        gpu.is_capturing = gpu.generator_captures = True

    def capture_end(self) -> None:
        gpu = self.gpu
        if not gpu.is_capturing:
            raise RuntimeError("operation not permitted")
        gpu.is_capturing = False
        if gpu.is_void:
            gpu.is_void = False
            raise RuntimeError("operation failed due to a previous error during capture")
        assert self.pool is not None
        gpu.recording.remove(self.pool)
        gpu.generator_captures, self.is_ended = False, True

    def replay(self) -> None:
        assert self.is_ended

    def __del__(self) -> None:
        if self.is_ended:
            assert self.pool is not None
            self.gpu.uses[self.pool] -= 1


class FakeStream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def wait_stream(self, other: "FakeStream") -> None:
        self.gpu.calls.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        assert not self.gpu.is_capturing


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    handles = ((0, number) for number in range(100))
    monkeypatch.setattr(FakeGraph, "gpu", gpu, raising=False)
    for name, value in {
        "CUDAGraph": FakeGraph,
        "Stream": lambda _: FakeStream(gpu, "capture"),
        "current_stream": lambda _: FakeStream(gpu, "current"),
        "graph_pool_handle": lambda: next(handles),
        "empty_cache": gpu.free_unused,
        "device": lambda _: contextlib.nullcontext(),
        "stream": lambda _: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda count, device: torch.ones(count))
    yield gpu
    assert not gpu.is_capturing


def _nothing() -> None:
    pass


def test_after_a_capture_that_broke_others_go_well(gpu: Gpu) -> None:
    graphs = Graphs(GPU)
    before = graphs.captured(_nothing)
    with pytest.raises(CaptureError, match=r"^operation not permitted when stream is capturing$"):
        graphs.captured(gpu.break_capture)
    assert not gpu.generator_captures, "random numbers can be drawn again"
    before()
    graphs.captured(_nothing)()
    assert graphs.num_captured == 2


@pytest.mark.parametrize("num_needed", [80, 120])
def test_a_capture_gets_the_memory_that_its_warm_up_leaves(gpu: Gpu, num_needed: int) -> None:
    """If that does not suffice, the same pool serves smaller programs."""

    def program() -> None:
        if not gpu.is_capturing:
            gpu.num_unused = num_needed
        elif num_needed + gpu.num_unused > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = Graphs(GPU)
    if num_needed > 100:
        with pytest.raises(torch.OutOfMemoryError):
            graphs.captured(program)
    else:
        graphs.captured(program)()
    graphs.captured(_nothing)()
    assert len(gpu.uses) == 1
    assert not gpu.generator_captures


def test_a_capture_that_begins_again_has_the_memory_of_the_first_attempt(gpu: Gpu) -> None:
    """While its error is handled, the frames of the error hold what the program has computed."""
    results = list[weakref.ref[torch.Tensor]]()

    def program() -> None:
        if gpu.is_capturing:
            result = torch.ones(1)
            results.append(weakref.ref(result))
            if len(results) == 1 or results[0]() is not None:
                raise torch.OutOfMemoryError("CUDA out of memory")

    Graphs(GPU).captured(program)()


def test_a_device_that_captures_nothing_is_warned_of(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: operation not supported\nmore of it")

    monkeypatch.setattr(FakeGraph, "capture_begin", fails)
    assert make_graphs(GPU) is None
    assert caplog.messages == ["nothing is captured on cuda:0: CUDA error: operation not supported"]


def test_what_is_not_of_the_device_is_not_hidden(gpu: Gpu) -> None:
    def interrupted() -> None:
        if gpu.is_capturing:
            raise KeyboardInterrupt

    graphs = Graphs(GPU)
    with pytest.raises(KeyboardInterrupt):
        graphs.captured(interrupted)
    graphs.captured(_nothing)()


def test_a_capture_that_cannot_begin_is_reported(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then none can, and programs are run as they are."""
    graphs = Graphs(GPU)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(FakeGraph, "capture_begin", fails)
    with pytest.raises(CaptureError, match="no memory"):
        graphs.captured(_nothing)
    assert graphs.captured(_nothing) is _nothing


def test_another_thread_waits_for_its_programs_during_a_capture(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the thread that drafts, next to that of a rank. CUDA lets nobody wait for a whole device meanwhile."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: gpu.break_capture())
    of_passes, of_drafts, waited = Graphs(GPU), Graphs(GPU), list[str]()
    of_drafts.captured(_nothing)()
    monkeypatch.setattr(FakeStream, "synchronize", lambda stream: waited.append(stream.name))

    def program() -> None:
        if gpu.is_capturing:
            waited.clear()
            with ThreadPoolExecutor(1) as other:
                other.submit(of_drafts.wait).result()

    of_passes.captured(program)()
    assert waited == ["current"]


def test_a_pool_stays_when_no_program_uses_it(gpu: Gpu) -> None:
    """As between a model that does not agree, whose captures are let go, and the next."""
    graphs = Graphs(GPU)
    run = graphs.captured(_nothing)
    del run
    graphs.captured(_nothing)()


def test_what_waits_is_refused_before_a_capture(gpu: Gpu) -> None:
    graphs, x, calls = Graphs(GPU), torch.ones(3), list[int]()
    before = gpu.num_begun

    def waits() -> None:
        calls.append(1)
        x.sum().item()

    with pytest.raises(CaptureError, match="item waits for the device"):
        graphs.captured(waits)
    assert gpu.num_begun == before
    assert gpu.calls[-1] == "current waits for capture", "warm-ups may still run"
    assert len(calls) == 2


class _Kernel:
    """As Triton's, with a record of whether each launch only compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        jit = pytest.importorskip("triton.runtime.jit")
        self.only_compiled: list[bool] = []
        monkeypatch.setattr(jit.JITFunction, "run", lambda *_, grid, warmup: self.only_compiled.append(warmup))
        self._launcher, self._run = jit.JITFunction, jit.JITFunction.run

    def launch(self) -> None:
        self._launcher.run(self, grid=(1,), warmup=False)

    @property
    def is_as_before(self) -> bool:
        return bool(self._launcher.run is self._run)


def test_kernels_of_programs_are_compiled_and_not_launched(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that other threads launch meanwhile are launched."""
    monkeypatch.setattr(capture, "why_not_on", lambda _: None)
    graphs, kernel, made = Graphs(GPU), _Kernel(monkeypatch), list[torch.Tensor]()

    def program() -> None:
        kernel.launch()
        made.append(torch.empty(1000))
        with ThreadPoolExecutor() as other:
            other.submit(kernel.launch).result()

    graphs.compile([program])
    assert kernel.only_compiled == [True, False]
    assert not made[0].any()
    assert kernel.is_as_before
    assert gpu.num_begun == 1, "of the pool alone"
    assert gpu.calls == ["capture waits for current", "current waits for capture"]


def test_a_program_that_fails_without_its_kernels_can_be_captured(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "why_not_on", lambda _: None)
    graphs, kernel = Graphs(GPU), _Kernel(monkeypatch)

    def program() -> None:
        kernel.launch()
        if kernel.only_compiled[-1]:
            raise IndexError

    graphs.compile([program, program])
    assert kernel.only_compiled == [True]
    assert kernel.is_as_before
    graphs.captured(program)()


def test_two_threads_compile_one_after_the_other(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "why_not_on", lambda _: None)
    kernel, is_inside, may_leave = _Kernel(monkeypatch), Event(), Event()

    def waits() -> None:
        kernel.launch()
        is_inside.set()
        assert may_leave.wait(10)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(Graphs(GPU).compile, [waits])
        assert is_inside.wait(10)
        second = threads.submit(Graphs(GPU).compile, [kernel.launch])
        may_leave.set()
        for done in (first, second):
            done.result()
    assert kernel.only_compiled == [True, True]
    assert kernel.is_as_before


def test_without_triton_nothing_is_compiled(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "why_not_on", lambda _: "it is not installed")
    Graphs(GPU).compile([lambda: pytest.fail("it ran")])


THERE = {"device": "meta"}  # any that is not the host


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.max().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: x.to("meta"),
        lambda x: torch.ones(3, **THERE).copy_(x),
        lambda _: torch.ops.aten.lift_fresh(torch.ones(3, **THERE)),
    ],
)
def test_what_waits_is_seen(waits: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(SynchronizationError), torch.inference_mode(), SynchronizationCheck():
        waits(torch.ones(3))


@pytest.mark.parametrize(
    ("cuda", "capability", "dtype", "waits"),
    [
        ("12.8", (9, 0), torch.bfloat16, False), ("13.0", (10, 3), torch.bfloat16, False),
        ("12.8", (9, 0), torch.float16, True), ("12.8", (8, 0), torch.bfloat16, True),
        ("13.0", (12, 0), torch.bfloat16, True), ("13.3", (12, 0), torch.bfloat16, False),
        (None, (9, 4), torch.bfloat16, False),
    ],
)  # fmt: skip
def test_products_of_groups_wait_where_pytorch_has_no_kernel_for_them(
    cuda: str | None, capability: tuple[int, int], dtype: torch.dtype, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of experts on most GPUs: a capture would break, since the sizes are read inside of the operation."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    rows = SimpleNamespace(is_cuda=True, dtype=dtype, device=GPU)
    assert synchronization._synchronizes(torch.ops.aten._grouped_mm.default, (rows,), {}) == waits


def test_what_does_not_wait_is_let_through() -> None:
    x, rows = torch.ones(3), torch.tensor([2, 0])
    with torch.inference_mode(), SynchronizationCheck():
        assert x[rows].shape == (2,)
        assert x[:2].repeat_interleave(rows, output_size=2).shape == (2,)
        assert x.double().argmax().shape == ()
        x.copy_(x * 2)
        torch.ones(3, **THERE).copy_(x, non_blocking=True)
        torch.tensor([1, 2])
    assert x.tolist() == [2, 2, 2]
