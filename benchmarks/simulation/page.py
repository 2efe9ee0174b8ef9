"""Prediction of the speed of a target split over several machines, from costs and acceptance measured here.

The machines are described by their links and by the speed of their devices relative to this machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.simulation.cluster import Cluster, RankCosts
from benchmarks.simulation.links import Link, parse_rate, parse_seconds
from benchmarks.simulation.plans import MAX_MACHINES, Planner, Prediction
from specinfer.bench.models import find_models
from specinfer.bench.options import check_distinct
from specinfer.cli.plan import PLAN
from specinfer.core.options import parse_size, setting
from specinfer.model.device import find_device
from specinfer.planning.options import PlanConfig
from specinfer.planning.plan import make_plan
from specinfer.planning.plan_page import plan_page
from specinfer.planning.target_shape import TargetShape, mean_bytes
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.reporting.files import options_of
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported

_PANEL = "Machines"
_NO_SIZE = (1e9,)  # size of a curve that is constant over the number of rows


@dataclass(frozen=True, slots=True)
class SimulationConfig(PlanConfig):
    """Options of the plan that is measured here, and the machines to simulate.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    plot: str | Path | None = None
    machines: tuple[int, ...] = setting(
        (1, 2, 4, 8, 16, 32, 64, 128, 256), _PANEL, "Number of machines. May be repeated. (default: 1, 2, 4, ... 256)"
    )
    together: tuple[int, ...] = setting(
        (1, 8, 64), _PANEL, "Batch size. May be repeated. (default: 1, 8 and 64)", name="batch"
    )
    devices_per_machine: int = setting(
        1, _PANEL, "Number of devices of each machine; one rank per device.", low=1, high=MAX_MACHINES
    )
    link_latency: str = setting("1ms", _PANEL, "One-way latency between machines.", metavar="TIME")
    link_bandwidth: str = setting("1Gbit", _PANEL, "Network bandwidth of each machine.", metavar="RATE")
    inner_latency: str = setting("20us", _PANEL, "Latency between devices of a machine.", metavar="TIME")
    inner_bandwidth: str = setting("10GB/s", _PANEL, "Bandwidth between devices of a machine.", metavar="RATE")
    scale: float = setting(
        1.0, _PANEL, "Speed of each device relative to this machine.", low=0, high=1e6, low_open=True
    )
    memory_bandwidth: str | None = setting(
        None, _PANEL, "Memory bandwidth of each device. (default: by --scale)", metavar="RATE"
    )
    device_memory: int | str | None = setting(
        None, _PANEL, "Memory for the weights of a rank, such as 16GiB. (default: unlimited)", metavar="SIZE"
    )
    layer_overhead: str = setting("0us", _PANEL, "Additional time of a layer that is split.", metavar="TIME")
    message_overhead: str = setting("50us", _PANEL, "Processor time for sending a message.", metavar="TIME")

    def __post_init__(self) -> None:
        PlanConfig.__post_init__(self)
        check_distinct("machines", self.machines, MAX_MACHINES)
        check_distinct("batch", self.together, 4096)
        self.cluster  # noqa: B018 (checks the links)
        for name in ("layer_overhead", "message_overhead"):
            parse_seconds(name, getattr(self, name))
        if self.memory_bandwidth is not None:
            parse_rate("memory_bandwidth", self.memory_bandwidth)
        if self.device_memory is not None:
            parse_size("device_memory", self.device_memory)

    @property
    def cluster(self) -> Cluster:
        link, inner = (
            Link(
                parse_seconds(f"{name}_latency", getattr(self, f"{name}_latency")),
                parse_rate(f"{name}_bandwidth", getattr(self, f"{name}_bandwidth")),
            )
            for name in ("link", "inner")
        )
        return Cluster(link, inner, self.devices_per_machine)

    def costs(self, measured: CostModel, shape: TargetShape) -> RankCosts:
        """Return the costs of a device of these machines, derived from the costs measured here."""
        overhead = Curve(_NO_SIZE, (parse_seconds("layer_overhead", self.layer_overhead),))
        costs = RankCosts(measured, overhead, parse_seconds("message_overhead", self.message_overhead))
        read_scale = self.scale
        if self.memory_bandwidth is not None:
            own_rate = shape.num_bytes / float(measured.target(1))
            read_scale = parse_rate("memory_bandwidth", self.memory_bandwidth) / own_rate
        return costs.on_faster(self.scale, read_scale)


@reported
def run_simulation(config: SimulationConfig, progress: StageBar) -> Report[None]:
    """Measure costs and acceptance where unknown, and compare all splits and trees.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used; the message names it.
        RuntimeError: A request failed.
    """
    plan = PlanConfig(**{name: getattr(config, name) for name in PlanConfig.__dataclass_fields__})
    measured = make_plan(plan, progress)
    environment, target = measured.environment, find_models(config.model, config.drafters).target
    width = mean_bytes(target, environment.dtype, environment.quantization, find_device(config.device))
    predictions = plan_machines(config, TargetShape.from_folder(target, width), measured.costs, measured.by_rank)
    lines = [
        f"{config.model}: {environment.description}; machines joined by {config.link_latency} one way and "
        f"{config.link_bandwidth}; each device {config.scale:g} times as fast as this machine"
    ]
    table = Table(
        "simulation",
        "Expected speed on more machines: the best split and tree, simulated",
        (
            Value[Prediction]("batch_size", lambda one: one.batch_size, heading="batch"),
            Value[Prediction]("machines", lambda one: one.machines, heading="hosts"),
            Value[Prediction]("tensor_parallel", lambda one: one.tensor, heading="TP"),
            Value[Prediction]("pipeline_parallel", lambda one: one.pipeline, heading="PP"),
            Value[Prediction]("replicas", lambda one: one.replicas),
            Value[Prediction]("num_nodes", lambda one: one.num_nodes, heading="nodes"),
            Value[Prediction]("num_levels", lambda one: one.num_levels, heading="levels"),
            Value[Prediction]("ms_per_token", lambda one: 1000 * one.seconds_per_token, "{:.4g}", "ms/token"),
            Value[Prediction]("tokens_per_second", lambda one: one.tokens_per_second, "{:.4g}", "tokens/s"),
            Value[Prediction]("speedup", lambda one: one.speedup, "{:.2f}"),
            Value[Prediction]("communication_share", lambda one: one.communication, "{:.0%}", "messages"),
            Value[Prediction]("idle_share", lambda one: one.idle, "{:.0%}", "idle"),
            Value[Prediction]("tokens_per_pass", lambda one: one.tokens_per_pass, None),
        ),
        sorted(predictions, key=lambda one: (one.batch_size, one.machines)),
        "speedup: over plain decoding, split alike; messages: share of a step in which they are under way; idle: of a "
        "stage's time",
    )
    numbers = {"plan": replace(plan_page(measured), options=options_of(plan)).as_dict()}
    return Report(lines, (table,), environment=environment, numbers=numbers)


def plan_machines(
    config: SimulationConfig, shape: TargetShape, measured: CostModel, by_rank: Sequence[float]
) -> tuple[Prediction, ...]:
    """Return the best split and tree for each number of machines and batch size.

    Raises:
        ValueError: The target fits on none of the given numbers of machines.
    """
    planner = Planner(shape, config.costs(measured, shape), config.cluster, np.asarray(by_rank))
    memory = math.inf if config.device_memory is None else float(parse_size("device_memory", config.device_memory))
    found = [planner.best(number, size, memory) for number in config.machines for size in config.together]
    made = tuple(prediction for prediction in found if prediction is not None)
    if not made:
        raise ValueError(
            f"device_memory: {memory / 2**30:.2f} GiB hold no part of the target's {shape.num_bytes / 2**30:.2f} on at "
            f"most {max(config.machines)} machines; raise it, or machines"
        )
    return made


SIMULATE = replace(
    PLAN,
    name="simulate",
    config=SimulationConfig,
    run="benchmarks.simulation.page:run_simulation",
    help="Predict the speed of a target split over several machines.",
    moved={},
)
