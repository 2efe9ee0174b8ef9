"""A simulation as a table on a terminal; it fits 80 columns."""

from rich.console import Console

from specinfer.bench.simulation_report import Prediction, SimulationReport
from specinfer.bench.table import new_table, print_table


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
    table = new_table("batch", "hosts", "split", "tree", "ms/token", "tokens/s", "ratio", "talk", "idle")
    table.columns[0].justify = "right"
    for size in report.batch_sizes:
        rows = report.of_batch(size)
        for place, prediction in enumerate(rows):
            label = "" if place else str(size)
            table.add_row(label, *_cells(prediction), end_section=place == len(rows) - 1)
    print_table(console, "What to expect of more machines: the best split and tree, simulated", table)
    console.print(
        "split: tensor x pipeline, x replicas; tree: nodes/levels; ratio: over plain "
        "decoding, split alike; talk: share of a step in which messages are under way; idle: of a stage's time"
    )


def _cells(prediction: Prediction) -> tuple[str, ...]:
    copies = f" x{prediction.replicas}" if prediction.replicas > 1 else ""
    tree = f"{prediction.num_nodes}/{prediction.num_levels}" if prediction.num_nodes else "off"
    return (
        str(prediction.machines),
        f"{prediction.tensor}x{prediction.pipeline}{copies}",
        tree,
        _short(1000 * prediction.seconds_per_token),
        _short(prediction.tokens_per_second),
        f"{prediction.speedup:.2f}",
        f"{prediction.communication:.0%}",
        f"{prediction.idle:.0%}",
    )


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.4g}"
