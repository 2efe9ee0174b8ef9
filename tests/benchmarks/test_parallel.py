"""Split targets measured: hosts are made and always removed, arms take turns, predictions follow from the parts."""

import io
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.parallel import run as parallel
from benchmarks.parallel.cable import Direction
from benchmarks.parallel.engine import EngineAsk, EngineJob, ParallelEngine, answer
from benchmarks.parallel.namespaces import Namespaces
from benchmarks.parallel.plans import WHOLE, ParallelBenchConfig, Setting, schedule
from benchmarks.parallel.prediction import HereCosts, predict
from benchmarks.parallel.report import (
    ParallelReport,
    RankMemory,
    partings_from,
    per_token,
    plot_parallel,
    prediction_error,
    print_parallel,
    setting_of,
)
from benchmarks.parallel.run import run_parallel
from benchmarks.program import app
from benchmarks.runs import read_run
from specinfer.bench.options import PLAIN
from specinfer.bench.results import Run
from specinfer.core.step_record import StepRecord
from specinfer.planning.cluster import Cluster, RankCosts, Split, TargetShape
from specinfer.planning.network import Link
from specinfer.planning.simulation_plans import Planner, run_round
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.reporting.environment import Environment
from tiny import random_prompts, save_model

PROMPTS = tuple(map(tuple, random_prompts((4, 9, 2))))
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a drafter that is the target itself but for its name."""
    root = tmp_path_factory.mktemp("pair")
    return str(save_model(root / "target")), str(save_model(root / "drafter"))


def make_config(folders: tuple[str, str], **changes: Any) -> ParallelBenchConfig:
    options = {"model": folders[0], "drafters": (folders[1],), "trees": ("1,1,1", "auto"), "prompts": PROMPTS,
               "batch_sizes": (1, 3), "temperatures": (0.0, 0.8), "max_tokens": MAX_TOKENS, "namespaces": False,
               "threads": 1}  # fmt: skip
    return ParallelBenchConfig(**(options | changes))


# ------------------------------------------------------------------------------------------- hosts


def test_a_cable_is_late_and_narrow() -> None:
    cable = Direction()
    cable.latency, cable.bandwidth = 0.5, 100.0
    cable.enter(b"x" * 100, 10.0)
    cable.enter(b"y" * 50, 10.2)  # while the first is still going in
    cable.enter(b"z", 20.0)
    assert cable.next_at == pytest.approx(11.5)
    assert cable.leave(11.49) == []
    assert [len(packet) for packet in cable.leave(11.51)] == [100]
    assert [len(packet) for packet in cable.leave(12.01)] == [50]
    assert cable.next_at == pytest.approx(20.51)
    assert cable.leave(30.0) == [b"z"]
    assert cable.next_at is None


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    try:
        made = Namespaces()
    except ValueError as error:
        pytest.skip(str(error))
    with made:
        yield made


_SERVER = """
import socket
server = socket.create_server(("10.213.0.1", 5000))
print("ready", flush=True)
peer, _ = server.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := peer.recv(1 << 16):
    peer.sendall(data)
"""
_CLIENT = """
import socket, statistics, time
peer = socket.create_connection(("10.213.0.1", 5000))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
took = []
for _ in range(9):
    before = time.perf_counter()
    peer.sendall(b"x" * 1000)
    left = 1000
    while left:
        left -= len(peer.recv(left))
    took.append(time.perf_counter() - before)
print(statistics.median(took))
"""


def test_hosts_reach_each_other_as_late_as_asked(hosts: Namespaces) -> None:
    hosts.cable.set(Link(0.02, 1.25e8))
    command = [*hosts.command(0), sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        words = [*hosts.command(1), sys.executable, "-c", _CLIENT]
        took = float(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert 0.04 <= took < 0.2  # there and back; a busy machine is later


def _exists(name: str) -> bool:
    return name in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_hosts_end_with_the_process_that_made_them(hosts: Namespaces, number: signal.Signals) -> None:
    program = (
        "import signal, subprocess, sys, time\n"
        "from benchmarks.parallel.namespaces import Namespaces\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where tests run in the background
        "with Namespaces() as hosts:\n"
        "    other = subprocess.Popen([*hosts.command(1), 'sleep', '1000'])\n"
        "    print(hosts.names[0], hosts.names[1], other.pid, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True) as owner:  # fmt: skip
        assert owner.stdout is not None
        *names, pid = owner.stdout.readline().split()
        assert all(map(_exists, names))
        owner.send_signal(number)
        owner.wait(30)
    end = time.monotonic() + 30
    while any(map(_exists, names)) or _lives(int(pid)):
        assert time.monotonic() < end, "something stayed"
        time.sleep(0.05)
    assert all(map(_exists, hosts.names))  # not those of others


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def test_hosts_that_cannot_be_made_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="namespaces: two hosts cannot be made here: only root may make them; measure"):
        Namespaces()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"namespaces: .* there is no command ip"):
        Namespaces()


# ------------------------------------------------------------------------------------------- turns


def test_settings_take_turns(folders: tuple[str, str]) -> None:
    config = make_config(folders, namespaces=True, splits=("2x1", "1x2"), link_latencies=("1ms", "5ms"), repeats=2)
    names = [setting.name for setting in config.settings]
    assert names == ["whole", "2x1 1ms", "1x2 1ms", "2x1 5ms", "1x2 5ms"]
    turns = list(schedule(config, len(PROMPTS)))
    assert all(set(turn.settings) == set(config.settings) for turn in turns)
    assert [turn.prompts for turn in turns if turn.repeat == 0] == [(0,)] * 2 + [(1,)] * 2 + [(2,)] * 2 + [
        (0, 1, 2)
    ] * 2
    assert {turn.settings[0].name for turn in turns} == set(names)
    assert {turn.trees[0] for turn in turns} == {PLAIN, "1,1,1", "auto"}
    assert config.link(config.settings[1]) == Link(0.001, 1.25e8)
    assert make_config(folders).link(Setting(2, 1)) is None


class FakeEngine:
    """An engine within this process; a target that is split is whole all the same."""

    closed = 0

    def __init__(self, job: EngineJob, setting: Setting, where: object) -> None:
        self.setting = setting
        self._engine = ParallelEngine(1)
        said = answer(self._engine, {"do": "load", "job": asdict(job)})
        if "refused" in said:
            raise ValueError(said["refused"])
        self.environment = Environment(**said["environment"])

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        FakeEngine.closed += 1

    def costs(self) -> dict[str, Any]:
        return answer(self._engine, {"do": "costs"})

    def part(self, num_ranks: int) -> tuple[list[float], list[float]]:
        sizes, seconds = answer(self._engine, {"do": "part", "num_ranks": num_ranks})["part"]
        return sizes, seconds

    def be_busy(self, seconds: float) -> None:
        answer(self._engine, {"do": "busy", "seconds": min(seconds, 0.05)})

    def prepare(self, setting: Setting) -> None:
        answer(self._engine, {"do": "prepare", "setting": setting.name})

    def forget_peaks(self) -> None:
        pass

    def memory(self) -> tuple[RankMemory, ...]:
        return (RankMemory(3000 // self.setting.num_ranks, 2000),) * self.setting.num_ranks

    def measure(self, ask: EngineAsk) -> Run:
        run = read_run(json.loads(json.dumps(answer(self._engine, {"do": "measure", "ask": asdict(ask)}))))
        counts = {"link_bytes": 5000, "link_packets": 5, "num_bytes": 4000, "num_messages": 40}
        return replace(run, counters={**run.counters, **counts})


@pytest.fixture(scope="module")
def report(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> ParallelReport:
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "Engine", FakeEngine)
        patch.setattr(parallel, "message_seconds", lambda _: 1e-4)
        made = run_parallel(make_config(folders, json=folder / "x.json", plot=folder / "x.svg", repeats=2))
    assert FakeEngine.closed == 4  # the whole one, one beside it while passes were timed, and two splits
    assert (folder / "x.svg").read_text().lstrip().startswith("<?xml")
    assert json.loads((folder / "x.json").read_text()) == json.loads(json.dumps(made.as_dict()))
    return made


@pytest.mark.slow
def test_every_arm_runs_every_batch_in_every_setting(report: ParallelReport) -> None:
    situations = [(setting_of(result).name, result.size, result.situation["temperature"]) for result in report.results]
    assert situations == [
        (name, size, heat) for name in ("whole", "2x1", "1x2") for size in (1, 3) for heat in (0, 0.8)
    ]
    batches = {1: [(0,), (1,), (2,)], 3: [(0, 1, 2)]}
    for result in report.results:
        assert [arm.name for arm in result.arms] == [PLAIN, "1,1,1", "auto"]
        for arm in result.arms:
            made = [(run.repeat, run.prompts) for run in arm.runs]
            assert made == [(repeat, batch) for repeat in range(2) for batch in batches[result.size]]
            assert (arm.details["predicted"] is None) == (setting_of(result) == WHOLE)
        assert partings_from(report.whole(result), result) == []
        assert result.num_outputs == 6
    assert len(report.errors) == 2 * 4 * 3


@pytest.mark.slow
def test_numbers_follow_from_what_was_counted(report: ParallelReport) -> None:
    result = report.split_results[0]
    arm = result.trees[0]
    decoded = sum(run.num_decoded for run in arm.runs)
    assert decoded == 6 * (MAX_TOKENS - 1)
    assert per_token(arm, "link_bytes") == pytest.approx(5000 * 6 / decoded)
    assert per_token(arm, "num_bytes") == pytest.approx(4000 * 6 / decoded)
    assert per_token(arm, "num_messages") == pytest.approx(40 * 6 / decoded)
    assert prediction_error(arm) == pytest.approx((arm.details["predicted"] or 0) / arm.tokens_per_second.median - 1)
    numbers = report.as_dict()
    memory: Any = numbers["memory"]
    assert memory["2x1"][1]["peak_of_whole"] == 0.5
    assert memory["1x1"] == [{"peak": 3000, "now": 2000, "peak_of_whole": 1, "now_of_whole": 1}]
    first: Any = numbers["results"]
    assert first[0]["arms"]["1,1,1"]["speedup"] == pytest.approx(
        report.results[0].speedup_of(report.results[0].trees[0]).median
    )


@pytest.mark.slow
def test_outputs_that_differ_are_reported(report: ParallelReport) -> None:
    result = report.split_results[0]
    run = result.plain.runs[0]
    other = replace(run, outputs=((*run.outputs[0][:3], -1),))
    changed = replace(result, plain=replace(result.plain, runs=(other, *result.plain.runs[1:])))
    assert partings_from(report.whole(result), changed) == [3]
    results = tuple(changed if one is result else one for one in report.results)
    text = " ".join(shown(replace(report, results=results)).split())
    assert "1 of 144 outputs part from one process in float32 rounding, the earliest after 3 tokens" in text


def shown(report: ParallelReport) -> str:
    text = io.StringIO()
    print_parallel(report, Console(file=text, width=80))
    return text.getvalue()


@pytest.mark.slow
def test_what_is_shown(report: ParallelReport, tmp_path: Path) -> None:
    text = shown(report)
    assert max(map(len, text.splitlines())) <= 80
    assert "split targets: the same tokens as one process in all 144 outputs" in text
    assert "predicted within 20%: " in text
    plot_parallel(report, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


# ------------------------------------------------------------------------------------------- predictions

SHAPE = TargetShape(12, 256, 8, 4, 600_000, 60_000, 800_000, 4.0)
ONE = CostModel(Curve((1, 16, 512), (0.1, 0.1, 1.6)), Curve((1, 64), (0.004, 0.004)))


def make_run(steps: list[StepRecord], size: int = 1, by_rank: tuple[float, ...] = ()) -> Run:
    seconds = sum(step.draft_time + step.target_time + step.rest_time for step in steps)
    outputs, counters = ((1,),) * size, {"by_rank": list(by_rank)}
    return Run(0, tuple(range(size)), 1.0, seconds, seconds + 1, outputs, tuple(steps), counters=counters)


def make_step(num_requests: int, nodes: int, levels: int, num_generated: int, slow: float = 1.0) -> StepRecord:
    """As it would be with the costs above, on a machine that is so many times as slow."""
    rows = num_requests * (1 + nodes)
    target = slow * float(ONE.target(rows))
    return StepRecord(num_requests, rows, num_requests * nodes, levels, num_generated, 0, slow * levels * 0.004,
                      target + 0.001, 0.002, verify_time=0.001)  # fmt: skip


def make_here(**changes: Any) -> HereCosts:
    return HereCosts(**({"busy": {1: ONE, 2: ONE}, "parts": {}, "message": 1e-4} | changes))


@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_a_fixed_tree_is_foreseen_step_by_step(slow: float) -> None:
    steps = [make_step(3, 4, 2, 7, slow), make_step(3, 4, 2, 6, slow), make_step(1, 2, 1, 2, slow)]
    link = Link(0.005, 1.25e8)
    costs = CostModel(Curve(ONE.target.sizes.tolist(), (slow * ONE.target.seconds).tolist()),
                      Curve((1, 64), (slow * 0.004,) * 2))  # fmt: skip
    costs.rest = 0.003
    split = Split(2, 1, SHAPE, RankCosts(costs, Curve((1e9,), (0.0,)), 1e-4), Cluster(link, link))
    seconds = [run_round(split, *one).seconds for one in ((3, 4, 2), (3, 4, 2), (1, 2, 1))]
    found = predict(Setting(2, 1, "5ms"), "1,1", 3, [make_run(steps, 3)], SHAPE, make_here(), link)
    assert found == pytest.approx(15 / float(sum(seconds)))
    alone = predict(Setting(2, 1), "1,1", 3, [make_run(steps, 3)], SHAPE, make_here(), None)
    assert alone > found


def test_parts_that_were_measured_are_believed() -> None:
    part = Curve((1, 512), (0.07, 0.07))
    run = make_run([make_step(1, 0, 0, 1)])
    found = predict(Setting(2, 1), PLAIN, 1, [run], SHAPE, make_here(parts={2: part}), None)
    head = 0.1 * SHAPE.head_share
    sums = 24 * (1e-4 + 1024 / 1e10)
    assert 1 / found == pytest.approx(0.07 + head + sums + 0.003 + 1e-4)  # and telling of it


def test_processes_that_compute_at_once_share_the_machine() -> None:
    slower = CostModel.from_dict(ONE.as_dict())
    slower.target.seconds = 1.8 * ONE.target.seconds
    here = make_here(busy={1: ONE, 2: slower})
    assert here.for_ranks(1).step is ONE
    assert here.for_ranks(2).step is slower
    assert float(here.for_ranks(4).step.target(1)) == pytest.approx(0.36)  # two wait for a core
    steps = [make_step(2, 0, 0, 2)]
    one, two = (predict(Setting(1, 2), PLAIN, size, [make_run(steps, size)], SHAPE, here, None) for size in (1, 2))
    assert one > two  # with two requests, both stages compute at once


def test_auto_chooses_anew_for_a_late_link() -> None:
    by_rank = (0.7, 0.1)
    steps = [make_step(1, 2, 2, 2)] * 10
    link = Link(0.05, 1.25e8)
    run = make_run(steps, by_rank=by_rank)
    found = predict(Setting(2, 1, "50ms"), "auto", 1, [run], SHAPE, make_here(), link)
    costs = RankCosts(CostModel.from_dict(ONE.as_dict()), Curve((1e9,), (0.0,)), 1e-4)
    costs.step.rest = 0.003
    best, _ = Planner(SHAPE, costs, Cluster(link, link), np.asarray(by_rank)).predict(2, 1, 1)
    assert best.num_nodes > 2
    skill = (2 - 1) / (0.7 + 0.49)  # what two nodes in two levels yielded, and what they should have
    assert found == pytest.approx((1 + skill * (best.tokens_per_pass - 1)) / best.step_seconds)


# ------------------------------------------------------------------------------------------- bad input


def refuse_to_load(*_: object, **__: object) -> None:
    raise AssertionError("the long work began")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"splits": ()}, "splits: none given; give at least one, and none twice"),
        ({"splits": ("2x1", "2x1")}, "splits: 2x1, 2x1 given"),
        ({"splits": ("1x1",)}, "splits: '1x1' cannot be measured"),
        ({"splits": ("2",)}, "splits: '2' cannot be measured"),
        ({"splits": ("8x8",)}, "splits: '8x8' cannot be measured; give tensor ranks x stages of 2 to 16"),
        ({"splits": ("3x1",), "namespaces": True}, "splits: 3x1 has a number of ranks that two hosts cannot share"),
        ({"link_latencies": ("soon",)}, "link_latencies: 'soon' is not a time"),
        ({"link_latencies": ()}, "link_latencies: none given"),
        ({"link_bandwidth": "1"}, "link_bandwidth: '1' is no rate"),
        ({"threads": 0}, "threads must be a whole number"),
        ({"batch_sizes": (5,)}, "prompts: 3 given for 5 requests together"),
        ({"temperatures": (1.0, 1.0)}, "temperatures: 1.0, 1.0 given"),
        ({"max_tokens": 300}, "max_tokens: 300 after a prompt of 9 tokens do not fit into the context of 256"),
        ({"trees": ("off",)}, "trees: plain decoding is always measured"),
        ({"drafters": ()}, "drafters: empty"),
        ({"plot": "x.bmp"}, "plot: x.bmp must end in one of"),
        ({"json": "."}, "json: . cannot be written"),
    ],
)
def test_bad_input_is_refused_before_the_long_work(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(parallel, "Engine", refuse_to_load)
    monkeypatch.setattr(parallel, "Namespaces", refuse_to_load)
    with pytest.raises(ValueError, match=message):
        run_parallel(make_config(folders, **changes))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--no-namespaces", "--link-latency", "1ms"],
            "--link-latency: without namespaces there is no link",
        ),
        (["--split", "two"], "--split: 'two' cannot be measured"),
        (["--tensor-parallel", "1"], "--split: '1x1' cannot be measured"),
    ],
)
def test_the_command_refuses_in_one_line(
    folders: tuple[str, str], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["parallel", folders[0], *words])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert message in said.err
    assert len(said.err.splitlines()) == 1


# ------------------------------------------------------------------------------------------- processes


@pytest.mark.distributed
def test_a_split_over_two_hosts_generates_what_one_process_does(hosts: Namespaces, folders: tuple[str, str]) -> None:
    config = make_config(folders, namespaces=True, link_latencies=("2ms",), splits=("2x1",), batch_sizes=(3,),
                         temperatures=(0.8,), trees=("1,1,1",))  # fmt: skip
    report = run_parallel(config)
    assert all(partings_from(report.whole(result), result) == [] for result in report.results)
    assert [len(report.memory[split]) for split in ("1x1", "2x1")] == [1, 2]
    assert all(rank.peak > 2**20 for ranks in report.memory.values() for rank in ranks)
    for result in report.split_results:
        for arm in result.arms:
            assert per_token(arm, "link_bytes") > per_token(arm, "num_bytes") > 0  # with headers
            step = statistics.median(run.time / len(run.steps) for run in arm.runs)
            assert step > 2 * 2 * 0.002  # two sums in each of two layers
    assert all(_exists(name) for name in hosts.names)
