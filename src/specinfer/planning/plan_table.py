"""A plan on a terminal, in tables and bars that fit 80 columns, and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from specinfer.planning.plan_report import Choice, PlanReport, Streaming
from specinfer.reporting.plots import Panel, Series, draw_plot
from specinfer.reporting.tables import Column, make_table, millions, print_table

_BAR = 34  # characters of the longest bar
_SHORT_BAR = 12
_EIGHTHS = " ▏▎▍▌▋▊▉"
Cost = tuple[int, float]  # size, milliseconds


def print_plan(report: PlanReport, console: Console) -> None:
    """Print costs, acceptance, and the tree for each batch size."""
    environment = report.environment
    console.print(
        f"[bold]{report.options['model']}[/bold]: target of {millions(environment.target_parameters)}, "
        f"{environment.precision} on {environment.device}, {environment.num_threads} threads, {environment.cpu}"
    )
    if report.streaming is not None:
        console.print(_streaming(report.streaming), highlight=False)
    _print_costs("Cost of a target pass", "tokens", report.target_ms, console)
    _print_costs("Cost of growing trees by one level", "nodes", report.draft_ms, console)
    origin = "measured" if report.options["acceptance"] is None else "assumed"
    rates = ", ".join(f"{rate:.0%}" for rate in report.by_rank)
    console.print(f"\nAcceptance of the first, second, ... draft token at a node ({origin}): {rates}")
    most = max(choice.speedup for choice in report.choices)
    columns = (
        Column[Choice]("requests", lambda choice: str(choice.num_requests)),
        Column[Choice]("nodes each", lambda choice: str(choice.num_nodes) if choice.num_nodes else "off"),
        Column[Choice]("levels", lambda choice: str(choice.num_levels) if choice.num_nodes else ""),
        Column[Choice]("tokens/pass", lambda choice: f"{choice.tokens_per_pass:.2f}"),
        Column[Choice]("tokens/s", lambda choice: f"{choice.tokens_per_second:.4g}"),
        Column[Choice]("speedup", lambda choice: f"{choice.speedup:.2f}"),
        Column[Choice]("", lambda choice: bar(choice.speedup / most, _SHORT_BAR), label=True),
    )
    print_table(console, "Trees that auto chooses: expected, over plain decoding", make_table(columns, report.choices))


def _streaming(streaming: Streaming) -> str:
    resident = f"{streaming.num_resident} of {streaming.num_layers} layers stay"
    if not streaming.bytes_per_pass:
        return f"{resident}; nothing is read for a pass"
    rate = streaming.bytes_per_pass / streaming.seconds
    reads = f"{resident}; a pass reads {streaming.bytes_per_pass / 1e9:.2f} GB in {streaming.seconds:.2f} s"
    reads += f" ({rate / 1e9:.2f} GB/s)"
    return reads if streaming.bend is None else f"{reads}, and computing takes longer from {streaming.bend:.0f} rows on"


def _print_costs(title: str, unit: str, costs: Sequence[Cost], console: Console) -> None:
    most = max(time for _, time in costs)
    columns = (
        Column[Cost](unit, lambda cost: str(cost[0])),
        Column[Cost]("ms", lambda cost: f"{cost[1]:.2f}"),
        Column[Cost](f"ms/{unit.removesuffix('s')}", lambda cost: f"{cost[1] / cost[0]:.2f}"),
        Column[Cost]("", lambda cost: bar(cost[1] / most, _BAR), label=True),
    )
    print_table(console, title, make_table(columns, costs))


def bar(share: float, width: int) -> str:
    """Return a bar that fills this share of `width` characters, to an eighth of a character."""
    whole, eighths = divmod(round(8 * width * min(max(share, 0.0), 1.0)), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()


def plot_plan(report: PlanReport, path: str | Path) -> None:
    """Draw costs of passes, and expected speedup by batch size.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    costs = [
        Series(label, [time for _, time in points], x=[size for size, _ in points])
        for label, points in (("target pass", report.target_ms), ("draft level", report.draft_ms))
    ]
    trees = [f"{one.num_nodes} nodes\n{one.num_levels} levels" if one.num_nodes else "off" for one in report.choices]
    speedups = [choice.speedup for choice in report.choices]
    notes = [f"{speedup:.2f}\n{tree}" for speedup, tree in zip(speedups, trees, strict=True)]
    panels = [
        Panel("Cost of the parts of a step", costs, counts=True, log=True, label="milliseconds",
              place_label="tokens of the pass, nodes of the level", legend="inside"),
        Panel("Expected speedup, and the tree of each request", [Series("speedup", speedups, notes=notes)], kind="bars",
              names=[str(choice.num_requests) for choice in report.choices], levels=(1.0,),
              place_label="requests that run together", top=1.3 * max(speedups)),
    ]  # fmt: skip
    model = Path(str(report.options["model"])).name
    draw_plot(path, f"{model}: {report.environment.description}", panels, width=11)
