"""Split targets, simulated: against a slow twin with a queue of events, known cases, and what must always hold."""

import heapq
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.program import app
from benchmarks.simulation.cluster import Cluster, RankCosts, Split
from benchmarks.simulation.links import Link, parse_rate, parse_seconds
from benchmarks.simulation.page import SimulationConfig, plan_machines
from benchmarks.simulation.plans import Planner, run_round, splits_for
from benchmarks.simulation.rounds import GroupStep, groups_of, simulate
from specinfer.core.sampling import SamplingParams
from specinfer.model.batch import Piece
from specinfer.model.runner import ModelRunner
from specinfer.planning.target_shape import TargetShape
from specinfer.policy import cost_cache
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.rank_choice import RankChoice
from tiny import make_engine, make_request, random_prompts, resized, run, save_model

SHAPE = TargetShape(12, 256, num_heads=8, num_kv_heads=4, layer_parameters=600_000, kv_parameters=60_000,
                    head_parameters=800_000, bytes_per_parameter=2.0)  # fmt: skip
NO_LINK = Link(0.0, 1e15)
FREE = Curve((1e9,), (0.0,))
BY_RANK = np.asarray([0.6, 0.15, 0.05])


def make_costs(rest: float = 0.0, draft: float = 0.0, message: float = 0.0) -> RankCosts:
    step = CostModel(Curve((1, 16, 512), (0.1, 0.1, 1.6)), Curve((1, 64), (draft, draft)))
    step.rest = rest
    return RankCosts(step, FREE, message)


def make_split(tensor: int, pipeline: int, link: Link = NO_LINK, per_machine: int = 1, **costs: float) -> Split:
    return Split(tensor, pipeline, SHAPE, make_costs(**costs), Cluster(link, NO_LINK, per_machine))


# ------------------------------------------------------------------------------------------- the slow twin


def slow_rounds(groups: Sequence[GroupStep], num_rounds: int) -> list[float]:
    """When each round ended; one tree, every event by itself, taken in the order of time."""
    last = len(groups[0].computing) - 1
    events: list[tuple[float, int, Callable[[], None]]] = []
    order = itertools.count()
    due: list[deque[int]] = [deque() for _ in range(last)]  # in the order in which passes began, whatever comes first
    there: list[set[int]] = [set() for _ in range(last)]
    is_working = [False] * last
    arrived: set[int] = set()
    ends: list[float] = []
    now, awaited = 0.0, -1

    def after(seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(events, (now + seconds, next(order), happens))

    def arrive(stage: int, place: int) -> None:
        if stage == last:
            arrived.add(place)
            if awaited == place:
                arrived.discard(place)
                go_on()
        else:
            there[stage].add(place)
            work(stage)

    def work(stage: int) -> None:
        if due[stage] and due[stage][0] in there[stage] and not is_working[stage]:
            is_working[stage], place = True, due[stage].popleft()
            there[stage].discard(place)
            took = float(groups[place].computing[stage] + groups[place].reducing[stage])
            after(took, lambda: done(stage, place))

    def done(stage: int, place: int) -> None:
        is_working[stage] = False
        after(float(groups[place].handing[stage]), lambda: arrive(stage + 1, place))
        work(stage)

    def begin(place: int) -> None:
        for passes in due:
            passes.append(place)
        after(float(groups[place].telling), lambda: arrive(0, place))

    def rank_0() -> Iterator[float | int]:
        """Seconds to work for, or the group whose pass it needs."""
        for place, group in enumerate(groups):
            yield float(group.draft)
            begin(place)
        while True:
            for place, group in enumerate(groups):
                yield place
                yield float(group.computing[last] + group.reducing[last] + group.finish)
                yield float(group.draft)
                begin(place)
            ends.append(now)

    program = rank_0()

    def go_on() -> None:
        nonlocal awaited
        awaited = -1
        for wanted in program:
            if isinstance(wanted, float):
                after(wanted, go_on)
                return
            if wanted not in arrived:
                awaited = wanted
                return
            arrived.discard(wanted)

    go_on()
    while len(ends) < num_rounds:
        now, _, happens = heapq.heappop(events)
        happens()
    return ends


def _arrays(values: Sequence[float]) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(value) for value in values)


@st.composite
def group_lists(draw: st.DrawFn) -> list[GroupStep]:
    num_stages = draw(st.integers(1, 5))
    seconds = st.integers(0, 50).map(float)
    some = st.integers(1, 50).map(float)

    def many(count: int, values: st.SearchStrategy[float] = seconds) -> tuple[np.ndarray, ...]:
        return _arrays(draw(st.lists(values, min_size=count, max_size=count)))

    return [
        GroupStep(*many(2), many(num_stages, some), many(num_stages), many(num_stages - 1), draw(seconds))
        for _ in range(draw(st.integers(1, num_stages)))
    ]


@given(group_lists())
@settings(max_examples=200, deadline=None)
def test_steady_rounds_are_those_of_a_queue_of_events(groups: list[GroupStep]) -> None:
    ends = slow_rounds(groups, 120)
    assert float(simulate(groups).seconds) == pytest.approx((ends[119] - ends[59]) / 60, rel=0.002)


@given(group_lists(), st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_a_round_is_no_shorter_than_any_part_allows(groups: list[GroupStep], more: int) -> None:
    found, last = simulate(groups), len(groups[0].computing) - 1
    stages = [float(sum(group.computing[s] + group.reducing[s] for group in groups)) for s in range(last + 1)]
    stages[last] += float(sum(group.draft + group.finish for group in groups))
    alone = [float(group.alone) for group in groups]
    assert max(*stages, *alone) * (1 - 1e-6) <= float(found.seconds) <= sum(alone) * (1 + 1e-6)
    assert -1e-9 <= float(found.idle) <= 1
    slower = [GroupStep(g.draft, g.telling + more, g.computing, g.reducing, g.handing, g.finish) for g in groups]
    assert float(simulate(slower).seconds) >= float(found.seconds) * (1 - 1e-6)


# ------------------------------------------------------------------------------------------- known cases


def test_one_rank_takes_what_a_step_takes_and_auto_chooses_the_same() -> None:
    costs = make_costs(rest=0.003, draft=0.004)
    acceptance = AcceptanceModel.assumed(BY_RANK.tolist())
    planner = Planner(SHAPE, costs, Cluster(NO_LINK, NO_LINK), BY_RANK)
    for size in (1, 3, 16, 200):
        best, plain = planner.predict(1, 1, size)
        optimizer = RankChoice(costs.step, acceptance)
        budget, rates = optimizer.choose(size), optimizer.rates(size)
        expected = max(rates) if budget.max_nodes else rates[0]
        assert best.tokens_per_second == pytest.approx(float(expected))
        assert plain.tokens_per_second == pytest.approx(float(rates[0]))
        assert (best.communication, best.idle) == (0, pytest.approx(0, abs=1e-6))


def test_tensor_ranks_share_what_divides() -> None:
    rows = np.asarray([1, 16, 64])
    whole = make_split(1, 1).computing(0, rows)
    assert whole == pytest.approx(make_costs().step.target(rows))
    for num_ranks in (2, 4):  # as many KV heads as ranks, or more
        layers = whole * (1 - SHAPE.head_share) / num_ranks
        assert make_split(num_ranks, 1).computing(0, rows) == pytest.approx(layers + whole * SHAPE.head_share)
    assert make_split(8, 1).part == pytest.approx((540_000 / 8 + 60_000 / 4) / 600_000)  # each has a KV head of its own


def test_a_layer_that_is_split_takes_more_than_its_part() -> None:
    costs = RankCosts(make_costs().step, Curve((1e9,), (0.001,)), 0.0)
    split = Split(2, 2, SHAPE, costs, Cluster(NO_LINK, NO_LINK))
    assert split.computing(1, 4) == pytest.approx(float(make_split(2, 2).computing(1, 4)) + 6 * 0.001)


def test_sums_over_tensor_ranks_cross_the_link_twice_a_layer() -> None:
    split = make_split(4, 2, Link(0.002, 1e6), message=1e-5)
    a_sum = 3e-5 + 0.002 + 3 * 5 * 256 * 4 / 1e6
    assert split.reducing(0, 5) == pytest.approx(6 * 2 * a_sum)
    assert make_split(1, 2, Link(0.002, 1e6)).reducing(0, 5) == 0


def test_ranks_of_one_machine_use_its_own_links() -> None:
    slow = Link(1.0, 1e6)
    inside, across = make_split(2, 2, slow, per_machine=4), make_split(2, 2, slow, per_machine=2)
    assert inside.reducing(0, 1) < 0.001
    assert inside.handing(0, 1) < 0.001
    assert inside.telling(1, 1) < 0.001
    assert across.reducing(0, 1) < 0.001
    assert across.handing(0, 1) == pytest.approx(1 + 2 * 256 * 4 / 1e6)  # two ranks send at once
    assert across.telling(1, 1) > 1
    wide = make_split(4, 1, slow, per_machine=2)
    assert wide.reducing(0, 1) == pytest.approx(24 * (1 + 2 * 2 * 256 * 4 / 1e6))


def two_ranks(split: Split, delay: float, num_steps: int) -> float:
    """Seconds of a step: rank 0 tells rank 1 of it, and both wait for the other's part of each sum."""
    free, done = [0.0, 0.0], []
    for _ in range(num_steps):
        free = [free[0], max(free[1], free[0] + delay)]
        for _ in range(2 * split.shape.num_layers):
            sent = [one + float(split.computing(0, 1)) / (2 * split.shape.num_layers) for one in free]
            free = [max(sent[0], sent[1] + delay), max(sent[1], sent[0] + delay)]
        free[0] += split.costs.step.rest
        done.append(free[0])
    return (done[-1] - done[num_steps // 2 - 1]) / (num_steps - num_steps // 2)


@pytest.mark.parametrize("rest", [0.0, 0.03])
def test_ranks_that_hear_late_of_a_pass_catch_up(rest: float) -> None:
    split = make_split(2, 1, Link(0.01, 1e15), rest=rest)
    found = run_round(split, 1, [0], [0])
    assert found.seconds == pytest.approx([two_ranks(split, 0.01, 8)], rel=1e-3)
    assert found.seconds == pytest.approx([24 * 0.01 + float(split.computing(0, 1)) + rest], rel=1e-3)


def test_one_request_passes_the_stages_one_after_the_other() -> None:
    link = Link(0.01, 1e15)
    found = run_round(make_split(1, 3, link, rest=0.002, draft=0.004), 1, [0, 3], [0, 3])
    messages = 3 * 0.01  # to the first stage, and from stage to stage
    assert found.seconds == pytest.approx([0.1 + 0.002 + messages, 0.1 + 0.002 + 3 * 0.004 + messages])
    assert found.communication == pytest.approx(messages / found.seconds)
    assert found.idle == pytest.approx(1 - (found.seconds - messages) / 3 / found.seconds)


@pytest.mark.parametrize(
    ("family", "num_attending", "num_layers", "splits"),
    [
        ("llama", 2, 2, {(1, 1), (1, 2), (2, 1)}),
        ("qwen3_next", 1, 3, {(1, 1), (1, 2), (2, 1)}),
        ("nemotron_h", 1, 5, {(1, 1), (1, 2), (2, 1)}),
        ("falcon_h1", 2, 2, {(1, 1), (2, 1)}),
        ("mamba2", 0, 2, {(1, 1)}),
    ],
)
def test_layers_without_attention_have_no_keys_and_are_split_as_their_family_can_be(
    family: str, num_attending: int, num_layers: int, splits: set[tuple[int, int]], tmp_path: Path
) -> None:
    shape = TargetShape.from_folder(save_model(tmp_path, family), 2.0)
    assert shape.num_layers == num_layers
    assert shape.kv_parameters == 2 * 32 * 2 * 8 * num_attending // num_layers
    assert set(splits_for(shape, 2)) == splits


def test_as_many_groups_as_stages_keep_them_busy() -> None:
    shape = TargetShape(12, 256, 8, 4, 600_000, 60_000, 0, 2.0)  # without a head stages are alike
    split = Split(1, 4, shape, make_costs(), Cluster(NO_LINK, NO_LINK))
    one, four = run_round(split, 1, [0], [0]), run_round(split, 4, [0], [0])
    assert one.seconds == pytest.approx([0.1])
    assert four.seconds == pytest.approx([0.1])  # four tokens in the time of one
    assert (one.idle[0], four.idle[0]) == (pytest.approx(0.75), pytest.approx(0.0, abs=1e-5))
    late = run_round(Split(1, 4, shape, make_costs(), Cluster(Link(0.1, 1e15), NO_LINK)), 4, [0], [0])
    assert late.seconds == pytest.approx([0.5])


def test_groups_are_as_equal_as_can_be() -> None:
    assert groups_of(7, 3) == [3, 2, 2]
    assert groups_of(2, 4) == [1, 1]
    assert groups_of(1, 1) == [1]


def test_late_links_make_trees_larger() -> None:
    near, far = (
        Planner(SHAPE, make_costs(draft=0.02), Cluster(Link(late, 1e9), NO_LINK), BY_RANK) for late in (1e-6, 0.05)
    )
    (near_best, _), (far_best, _) = near.predict(4, 1, 1), far.predict(4, 1, 1)
    assert far_best.num_nodes > near_best.num_nodes
    assert far_best.speedup > near_best.speedup
    assert far_best.tokens_per_second < near_best.tokens_per_second


def test_only_splits_that_can_be() -> None:
    assert set(splits_for(SHAPE, 1)) == {(1, 1)}
    assert set(splits_for(SHAPE, 4)) == {(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert max(tensor for tensor, _ in splits_for(SHAPE, 1000)) == 8
    assert max(pipeline for _, pipeline in splits_for(SHAPE, 1000)) == 12


@pytest.mark.parametrize("size", [1, 8, 50])
def test_more_machines_never_give_less(size: int) -> None:
    config = SimulationConfig(machines=(1, 2, 4, 16, 100), together=(size,), layer_overhead="10us")
    found = plan_machines(config, SHAPE, make_costs(draft=0.001).step, BY_RANK.tolist())
    rates = [prediction.tokens_per_second for prediction in found]
    assert rates == sorted(rates)
    assert rates[-1] > 1.3 * rates[0]
    assert all(one.tensor * one.pipeline * one.replicas <= one.machines for one in found)
    assert found == plan_machines(config, SHAPE, make_costs(draft=0.001).step, BY_RANK.tolist())


def test_what_does_not_fit_is_split() -> None:
    measured = make_costs().step
    config = SimulationConfig(machines=(1, 4), together=(8,), device_memory="6MiB")  # weights take 15 MiB
    (one,) = plan_machines(config, SHAPE, measured, BY_RANK.tolist())
    assert (one.machines, one.tensor * one.pipeline) == (4, 4)
    with pytest.raises(ValueError, match=r"device_memory: 0.00 GiB hold no part"):
        plan_machines(SimulationConfig(device_memory="1MiB"), SHAPE, measured, BY_RANK.tolist())


def test_other_machines_are_faster_by_the_given_factors() -> None:
    measured = make_costs(rest=0.02, draft=0.01).step
    twice = SimulationConfig(scale=2.0).costs(measured, SHAPE).step
    assert twice.target.seconds == pytest.approx(measured.target.seconds / 2)
    assert float(twice.draft_level(4)) == pytest.approx(0.005)
    assert twice.rest == pytest.approx(0.01)
    rate = SHAPE.num_bytes / 0.1  # what one row took here
    reads = SimulationConfig(memory_bandwidth=f"{4 * rate / 1e6:.6f}MB/s").costs(measured, SHAPE).step
    assert reads.target.seconds == pytest.approx([0.025, 0.025, 1.525])
    slow = SimulationConfig(scale=4.0, memory_bandwidth=f"{2 * rate / 1e6:.6f}MB/s").costs(measured, SHAPE).step
    level, levels = float(measured.draft_level(1)), measured.draft_level.seconds
    assert slow.draft_level.seconds == pytest.approx(level / 2 + (levels - level) / 4)  # it waits for memory, too


# ------------------------------------------------------------------------------------------- the engine


class Pipeline(ModelRunner):
    """A target of several stages in a time of its own: the engine decides what is begun and awaited when."""

    def __init__(self, inner: ModelRunner, max_in_flight: int) -> None:
        self.loaded, self.cache, self.tensors = inner.loaded, inner.cache, inner.tensors
        self.graphs, self.padded, self.num_replaced = inner.graphs, inner.padded, inner.num_replaced
        self.max_in_flight = max_in_flight
        self.now = 0.0
        self.rounds: list[float] = []  # when each pass ended
        self._free = [0.0] * (max_in_flight - 1)

    def begin(self, pieces: Sequence[Piece]) -> "Underway":
        times = step_of(self.max_in_flight, len(pieces))
        self.now += float(times.draft)
        arrived = self.now + float(times.telling)
        for stage in range(self.max_in_flight - 1):
            self._free[stage] = max(self._free[stage], arrived) + float(times.computing[stage])
            arrived = self._free[stage] + float(times.handing[stage])
        return Underway(self, pieces, arrived)


@dataclass
class Underway:
    """A pass of it."""

    pipeline: Pipeline
    pieces: Sequence[Piece]
    arrived: float

    def wait(self) -> Tensor:
        times = step_of(self.pipeline.max_in_flight, len(self.pieces))
        self.pipeline.now = max(self.pipeline.now, self.arrived) + float(times.computing[-1]) + times.finish
        self.pipeline.rounds.append(self.pipeline.now)
        return self.pipeline.forward(self.pieces)


def step_of(num_stages: int, size: int) -> GroupStep:
    """Times that tell groups of different sizes apart."""
    stages = [1.0 + 0.5 * stage + 0.25 * size for stage in range(num_stages)]
    none = (0.0,) * num_stages
    return GroupStep(np.asarray(0.125 * size), np.asarray(0.5), _arrays(stages), _arrays(none),
                     _arrays((0.25,) * (num_stages - 1)), 0.125)  # fmt: skip


@pytest.mark.parametrize(("num_stages", "num_requests"), [(1, 2), (2, 1), (2, 2), (2, 3), (3, 3), (3, 5), (3, 7)])
def test_the_engine_keeps_stages_busy_as_simulated(
    num_stages: int, num_requests: int, runner_of: Callable[..., ModelRunner]
) -> None:
    target = Pipeline(resized(runner_of("llama"), 600), num_stages)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    requests = [make_request(str(i), prompt, params) for i, prompt in enumerate(random_prompts([3] * num_requests))]
    run(make_engine(target, max_num_batched_tokens=64), requests)
    groups = groups_of(num_requests, num_stages)
    each = len(groups)
    steady = target.rounds[10 * each : 30 * each : each]
    assert all(request.num_output == 40 for request in requests)
    found = simulate([step_of(num_stages, size) for size in groups])
    assert (steady[-1] - steady[0]) / (len(steady) - 1) == pytest.approx(float(found.seconds), rel=0.01)


# ------------------------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "seconds"), [("1ms", 0.001), ("0.5 ms", 0.0005), ("20us", 2e-5), ("2s", 2.0), (".5S", 0.5), ("7ns", 7e-9)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds("x", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "1", "ms", "-1ms", "1 min", "1e3ms", "nan s", "99999s", "1ms 2ms"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"link_latency: .* is not a time"):
        parse_seconds("link_latency", text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1Gbit", 1.25e8), ("100 Mbit/s", 1.25e7), ("8bit", 1), ("12GB/s", 1.2e10), ("5kbps", 625), ("1 TB/s", 1e12)],
)
def test_rates(text: str, rate: float) -> None:
    unit = rate if text != "5kbps" else 5000.0  # B of bps is bytes, as tc has it
    assert parse_rate("x", text) == pytest.approx(unit)


@pytest.mark.parametrize("text", ["", "1", "0Gbit", "1bit", "Gbit", "-1Gbit", "1Xbit", "1e99GB/s", "9" * 30 + "GB"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match=r"link_bandwidth: .* is no rate"):
        parse_rate("link_bandwidth", text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machines": ()}, "machines: none given"),
        ({"machines": (2, 2)}, "machines: 2, 2 given"),
        ({"machines": (5000,)}, "machines must be a whole number from 1 to 1024"),
        ({"together": (0,)}, "batch must be"),
        ({"devices_per_machine": 0}, "devices_per_machine must be"),
        ({"scale": 0.0}, "scale must be"),
        ({"scale": float("nan")}, "scale must be"),
        ({"link_latency": "1"}, "link_latency: '1' is not a time"),
        ({"inner_bandwidth": "fast"}, "inner_bandwidth: 'fast' is no rate"),
        ({"memory_bandwidth": "1"}, "memory_bandwidth: '1' is no rate"),
        ({"device_memory": "some"}, "device_memory"),
        ({"message_overhead": "-1us"}, "message_overhead: '-1us' is not a time"),
    ],
)
def test_bad_machines_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulationConfig(**changes)


# ------------------------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("pair")
    return str(save_model(root / "target")), str(save_model(root / "drafter"))


@pytest.fixture
def _costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cost_cache, "measure_costs", lambda *_, **__: make_costs(draft=0.001).step)


@pytest.mark.usefixtures("_costs")
def test_the_command_plans_past_the_machine(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", folders[0], "--drafter", folders[1], "--device", "cpu", "--acceptance", "0.8,0.1",
             "--machines", "1", "--machines", "1000", "--batch", "4", "--link-latency", "5ms", "--scale", "3",
             "--json", str(tmp_path / "x.json")]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        app(words)
    shown = capsys.readouterr()
    assert ended.value.code == 0, shown.err
    assert "joined by 5ms one way and 1Gbit; each device 3 times as fast" in shown.out
    numbers = json.loads((tmp_path / "x.json").read_text())
    assert [(one["machines"], one["batch_size"]) for one in numbers["simulation"]] == [(1, 4), (1000, 4)]
    assert numbers["plan"]["acceptance_by_rank"][:2] == [0.8, 0.1]


def test_the_command_refuses_in_one_line(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["simulate", folders[0], "--link-latency", "soon"])
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert "--link-latency: 'soon' is not a time" in shown.err
    assert len(shown.err.splitlines()) == 1
