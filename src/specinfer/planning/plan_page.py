"""The page of a plan: tables and bars that fit 80 columns, and a plot."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from specinfer.planning.offload_plan import label_of
from specinfer.planning.plan_report import Choice, Plan, Streaming
from specinfer.policy.offload_choice import OffloadChoice, best_of
from specinfer.reporting.plots import Panel, Series, draw_plot
from specinfer.reporting.report import Report, Table, Value
from specinfer.reporting.tables import millions

_BAR = 34  # characters of the longest bar
_SHORT_BAR = 12
_EIGHTHS = " ▏▎▍▌▋▊▉"
Cost = tuple[int, float]  # size, milliseconds


def plan_page(plan: Plan) -> Report[Plan]:
    """Return the report: costs, acceptance, and the tree for each batch size."""
    environment = plan.environment
    lines = [
        f"[bold]{plan.config.model}[/bold]: target of {millions(environment.target_parameters)}, "
        f"{environment.precision} on {environment.device}\n{environment.num_threads} threads, {environment.cpu}",
        *([] if plan.streaming is None else [_streaming(plan.streaming)]),
        acceptance_line(plan.by_rank, "measured" if plan.config.acceptance is None else "assumed"),
    ]
    tables: list[Table[Any]] = [
        _costs_table("Cost of a target pass", "tokens", plan.target_ms),
        _costs_table("Cost of growing trees by one level", "nodes", plan.draft_ms),
        _choices_table(plan.choices),
        *([] if plan.streaming is None else [_offload_table(plan, plan.streaming.num_layers)]),
    ]
    last = [] if plan.command is None else ["", escape(plan.command)]
    return Report(lines, tables, plan, environment, plan.as_dict(), last, partial(plot_plan, plan))


def acceptance_line(by_rank: Sequence[float], origin: str) -> str:
    rates = ", ".join(f"{rate:.0%}" for rate in by_rank)
    return f"Acceptance of the first, second, ... draft token at a node ({origin}): {rates}"


def _choices_table(choices: Sequence[Choice]) -> Table[Choice]:
    most = max(choice.speedup for choice in choices)
    values = (
        Value[Choice]("requests", lambda choice: choice.num_requests),
        Value[Choice]("nodes each", lambda choice: choice.num_nodes or "off"),
        Value[Choice]("levels", lambda choice: choice.num_levels if choice.num_nodes else None),
        Value[Choice]("tokens/pass", lambda choice: choice.tokens_per_pass, "{:.2f}"),
        Value[Choice]("tokens/s", lambda choice: choice.tokens_per_second, "{:.4g}"),
        Value[Choice]("speedup", lambda choice: choice.speedup, "{:.2f}"),
        Value[Choice]("", lambda choice: bar(choice.speedup / most, _SHORT_BAR), label=True),
    )
    return Table("", "Trees that auto chooses: expected, over plain decoding", values, choices)


def _offload_table(plan: Plan, num_layers: int) -> Table[OffloadChoice]:
    """Return what each drafter gives a streamed target."""
    choices = plan.offload_choices
    best = best_of(choices) if choices else None

    def fitting(key: str, read: Callable[[OffloadChoice], object], form: str = "{}") -> Value[OffloadChoice]:
        return Value(key, lambda choice: None if choice.num_resident is None else read(choice), form)

    def layers(choice: OffloadChoice) -> str:
        return "no room" if choice.num_resident is None else f"{choice.num_resident}/{num_layers}"

    values = (
        Value[OffloadChoice]("drafter", lambda choice: label_of(choice.candidate.drafters)),
        Value[OffloadChoice]("MiB", lambda choice: choice.candidate.num_bytes / 2**20, "{:.0f}"),
        Value[OffloadChoice]("layers kept", layers),
        fitting("s/pass", lambda choice: choice.pass_seconds, "{:.3g}"),
        fitting("tree", lambda choice: f"{choice.num_nodes}:{choice.num_levels}"),
        fitting("tokens/s", lambda choice: choice.tokens_per_second, "{:.3g}"),
        fitting("speedup", lambda choice: choice.speedup, "{:.2f}"),
        Value[OffloadChoice]("", lambda choice: "best" if choice is best else None, label=True),
    )
    assumed = [label_of(choice.candidate.drafters) for choice in choices if not choice.candidate.is_measured]
    note = f"Acceptance is assumed for {' and '.join(assumed)}; name one to measure it." if assumed else ""
    title = "Drafters within the memory budget: expected for one request, over no drafter"
    return Table("", title, values, choices, note)


def _streaming(streaming: Streaming) -> str:
    resident = f"{streaming.num_resident} of {streaming.num_layers} layers stay"
    if not streaming.bytes_per_pass:
        return f"{resident}; nothing is read for a pass"
    rate = streaming.bytes_per_pass / streaming.seconds
    reads = f"{resident}; a pass reads {streaming.bytes_per_pass / 1e9:.2f} GB in {streaming.seconds:.2f} s"
    reads += f" ({rate / 1e9:.2f} GB/s)"
    return reads if streaming.bend is None else f"{reads}, and computing takes longer from {streaming.bend:.0f} rows on"


def _costs_table(title: str, unit: str, costs: Sequence[Cost]) -> Table[Cost]:
    most = max(time for _, time in costs)
    values = (
        Value[Cost](unit, lambda cost: cost[0]),
        Value[Cost]("ms", lambda cost: cost[1], "{:.2f}"),
        Value[Cost](f"ms/{unit.removesuffix('s')}", lambda cost: cost[1] / cost[0], "{:.2f}"),
        Value[Cost]("", lambda cost: bar(cost[1] / most, _BAR), label=True),
    )
    return Table("", title, values, costs)


def bar(share: float, width: int) -> str:
    """Return a bar that fills this share of `width` characters, to an eighth of a character."""
    whole, eighths = divmod(round(8 * width * min(max(share, 0.0), 1.0)), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()


def plot_plan(plan: Plan, path: str | Path) -> None:
    """Draw costs of passes, and expected speedup by batch size.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    costs = [
        Series(label, [time for _, time in points], x=[size for size, _ in points])
        for label, points in (("target pass", plan.target_ms), ("draft level", plan.draft_ms))
    ]
    trees = [f"{one.num_nodes} nodes\n{one.num_levels} levels" if one.num_nodes else "off" for one in plan.choices]
    speedups = [choice.speedup for choice in plan.choices]
    notes = [f"{speedup:.2f}\n{tree}" for speedup, tree in zip(speedups, trees, strict=True)]
    panels = [
        Panel("Cost of the parts of a step", costs, counts=True, log=True, label="milliseconds",
              place_label="tokens of the pass, nodes of the level", legend="inside"),
        Panel("Expected speedup, and the tree of each request", [Series("speedup", speedups, notes=notes)], kind="bars",
              names=[str(choice.num_requests) for choice in plan.choices], levels=(1.0,),
              place_label="requests that run together", top=1.3 * max(speedups)),
    ]  # fmt: skip
    draw_plot(path, f"{Path(plan.config.model).name}: {plan.environment.description}", panels, width=11)
