"""A plan on a terminal, in tables and bars that fit 80 columns, and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from specinfer.planning.offload_plan import label_of
from specinfer.planning.plan_report import Choice, PlanReport, Streaming
from specinfer.policy.offload_choice import OffloadChoice, best_of
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
        f"{environment.precision} on {environment.device}\n{environment.num_threads} threads, {environment.cpu}"
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
    if report.offload_choices:
        _print_offload_choices(report, console)


def _print_offload_choices(report: PlanReport, console: Console) -> None:
    """Print what each drafter gives a streamed target, and the command line of the best."""
    best = best_of(report.offload_choices)
    assert report.streaming is not None
    num_layers = report.streaming.num_layers

    def text(one: OffloadChoice, value: str) -> str:
        return "" if one.num_resident is None else value

    columns = (
        Column[OffloadChoice]("drafter", lambda one: label_of(one.candidate.drafters), label=True),
        Column[OffloadChoice]("MiB", lambda one: f"{one.candidate.num_bytes / 2**20:.0f}"),
        Column[OffloadChoice]("layers kept", lambda one: text(one, f"{one.num_resident}/{num_layers}") or "no room"),
        Column[OffloadChoice]("s/pass", lambda one: text(one, f"{one.pass_seconds:.3g}")),
        Column[OffloadChoice]("tree", lambda one: text(one, f"{one.num_nodes}:{one.num_levels}")),
        Column[OffloadChoice]("tokens/s", lambda one: text(one, f"{one.tokens_per_second:.3g}")),
        Column[OffloadChoice]("speedup", lambda one: text(one, f"{one.speedup:.2f}")),
        Column[OffloadChoice]("", lambda one: "best" if one is best else "", label=True),
    )
    title = "Drafters within the memory budget: expected for one request, over no drafter"
    print_table(console, title, make_table(columns, report.offload_choices))
    assumed = [label_of(one.candidate.drafters) for one in report.offload_choices if not one.candidate.is_measured]
    if assumed:
        console.print(f"Acceptance is assumed for {' and '.join(assumed)}; name one to measure it.")
    assert report.command is not None
    console.print(f"\n{report.command}", highlight=False, soft_wrap=True, markup=False)


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
