"""Compilation of the kernels of whole programs before they run, several at a time.

Triton compiles a kernel when it is first launched, for about a second, on one core. A server's programs need dozens. So
they run once with their launches left out, which only finds out what is to be compiled. PyTorch's operations do run.
New memory is zero meanwhile, because what kernels would have written may be used as an index.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

from specinfer.core.systems import usable_cpus

_MAX_THREADS = 16  # each may run an assembler, which takes some hundred MiB
_LOCK = threading.Lock()
_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
}  # fmt: skip


class Zeros(TorchDispatchMode):
    """A mode in which new memory is zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _ALLOCATIONS else result


class _Pool(ThreadPoolExecutor):
    """Threads, and what they were asked to do."""

    def __init__(self) -> None:
        super().__init__(min(usable_cpus(), _MAX_THREADS), "specinfer-compiler")
        self.futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.futures.append(super().submit(fn, *args, **kwargs))
        return self.futures[-1]


@contextmanager
def compiling(progress: Callable[[int, int], None] | None = None, *, ignore_errors: bool = True) -> Iterator[None]:
    """Compile, until the context ends, what this thread would launch, and leave out its launches.

    Other threads launch as usual.

    Args:
        progress: Callback with the numbers of compiled kernels and of all.
        ignore_errors: Whether a kernel that cannot be compiled raises only when it is launched, not here.
    """
    thread = threading.get_ident()
    with _LOCK, _Pool() as pool, AsyncCompileMode(pool, ignore_errors=ignore_errors):
        run = JITFunction.run

        def compile_here(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return run(self, *args, grid=grid, warmup=warmup or threading.get_ident() == thread, **options)

        JITFunction.run = compile_here
        try:
            with Zeros():
                yield
        except BaseException:
            for future in pool.futures:
                future.cancel()
            raise
        finally:
            JITFunction.run = run
        for done, _ in enumerate(as_completed(pool.futures)):
            if progress is not None:
                progress(done + 1, len(pool.futures))
