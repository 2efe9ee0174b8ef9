"""What is asked of CUDA for layers that are streamed; CUDA itself is made up."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from specinfer.core.errors import ModelError
from specinfer.model.offload import transfer
from specinfer.model.offload.direct import pages
from specinfer.model.offload.transfer import CudaTransfer

GPU = torch.device("cuda", 1)


class Cuda:
    """A machine with two GPUs, of which each thread has one as its current one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pin_code, self.last_error = 0, 0
        self.calls: list[tuple[str, int]] = []  # with the current GPU
        self._current = threading.local()
        patch.setattr(torch.cuda, "device", self._device)
        patch.setattr(torch.cuda, "Stream", Mock())
        patch.setattr(torch, "ones", self._launch)
        patch.setattr(
            torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=self._pin, cudaHostUnregister=self._unpin)
        )
        for name, result in (("synchronize", None), ("query", True)):
            patch.setattr(torch.cuda.Event, name, lambda _, name=name, result=result: self._call(name, result))
        patch.setattr(transfer._CudaEvent, "__new__", lambda kind, **_: object.__new__(kind))
        patch.setattr(transfer._CudaEvent, "__init__", lambda *_, **__: None)
        patch.setattr(transfer._CudaEvent, "record", lambda *_: None)
        patch.setattr(transfer._CudaEvent, "device", GPU, raising=False)
        patch.setattr(torch.cuda, "current_stream", lambda _: None)

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        before, self._current.index = getattr(self._current, "index", 0), device.index
        yield
        self._current.index = before

    def _call(self, name: str, result: Any) -> Any:
        self.calls.append((name, getattr(self._current, "index", 0)))
        return result

    def _pin(self, *_: int) -> int:
        self.last_error = self.pin_code
        return int(self._call("pin", self.pin_code))

    def _unpin(self, *_: int) -> int:
        return int(self._call("unpin", 0))

    def _launch(self, *_: Any, **__: Any) -> None:
        """As PyTorch, which asks for the last error of this thread after each launch."""
        if self.last_error:
            self.last_error = 0
            raise RuntimeError("CUDA error: out of memory")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_all_threads_ask_the_gpu_that_layers_are_streamed_to(cuda: Cuda) -> None:
    """Asked by a thread with another current one, CUDA takes hundreds of MiB there, which it may not have."""
    link, memory = CudaTransfer(GPU), pages(4096)
    event: Any = link.record()

    def use() -> None:
        link.pin(memory)
        event.synchronize()
        assert event.query()
        link.unpin(memory)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert cuda.calls == [(name, GPU.index) for name in ("pin", "synchronize", "query", "unpin")]


def test_memory_that_cannot_be_pinned_is_no_error_of_what_is_launched_next(cuda: Cuda) -> None:
    cuda.pin_code = 2
    with pytest.raises(ModelError, match=r"cannot be pinned \(CUDA error 2\); raise memory_budget"):
        CudaTransfer(GPU).pin(pages(4096))
    torch.ones(1, device=GPU)
