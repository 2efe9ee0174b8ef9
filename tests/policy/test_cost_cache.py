"""Stored costs: measured once for each target, drafter and machine, and never trusted blindly."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specinfer.drafters import MergedDrafter, make_drafter
from specinfer.model.runner import ModelRunner
from specinfer.policy import cost_cache, cost_measurement
from specinfer.policy.cost_cache import cached_costs
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.kept_file import MAX_AGE
from tests.policy.simulated_machines import StreamedTarget
from tiny import VOCAB, resized

COSTS = CostModel(Curve((1, 512), (1.0, 1.0)), Curve((1, 64), (0.01, 0.01)), 0.001)
Pair = tuple[ModelRunner, MergedDrafter]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cost_cache, "_queued", lambda: 0.0)  # other processes may use this machine


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The targets that were measured, of which nothing is timed."""
    targets: list[object] = []

    def measure(target: object, *_: object, **__: object) -> CostModel:
        targets.append(target)
        return CostModel.from_dict(COSTS.as_dict())

    monkeypatch.setattr(cost_cache, "measure_costs", measure)
    return targets


@pytest.fixture
def pair(runner_of: Callable[..., ModelRunner]) -> Pair:
    drafter = make_drafter(["suffix", "ngram"], VOCAB)
    assert drafter is not None
    return resized(runner_of("llama"), 400), drafter


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "specinfer").glob("costs-*.json"))


def _read_costs(tmp_path: Path) -> CostModel:
    (path,) = kept(tmp_path)
    return CostModel.from_dict(json.loads(path.read_text())["costs"])


def test_costs_are_measured_once(tmp_path: Path, pair: Pair, measured: list[object]) -> None:
    first, second = cached_costs(*pair), cached_costs(*pair)
    assert first.as_dict() == second.as_dict() == COSTS.as_dict()
    assert len(measured) == 1
    assert len(kept(tmp_path)) == len(list((tmp_path / "cache" / "specinfer").iterdir())) == 1  # no partial files
    first.target.observe(1, 5.0)  # a run that goes on learning changes nothing for the next
    assert cached_costs(*pair).as_dict() == COSTS.as_dict()
    cached_costs(*pair, fresh=True)
    assert len(measured) == 2


def test_another_situation_is_measured_for_itself(
    pair: Pair,
    measured: list[object],
    runner_of: Callable[..., ModelRunner],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    cached_costs(*pair)
    cached_costs(resized(runner_of("gpt2"), 400), pair[1])
    cached_costs(pair[0], make_drafter(["ngram"], VOCAB))  # type: ignore[arg-type]
    monkeypatch.setattr(cost_cache, "device_name", lambda device: "another machine")
    cached_costs(*pair)
    monkeypatch.setattr("torch.get_num_threads", lambda: 99)
    cached_costs(*pair)
    assert len(measured) == len(kept(tmp_path)) == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: "",
        lambda stored: "[1]",
        lambda stored: "{",
        lambda stored: json.dumps(stored | {"costs": {}}),
        lambda stored: json.dumps(stored | {"costs": stored["costs"] | {"target": [[2, 1], [1.0, 1.0]]}}),
        lambda stored: json.dumps(stored | {"costs": stored["costs"] | {"target": [[1, 2], [1.0]]}}),
        lambda stored: json.dumps(stored | {"costs": stored["costs"] | {"target": [[], []]}}),
        lambda stored: json.dumps(stored | {"costs": stored["costs"] | {"draft_level": [[1], [float("nan")]]}}),
        lambda stored: json.dumps(stored | {"costs": stored["costs"] | {"read_token": -1}}),
        lambda stored: json.dumps(stored | {"situation": {}}),
        lambda stored: json.dumps(stored | {"time": time.time() - MAX_AGE - 1}),
        lambda stored: json.dumps(stored | {"time": time.time() + 1000}),
    ],
)
def test_a_file_that_is_damaged_or_old_is_replaced(
    tmp_path: Path, pair: Pair, measured: list[object], damage: Callable[[dict[str, Any]], str]
) -> None:
    cached_costs(*pair)
    (path,) = kept(tmp_path)
    good = json.loads(path.read_text())
    path.write_text(damage(good))
    assert cached_costs(*pair).as_dict() == COSTS.as_dict()
    assert len(measured) == 2
    assert json.loads(path.read_text())["costs"] == good["costs"]


def test_where_nothing_can_be_kept_costs_are_still_measured(
    tmp_path: Path, pair: Pair, measured: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for number in (1, 2):
        assert cached_costs(*pair).as_dict() == COSTS.as_dict()
        assert len(measured) == number


class Machine:
    """A clock, and passes on a machine whose speed changes, and that other processes may use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.worked = 0.0
        self.seconds, self.share = 1.0, 1.0  # of a pass; the share of the time in which this process runs
        self.num_passes = 0
        monkeypatch.setattr(cost_cache.time, "perf_counter", self.clock)
        monkeypatch.setattr(cost_cache.time, "process_time", lambda: self.worked)
        monkeypatch.setattr(cost_measurement, "_target_pass", self.run)

    def run(self, _: object, size: int) -> None:
        self.num_passes += 1
        self._work(self.seconds * (1e-2 + 1e-4 * size))

    def clock(self) -> float:
        self._work(1e-6)  # between two looks at it, something was drafted
        return self.now

    def _work(self, seconds: float) -> None:
        self.now += seconds / self.share
        self.worked += seconds


def test_costs_of_a_busy_machine_are_kept_as_such_and_used_at_once(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    machine.share = 0.5
    first = cached_costs(*pair)
    num_measured = machine.num_passes
    assert first.is_provisional
    assert first.is_doubtful
    assert kept(tmp_path)
    machine.share = 0.25
    again = cached_costs(*pair)
    assert machine.num_passes - num_measured < num_measured / 2, "only the speed is looked at"
    assert again.is_provisional
    assert float(again.target(8)) == pytest.approx(2 * float(first.target(8)), rel=0.02)
    machine.share = 1.0  # quiet
    quiet = cached_costs(*pair)
    assert not quiet.is_provisional
    assert float(quiet.target(1)) == pytest.approx(1.01e-2, rel=0.01)
    assert cached_costs(*pair).as_dict() == quiet.as_dict()


def test_costs_of_a_quiet_machine_stay_kept_where_others_use_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a busy one is measured all the same."""
    machine = Machine(monkeypatch)
    quiet = cached_costs(*pair).as_dict()
    machine.share = 0.3
    assert cached_costs(*pair).is_provisional
    assert cached_costs(*pair, fresh=True).is_provisional
    machine.share = 1.0
    assert cached_costs(*pair).as_dict() == quiet


def test_costs_of_a_busy_machine_are_corrected_by_a_few_steps(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.share = 0.5
    costs = cached_costs(*pair)
    again = CostModel.from_dict(costs.as_dict())
    assert again.is_provisional
    again.adopt(Curve([1, 64], [1.0, 1.0]))
    assert not again.is_provisional
    assert not again.is_doubtful


def test_how_much_is_streamed_is_part_of_the_situation(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair
    held = cost_cache._situation(target, drafter)
    found = []
    for num_bytes in (0, 10**9, int(1.01 * 10**9), 2 * 10**9):
        stream = StreamedTarget(0.1)
        stream.bytes_per_pass = num_bytes
        monkeypatch.setattr(target, "loaded", replace(target.loaded, stream=stream))
        found.append(cost_cache._situation(target, drafter))
    assert found[0] == held != found[1] == found[2] != found[3]


def test_costs_of_a_target_that_waits_for_its_weights_are_kept(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair
    stream = StreamedTarget(0.001)
    monkeypatch.setattr(target, "loaded", replace(target.loaded, stream=stream))
    monkeypatch.setattr(cost_cache.time, "perf_counter", lambda: stream.now)
    monkeypatch.setattr(cost_cache.time, "process_time", lambda: stream.now - stream.seconds_waiting)

    def measure(*_: object, **__: object) -> CostModel:
        stream.run(1)
        return COSTS

    monkeypatch.setattr(cost_cache, "measure_costs", measure)
    for _ in range(3):
        cached_costs(target, drafter)
    assert stream.sizes == [1]


@pytest.mark.skipif(sys.platform == "win32", reason="the time of other processes is unknown there")
@pytest.mark.parametrize("num_idle", [0.0, 1.0])
def test_the_time_of_compilers_is_not_that_of_other_load(
    num_idle: float, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers are processes of their own, as on a GPU at the first start."""
    idle = 0.0

    def measure(*_: object, **__: object) -> CostModel:
        nonlocal idle
        idle += num_idle
        subprocess.run([sys.executable, "-SEc", "for _ in range(6_000_000): pass"], check=True)
        return COSTS

    monkeypatch.setattr(cost_cache, "measure_costs", measure)
    monkeypatch.setattr(cost_cache.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(cost_cache.time, "perf_counter", lambda: os.times().children_user + idle)
    cached_costs(pair[0], None)
    assert _read_costs(tmp_path).is_provisional == bool(num_idle)


@pytest.mark.parametrize(("factor", "is_kept"), [(1.0, True), (1.3, True), (2.0, False), (0.5, False)])
def test_costs_of_another_speed_of_the_machine_are_measured_again(
    factor: float, is_kept: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    first = cached_costs(*pair).as_dict()
    machine.seconds = factor
    assert (cached_costs(*pair).as_dict() == first) == is_kept
    assert float(cached_costs(*pair).target(1)) == pytest.approx((1.0 if is_kept else factor) * 1.01e-2, rel=0.01)
