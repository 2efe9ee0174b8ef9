"""Planning for other machines, from costs and acceptance measured here and the machines' given properties."""

from dataclasses import asdict, replace

from rich.console import Console

from specinfer.bench.loop import write_files
from specinfer.bench.models import find_models
from specinfer.model.device import find_device
from specinfer.planning.cluster import TargetShape
from specinfer.planning.options import PlanConfig
from specinfer.planning.plan import run_plan
from specinfer.planning.simulation_plans import SimulationConfig, plan_machines
from specinfer.planning.simulation_report import SimulationReport
from specinfer.planning.simulation_table import plot_simulation
from specinfer.planning.weight_bytes import mean_bytes
from specinfer.reporting.files import check_files


def run_simulation(plan: PlanConfig, machines: SimulationConfig, console: Console | None = None) -> SimulationReport:
    """Measure costs and acceptance where unknown, compare all splits and trees, and write the requested files.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used; the message names it.
        RuntimeError: A request failed.
    """
    check_files(plan.json, plan.plot)
    measured = run_plan(replace(plan, json=None, plot=None), console)
    environment, target = measured.environment, find_models(plan.model, plan.drafters).target
    width = mean_bytes(target, environment.dtype, environment.quantization, find_device(plan.device))
    shape = TargetShape.of(target, width)
    predictions = plan_machines(machines, shape, measured.costs, measured.by_rank)
    report = SimulationReport(predictions, measured, shape, asdict(machines))
    write_files(report, plan.json, plan.plot, plot_simulation)
    return report
