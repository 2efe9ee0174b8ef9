"""A simulation as a table on a terminal that fits 80 columns, and as a plot."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from specinfer.planning.simulation_report import Prediction, SimulationReport
from specinfer.reporting.plots import Panel, Series, draw_plot
from specinfer.reporting.tables import Column, print_rows


def print_simulation(report: SimulationReport, console: Console) -> None:
    """Print the best split and tree by batch size and number of machines."""
    options = report.options
    inner = (
        f"; {options['per_machine']} devices each, {options['inner_latency']} and {options['inner_bandwidth']} "
        "between them"
    )
    console.print(
        f"\nmachines joined by {options['link_latency']} one way and {options['link_bandwidth']}"
        + (inner if options["per_machine"] != 1 else "")
        + f"; each device {options['scale']:g} times as fast as this machine"
        + (f", reading {options['memory_bandwidth']}" if options["memory_bandwidth"] else "")
    )
    columns = (
        Column[Prediction]("batch", lambda one: str(one.batch_size), once=True),
        Column[Prediction]("hosts", lambda one: str(one.machines)),
        Column[Prediction]("split", _split),
        Column[Prediction]("tree", lambda one: f"{one.num_nodes}/{one.num_levels}" if one.num_nodes else "off"),
        Column[Prediction]("ms/token", lambda one: _short(1000 * one.seconds_per_token)),
        Column[Prediction]("tokens/s", lambda one: _short(one.tokens_per_second)),
        Column[Prediction]("ratio", lambda one: f"{one.speedup:.2f}"),
        Column[Prediction]("talk", lambda one: f"{one.communication:.0%}"),
        Column[Prediction]("idle", lambda one: f"{one.idle:.0%}"),
    )
    rows = [prediction for size in report.batch_sizes for prediction in report.of_batch(size)]
    print_rows(console, "Expected speed on more machines: the best split and tree, simulated", columns, rows)
    console.print(
        "split: tensor x pipeline, x replicas; tree: nodes/levels; ratio: over plain "
        "decoding, split alike; talk: share of a step in which messages are under way; idle: of a stage's time"
    )


def _split(prediction: Prediction) -> str:
    replicas = f" x{prediction.replicas}" if prediction.replicas > 1 else ""
    return f"{prediction.tensor}x{prediction.pipeline}{replicas}"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.4g}"


def plot_simulation(report: SimulationReport, path: str | Path) -> None:
    """Draw speed by number of machines, and the share of communication.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """

    def panel(title: str, label: str, value: Callable[[Prediction], float], *, log: bool = False) -> Panel:
        series = [
            Series(f"{size} together", [value(one) for one in report.of_batch(size)],
                   x=[one.machines for one in report.of_batch(size)])
            for size in report.batch_sizes
        ]  # fmt: skip
        return Panel(title, series, counts=True, log=log, label=label, place_label="machines", legend="inside")

    options, plan = report.options, report.plan
    panels = [
        panel("Throughput", "tokens per second, all requests", lambda one: one.tokens_per_second, log=True),
        panel("Time of a token of one request", "milliseconds", lambda one: 1000 * one.seconds_per_token, log=True),
        panel("Messages under way", "% of a step", lambda one: 100 * one.communication),
    ]
    title = (
        f"{Path(str(plan.options['model'])).name}: {plan.environment.description}, machines joined by "
        f"{options['link_latency']} and {options['link_bandwidth']}, simulated"
    )
    draw_plot(path, title, panels, width=13)
