"""Stored costs: measured once for each target, drafter and machine."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from specinfer.drafters import make_drafter
from specinfer.model.runner import ModelRunner
from specinfer.policy import cost_cache, cost_measurement
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from tests.policy.simulated_machines import StreamedTarget
from tiny import VOCAB, resized

FEW = (1, 2, 4, 8, 16, 32, 64)


def flat(seconds: float, sizes: Sequence[int] = FEW) -> Curve:
    return Curve(sizes, [seconds] * len(sizes))


def test_costs_are_measured_once_for_each_situation(
    runner_of: Callable[..., ModelRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []

    def measure(target: ModelRunner, drafter: object, **_: object) -> CostModel:
        measured.append(target)
        return CostModel(flat(float(len(measured))), flat(0.1))

    monkeypatch.setattr(cost_cache, "measure_costs", measure)
    target, drafter = resized(runner_of("llama"), 400), make_drafter(["ngram"], VOCAB)
    assert drafter is not None

    def seconds(target: ModelRunner = target, *, fresh: bool = False) -> float:
        return float(cost_cache.cached_costs(target, drafter, fresh=fresh).target(1))

    assert [seconds(), seconds(), seconds(fresh=True), seconds()] == [1.0, 1.0, 2.0, 2.0]
    assert seconds(resized(runner_of("gpt2"), 400)) == 3.0, "another target is another situation"
    assert seconds() == 2.0
    for path in tmp_path.rglob("costs-*.json"):
        path.write_text('{"costs": 3}')
    assert [seconds(), seconds()] == [4.0, 4.0], "a file that cannot be used is replaced"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [seconds(), seconds()] == [5.0, 6.0], "where nothing can be kept it is measured each time"


def test_how_much_is_streamed_is_part_of_the_situation(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = resized(runner_of("llama"), 400), make_drafter(["ngram"], VOCAB)
    assert drafter is not None
    held = cost_cache._situation(target, drafter)
    found = []
    for num_bytes in (0, 10**9, int(1.01 * 10**9), 2 * 10**9):
        stream = StreamedTarget(0.1)
        stream.bytes_per_pass = num_bytes
        monkeypatch.setattr(target, "loaded", replace(target.loaded, stream=stream))
        found.append(cost_cache._situation(target, drafter))
    assert found[0] == held != found[1] == found[2] != found[3]


def test_costs_of_a_target_that_waits_for_its_weights_are_kept(
    runner_of: Callable[..., ModelRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, drafter = resized(runner_of("llama"), 400), make_drafter(["ngram"], VOCAB)
    assert drafter is not None
    stream = StreamedTarget(0.001)
    monkeypatch.setattr(target, "loaded", replace(target.loaded, stream=stream))
    monkeypatch.setattr(cost_cache.time, "perf_counter", lambda: stream.now)
    monkeypatch.setattr(cost_cache.time, "process_time", lambda: stream.now - stream.seconds_waiting)

    def measure(*_: object, **__: object) -> CostModel:
        stream.run(1)
        return CostModel(flat(4.0), flat(0.1))

    monkeypatch.setattr(cost_cache, "measure_costs", measure)
    for _ in range(3):
        cost_cache.cached_costs(target, drafter)
    assert stream.sizes == [1]


@pytest.mark.skipif(sys.platform == "win32", reason="the time of other processes is unknown there")
@pytest.mark.parametrize("num_idle", [0.0, 1.0])
def test_costs_are_kept_though_kernels_were_compiled_meanwhile(
    num_idle: float, runner_of: Callable[..., ModelRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers are processes of their own, as on a GPU at the first start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, idle = resized(runner_of("llama"), 400), 0.0

    def measure(*_: object, **__: object) -> CostModel:
        nonlocal idle
        idle += num_idle
        subprocess.run([sys.executable, "-SEc", "for _ in range(6_000_000): pass"], check=True)
        return CostModel(flat(4.0), flat(0.1))

    monkeypatch.setattr(cost_cache, "measure_costs", measure)
    monkeypatch.setattr(cost_cache.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(cost_cache.time, "perf_counter", lambda: os.times().children_user + idle)
    cost_cache.cached_costs(target, None)
    assert any(tmp_path.rglob("costs-*.json")) == (not num_idle)


@pytest.mark.parametrize(("factor", "is_kept"), [(1.0, True), (1.3, True), (2.0, False), (0.5, False)])
def test_costs_of_another_speed_of_the_machine_are_measured_again(
    factor: float, is_kept: bool, runner_of: Callable[..., ModelRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, drafter = resized(runner_of("llama"), 400), make_drafter(["ngram"], VOCAB)
    assert drafter is not None
    speed, now = 1.0, 0.0

    def run(_: object, size: int) -> None:
        nonlocal now
        now += speed * (1e-3 + 1e-5 * size)

    def clock() -> float:  # between two looks at it, something was drafted
        nonlocal now
        now += 1e-6
        return now

    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(cost_cache.time, name, clock)
    monkeypatch.setattr(cost_measurement, "_target_pass", run)
    first = cost_cache.cached_costs(target, drafter).as_dict()
    speed = factor
    assert (cost_cache.cached_costs(target, drafter).as_dict() == first) == is_kept
    assert float(cost_cache.cached_costs(target, drafter).target(1)) == pytest.approx(
        (1.0 if is_kept else factor) * 1.01e-3, rel=0.01
    )
