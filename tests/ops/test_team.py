"""Threads of the native kernels: the same bits with any number of them, and nobody waits for one that has no core."""

import ctypes
import importlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.process import busy_neighbours
from native_layers import paired_call
from specinfer.ops import AttentionCall, FlatPieces, LinearCall, NativePieces, Panels, norm, quantize

LIBRARY = importlib.import_module("specinfer.ops.cpu.library")  # the package has a function of its name
KERNELS = Path(str(LIBRARY.__file__)).parent
HIDDEN, HEADS, KV_HEADS, DIM, INNER = 256, 8, 2, 32, 640
Threads = Callable[[int], None]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """Sets how many threads native code computes with, whatever this machine has; PyTorch keeps its own."""

    def use(number: int) -> None:
        monkeypatch.setattr(LIBRARY, "_cpus", lambda _: number)
        monkeypatch.setattr(torch, "get_num_threads", lambda: number)

    return use


def linear(outputs: int, inputs: int, source: torch.Generator) -> LinearCall:
    weight = torch.randn((outputs, inputs), generator=source) / inputs**0.5
    return LinearCall(Panels.from_weight(weight.bfloat16()))


def pack(weight: Tensor, kind: torch.dtype | int) -> Panels:
    """In a type, or rounded to so many bits."""
    if not isinstance(kind, int):
        return Panels.from_weight(weight.to(kind))
    rounded = quantize(weight, kind)
    return Panels.from_codes(rounded)


def layer_pass(rows: int, context: int = 50) -> Tensor:
    """Hidden states [rows, HIDDEN] of a chain of tokens after `context` others and one decoder layer."""
    source = torch.Generator().manual_seed(0)
    sizes = (((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    qkv, output, gated, down = (linear(*size, source) for size in sizes)
    layer = paired_call((qkv, output, gated, down), (torch.ones(HIDDEN), torch.ones(HIDDEN)), 1e-5)
    keys, values = torch.randn((2, context + rows, KV_HEADS, DIM), generator=source)
    attention = AttentionCall(keys, values, HEADS, DIM**-0.5, rotated=DIM)
    angles = torch.rand((context + rows, DIM), generator=source)
    new, slots = torch.arange(context, context + rows), np.arange(context + rows)
    counts = (np.array([number]) for number in (rows, context, rows))
    pieces = NativePieces(FlatPieces(*counts, slots, slots, np.tri(rows, dtype=bool).ravel(), new, new))
    hidden = torch.randn((rows, HIDDEN), generator=source)
    layer((attention, None), pieces, angles.cos(), angles.sin(), hidden)
    return hidden


@pytest.mark.parametrize(("rows", "context"), [(1, 50), (5, 50), (40, 50), (1, 1800), (5, 1800), (200, 700)])
def test_a_layer_is_the_same_to_the_bit_with_any_number_of_threads(rows: int, context: int, threads: Threads) -> None:
    threads(1)
    alone, running = layer_pass(rows, context), len(os.listdir("/proc/self/task"))
    assert alone.isfinite().all()
    for number in (2, 3):
        threads(number)
        for _ in range(5):  # chunks fall to threads by chance
            assert torch.equal(layer_pass(rows, context), alone)
    assert len(os.listdir("/proc/self/task")) >= min(running, 3)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, 8, 4])
@pytest.mark.parametrize("rows", [1, 33, 700])
def test_a_product_is_the_same_to_the_bit_with_any_number_of_threads_and_rows(
    kind: torch.dtype | int, rows: int, threads: Threads
) -> None:
    """Several panels take turns on a part of the activations of 512 rows, then of the others."""
    source = torch.Generator().manual_seed(0)
    weight, x = torch.randn((1000, 1100), generator=source), torch.randn((rows, 1100), generator=source)
    results = []
    for number in (1, 2, 3):
        threads(number)
        panels = pack(weight, kind)
        call = LinearCall(panels)
        results.append((call(x), panels.unpack() if not isinstance(kind, int) else x))
        assert torch.equal(call(x[-1:]), results[-1][0][-1:])
    for result, unpacked in results[1:]:
        assert torch.equal(result, results[0][0])
        assert torch.equal(unpacked, results[0][1])


def test_a_norm_is_the_same_to_the_bit_with_any_number_of_threads(threads: Threads) -> None:
    x = torch.randn((100, 70), generator=torch.Generator().manual_seed(0))
    results = []
    for number in (1, 2, 3):
        threads(number)
        results.append(norm(x, torch.ones(70), 1e-6))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_passes_next_to_busy_processes_end_and_are_the_same(threads: Threads) -> None:
    threads(1)
    alone = layer_pass(5)
    with busy_neighbours(2) as neighbours:
        threads(3)
        assert all(torch.equal(layer_pass(5), alone) for _ in range(20))
        assert [neighbour.poll() for neighbour in neighbours] == [None, None]
    assert all(neighbour.poll() is not None for neighbour in neighbours)


def test_several_threads_may_compute_at_once(threads: Threads) -> None:
    threads(1)
    alone = layer_pass(5)
    threads(2)
    same: list[bool] = []

    def compute() -> None:
        same.extend(torch.equal(layer_pass(5), alone) for _ in range(20))

    callers = [threading.Thread(target=compute) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert same == [True] * 60


_PROGRAM = """
#include "team.h"
#include <sys/wait.h>
#include <unistd.h>

static bool works() {
    for (int round = 0; round < 300; round++) {
        int64_t results[200] = {};
        in_parallel(200, 1 + round % 7, 2 + round % 3, [&](int64_t i) { results[i] += i * i + round; }, round % 2);
        for (int64_t i = 0; i < 200; i++)
            if (results[i] != i * i + round) return false;
    }
    return true;
}

int main() {
    if (!works()) return 1;
    usleep(10000);  // helpers are asleep
    const pid_t child = fork();
    if (!works()) return 2;
    int status = 0;
    return child == 0 || (waitpid(child, &status, 0) == child && status == 0) ? 0 : 3;
}
"""


def compile_with(source: str, folder: Path, *words: str) -> Path:
    """What a compiler makes of a source that includes headers of the kernels."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler")
    (folder / "source.cpp").write_text(source)
    built = folder / "built"
    command = (compiler, "-std=c++17", "-O1", "-pthread", f"-I{KERNELS}", str(folder / "source.cpp"), *words)
    subprocess.run([*command, "-o", str(built)], check=True)
    return built


@pytest.mark.parametrize("policy", ["passive", "active", "as it is"])
def test_work_is_done_once_by_threads_that_sleep_or_spin_and_in_a_forked_child_too(policy: str, tmp_path: Path) -> None:
    program = compile_with(_PROGRAM, tmp_path, str(KERNELS / "team.cpp"))
    subprocess.run([program], env={"OMP_WAIT_POLICY": policy}, check=True)


# ------------------------------------------------------------------------------- how many threads

_PACE = """
#include "pace.h"
static Pace pace;
extern "C" int threads(int allowed) { return pace.threads(allowed); }
extern "C" void count(int64_t chunks, int64_t own, int64_t started, int64_t own_end, int64_t now) {
    pace.count(7, chunks, own, started, own_end, now);
}
"""
_CHUNK = 100_000  # nanoseconds on one core


class SimulatedWork:
    """A library that measures how fast work goes on, on a machine that is only imagined."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(compile_with(_PACE, folder, "-shared", "-fPIC")))
        self._library.count.argtypes = [ctypes.c_int64] * 5
        self.now = 0

    def go_on(self, seconds: float, allowed: int, speed: Callable[[int], float]) -> dict[int, float]:
        """Seconds for which each number of threads was used; `speed`: of so many threads, in cores."""
        used: dict[int, float] = {}
        end = self.now + int(seconds * 1e9)
        while self.now < end:
            number = self._library.threads(allowed)
            took = int(32 * _CHUNK / speed(number))
            own = max(32 // number, 1)
            self._library.count(32, own, self.now, self.now + own * _CHUNK, self.now + took)
            self.now += took
            used[number] = used.get(number, 0.0) + took / 1e9
        return used


@pytest.fixture
def work(tmp_path: Path) -> SimulatedWork:
    return SimulatedWork(tmp_path)


def test_on_quiet_cores_all_threads_are_used_nearly_always(work: SimulatedWork) -> None:
    work.go_on(5, 4, lambda number: number**0.7)
    used = work.go_on(30, 4, lambda number: number**0.7)
    assert used[4] > 0.99 * sum(used.values())


def test_fewer_threads_are_used_where_they_are_faster_and_all_again_when_it_is_quiet(work: SimulatedWork) -> None:
    quiet = {1: 1.0, 2: 1.7, 4: 3.0}
    beside_a_neighbour = {1: 0.9, 2: 0.4, 4: 0.2}
    assert work.go_on(2, 4, quiet.__getitem__)[4] > 1.9
    used = work.go_on(3, 4, beside_a_neighbour.__getitem__)
    assert used[1] > 2.3
    work.go_on(5, 4, quiet.__getitem__)
    assert work.go_on(10, 4, quiet.__getitem__)[4] > 9.7


def test_a_start_next_to_a_busy_process_is_noticed_too(work: SimulatedWork) -> None:
    assert work.go_on(3, 2, {1: 1.0, 2: 0.3}.__getitem__)[1] > 2.5
