"""Steps timed on the device's timeline: marks stand between stages, and what is late stands in nobody's way."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from on_device import load_plain, make_device_engine
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TreeBudget
from specinfer.engine import timer as timing
from specinfer.engine.timer import STAGES, DeviceTimer, HostMark, StageClock
from specinfer.llm import LLM
from specinfer.policy.base import FixedPolicy
from tiny import make_request, run, save_model

CPU = torch.device("cpu")


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mark is a second after the one before."""
    count = itertools.count()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: float(next(count))))


def record(num_requests: int = 1) -> StepRecord:
    return StepRecord(num_requests, num_requests, 0, 0, num_requests, 0, 0.0, 1.0, 0.0)


def step(timer: DeviceTimer, *stages: str) -> None:
    marks = timer.begin()
    if marks is not None:
        for stage in stages:
            marks.lap(stage)
        marks.record = record()


@pytest.mark.usefixtures("ticks")
def test_a_step_lasts_until_the_next_begins() -> None:
    timer = DeviceTimer(CPU)
    step(timer, "rest", "draft", "target", "verify", "draft", "rest")
    step(timer, "rest", "draft", "target", "verify", "rest")
    (timed,) = timer.take()  # the second one has no end yet
    # Scheduling, and from the last stage to the next step; the late lap puts no mark.
    assert timed.seconds == {"draft": 2.0, "target": 1.0, "verify": 1.0, "rest": 2.0}
    assert set(timed.seconds) == set(STAGES)
    assert timer.take() == []


@pytest.mark.usefixtures("ticks")
def test_what_comes_after_the_launch_puts_no_marks() -> None:
    timer = DeviceTimer(CPU)
    marks = timer.begin()
    assert marks is not None
    marks.lap("draft")
    marks.launched()
    for stage in ("target", "verify", "rest"):
        marks.lap(stage)
    marks.record = record()
    step(timer, "draft")
    (timed,) = timer.take()
    assert timed.seconds == {"draft": 1.0, "target": 0.0, "verify": 0.0, "rest": 1.0}


@pytest.mark.usefixtures("ticks")
def test_every_nth_step_is_timed_and_abandoned_steps_are_left_out() -> None:
    timer = DeviceTimer(CPU, every=3)
    sampled = []
    for number in range(1, 10):
        marks = timer.begin()
        sampled += [number] if marks is not None else []
        if marks is not None and number != 6:
            marks.record = record(0 if number == 9 else 1)
    timer.begin()
    assert sampled == [3, 6, 9]
    assert len(timer.take()) == 1  # the sixth did nothing, the ninth served nobody
    assert timer.begin() is None  # counted anew


def test_marks_of_the_host() -> None:
    assert HostMark(1.5).elapsed_time(HostMark(2.0)) == 500.0


def test_a_clock_without_a_timer_marks_nothing() -> None:
    clock = StageClock()
    clock.lap("draft")
    clock.launched()
    assert clock.marks is None


def test_an_engine_is_timed_only_while_it_has_a_timer(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_model(tmp_path_factory.mktemp("timed") / "model")
    with LLM(folder, drafters=["ngram"], tree="1,1", device="cpu") as llm:
        llm.engine.policy = FixedPolicy()
        timer = DeviceTimer(CPU)
        llm.engine.timer = timer
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
        timed = timer.take()
        # The prompt and five more tokens; the last step has no end.
        assert [one.record.num_generated for one in timed] == [1] * 5
        assert [one.record.num_context for one in timed] == [0, 3, 4, 5, 6]
        assert all(one.seconds["target"] > 0 and min(one.seconds.values()) >= 0 for one in timed)
        wall = sum(one.record.time for one in timed)
        assert sum(sum(one.seconds.values()) for one in timed) == pytest.approx(wall, rel=0.5, abs=0.01)
        llm.engine.timer = None
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
        assert timer.take() == []


def test_steps_on_the_device_are_marked_where_they_are_launched(tmp_path_factory: pytest.TempPathFactory) -> None:
    target, small = (
        load_plain(save_model(tmp_path_factory.mktemp(name) / "model", noise=noise))
        for name, noise in (("target", 0.0), ("small", 0.05))
    )
    engine = make_device_engine(target, small, TreeBudget.expansion((2, 1)))
    engine.timer = DeviceTimer(CPU)
    run(engine, [make_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20))])
    timed = engine.timer.take()
    # Pass and walk are one program there; the step that reads the prompt is an ordinary one.
    on_device = [one for one in timed if one.record.num_guessed and one.seconds["verify"] == 0.0]
    assert len(on_device) > 2
    for one in on_device:
        assert min(one.seconds["draft"], one.seconds["target"]) > 0
        assert one.record.num_context >= 3
