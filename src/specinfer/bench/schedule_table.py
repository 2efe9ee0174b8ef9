"""A comparison of schedulers as tables on a terminal."""

from rich.console import Console

from specinfer.bench.schedule_plans import AUTO, LEARNED
from specinfer.bench.schedule_report import MIX, ScheduleReport
from specinfer.bench.table import new_table, print_models, print_table


def print_schedule(report: ScheduleReport, console: Console) -> None:
    """Print the speeds by part, and compare "auto" and the learned scheduler with the best fixed configuration."""
    print_models(report, console)
    parts = (*report.part_names, MIX)
    num_runs = len(report.arms[0].runs)
    best = report.best_fixed.name
    speeds, passes = new_table("arm", *parts), new_table("arm", "per pass", "nodes")
    for arm in report.arms:
        marked = f"[bold]{arm.name}[/bold]" if arm.name in (best, AUTO, LEARNED) else arm.name
        speeds.add_row(marked, *(f"{arm.tokens_per_second(part):.1f}" for part in parts))
        passes.add_row(marked, f"{arm.tokens_per_pass(MIX):.2f}", f"{arm.nodes(MIX):.1f}")
    heading = f"Tokens per second, {num_runs} runs of each arm, {report.options['max_tokens']} tokens each"
    print_table(console, heading, speeds)
    console.print("tokens over seconds after the first token, all runs of a part together")
    print_table(console, "Tokens and guesses per pass over the mix", passes)
    ratios = new_table("part", AUTO, "by prompt", LEARNED, "by prompt")
    for part in parts:
        cells = []
        for name in (AUTO, LEARNED):
            spread = report.paired(name, best, part)
            cells += [
                f"{report.ratio(name, best, part):.3f}",
                f"{spread.median:.3f} ({spread.lower_quartile:.2f}-{spread.upper_quartile:.2f})",
            ]
        ratios.add_row(part, *cells)
    print_table(console, f"Against {best}, the best single configuration over the mix", ratios)
    console.print()
    console.print("the learned scheduler: " + ", ".join(f"{count} {name}" for name, count in report.fallbacks.items()))
    for arm in report.arms[1:]:
        if count := report.partings(arm.name):
            console.print(
                f"{arm.name}: {count} of {num_runs} outputs part from plain decoding in "
                f"{report.environment.precision} rounding"
            )
