"""Measuring on a CUDA device: events between stages, ceilings, and growth on the GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.growth.models import plan_growth
from benchmarks.growth.targets import grow_folder
from specinfer.bench.ceilings import measure_ceilings
from specinfer.bench.latency import run_latency
from specinfer.bench.models import find_models
from specinfer.bench.options import LatencyConfig, ThroughputConfig
from specinfer.bench.throughput import run_throughput
from specinfer.core.step_record import StepRecord
from specinfer.engine.timer import DeviceTimer, StageClock
from tiny import random_prompts, save_model

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PROMPTS = tuple(map(tuple, random_prompts((4, 9))))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("pair")
    return str(save_model(root / "target")), str(save_model(root / "drafter"))


def _step(timer: DeviceTimer, target: int) -> None:
    """One that keeps the device busy for so many products as its pass, and the host not at all."""
    clock = StageClock(timer)
    clock.lap("rest")
    clock.lap("draft")
    x = torch.randn(2048, 2048, device=CUDA)
    for _ in range(target):
        x = x @ x / 100
    clock.lap("target")
    clock.lap("verify")
    if clock.marks is not None:
        clock.marks.record = StepRecord(1, 1, 0, 0, 1, 0, 0.0, 1.0, 0.0)


def test_the_device_measures_its_own_time() -> None:
    """Launching takes microseconds; the products are what takes time."""
    timer = DeviceTimer(CUDA, every=1)
    for count in (50, 50, 100, 50):
        _step(timer, count)
    _, short, long = timer.take()  # the first one warms up
    assert 1.5 < long.seconds["target"] / short.seconds["target"] < 2.5
    assert short.seconds["target"] > 5 * (short.seconds["draft"] + short.seconds["verify"] + short.seconds["rest"])


def test_ceilings() -> None:
    half, single = (measure_ceilings(CUDA, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert half.flops_per_second > single.flops_per_second > 1e12
    assert half.bytes_per_second == pytest.approx(single.bytes_per_second, rel=0.2)
    assert half.bytes_per_second > 1e11


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stages_of_latency_and_throughput(temperature: float, folders: tuple[str, str]) -> None:
    target, drafter = folders
    options: dict[str, Any] = {"prompts": PROMPTS, "repeats": 1, "device": "cuda", "temperature": temperature}
    alone = run_latency(LatencyConfig(target, (drafter,), ("1,1", "auto"), max_tokens=80, **options))
    together = run_throughput(
        ThroughputConfig(target, (drafter,), ("1,1",), max_tokens=80, batch_sizes=(2,), **options)
    )
    for arm in (*alone.measured.result.arms, *together.measured.results[0].arms):
        assert arm.stages.samples
        assert arm.stages.over_floor("target") > 1
        assert all(min(sample.seconds.values()) >= 0 for sample in arm.stages.samples)


def test_growth_on_the_gpu_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = save_model(tmp_path / "source")
    models = find_models(str(source), ("ngram",))
    plan = plan_growth(models, "1m", "float32")
    there = plan.make(CUDA)
    here = grow_folder(source, tmp_path / "here", plan.growths[str(source)].shape, dtype=torch.float32)
    one, other = (load_file(Path(folder) / "model.safetensors") for folder in (there.target, here))
    assert {name: weight.shape for name, weight in one.items()} == {name: w.shape for name, w in other.items()}
    options: dict[str, Any] = {"prompts": PROMPTS, "max_tokens": 24, "repeats": 1, "warmup": 0, "dtype": "float32"}
    said = [
        [
            run.token_ids
            for run in run_latency(LatencyConfig(str(folder), ("ngram",), ("1",), **options)).result.plain.runs
        ]
        for folder in (source, there.target, here)
    ]
    assert said[0] == said[1] == said[2]
