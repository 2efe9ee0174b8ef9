"""A plan as tables and bars on a terminal; each fits 80 columns."""

from collections.abc import Sequence

from rich.console import Console

from specinfer.bench.plan_report import PlanReport, Streaming
from specinfer.bench.table import millions, new_table, print_table

_BAR = 34  # characters of the longest bar
_SHORT_BAR = 12
_EIGHTHS = " ▏▎▍▌▋▊▉"


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
    chances = ", ".join(f"{chance:.0%}" for chance in report.by_rank)
    console.print(f"\nThe first, second, ... guess at a node is what the target says ({origin}): {chances}")
    table = new_table("requests", "nodes each", "levels", "tokens/pass", "tokens/s", "speedup", "")
    table.columns[0].justify, table.columns[-1].justify = "right", "left"
    most = max(choice.speedup for choice in report.choices)
    for choice in report.choices:
        tree = (str(choice.num_nodes), str(choice.num_levels)) if choice.num_nodes else ("off", "")
        table.add_row(
            str(choice.num_requests),
            *tree,
            f"{choice.tokens_per_pass:.2f}",
            f"{choice.tokens_per_second:.4g}",
            f"{choice.speedup:.2f}",
            bar(choice.speedup / most, _SHORT_BAR),
        )
    print_table(console, "What auto chooses: expected, over plain decoding", table)


def _streaming(streaming: Streaming) -> str:
    held = f"{streaming.num_resident} of {streaming.num_layers} layers stay"
    if not streaming.bytes_per_pass:
        return f"{held}; nothing is read for a pass"
    rate = streaming.bytes_per_pass / streaming.seconds
    said = f"{held}; a pass reads {streaming.bytes_per_pass / 1e9:.2f} GB in {streaming.seconds:.2f} s"
    said += f" ({rate / 1e9:.2f} GB/s)"
    return said if streaming.bend is None else f"{said}, and computing takes longer from {streaming.bend:.0f} rows on"


def _print_costs(title: str, unit: str, costs: Sequence[tuple[int, float]], console: Console) -> None:
    table = new_table(unit, "ms", f"ms/{unit.removesuffix('s')}", "")
    table.columns[0].justify, table.columns[-1].justify = "right", "left"
    most = max(time for _, time in costs)
    for size, time in costs:
        table.add_row(str(size), f"{time:.2f}", f"{time / size:.2f}", bar(time / most, _BAR))
    print_table(console, title, table)


def bar(share: float, width: int) -> str:
    """Return a bar that fills this share of `width` characters, to an eighth of a character."""
    whole, eighths = divmod(round(8 * width * min(max(share, 0.0), 1.0)), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()
