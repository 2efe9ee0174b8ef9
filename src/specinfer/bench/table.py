"""A latency report as tables on a terminal."""

from rich.console import Console
from rich.table import Table

from specinfer.bench.report import Arm, LatencyReport


def print_report(report: LatencyReport, console: Console) -> None:
    """Speeds, the parts of a pass, acceptance, and where it was measured."""
    environment = report.environment
    drafters = ", ".join(f"{name} {_millions(n)}" for name, n in environment.drafter_parameters.items())
    console.print(
        f"[bold]{report.options['model']}[/bold]: target of {_millions(environment.target_parameters)}, "
        f"drafters: {drafters or 'ngram'}; {environment.dtype} on {environment.device}, "
        f"{environment.num_threads} threads, {environment.cpu}"
    )
    console.print(_speed_table(report))
    console.print(_pass_table(report))
    for arm in report.trees:
        if shares := arm.acceptance_by_depth:
            console.print(
                f"tree {arm.name}: guesses kept at depth 1, 2, ...: " + ", ".join(f"{share:.0%}" for share in shares)
            )
        if partings := report.partings(arm):
            console.print(
                f"tree {arm.name}: {len(partings)} of {len(arm.runs)} outputs part from plain decoding in "
                f"{environment.dtype} rounding, the earliest after {min(partings)} tokens"
            )
        else:
            console.print(f"tree {arm.name}: the same tokens as plain decoding in all {len(arm.runs)} runs")


def _speed_table(report: LatencyReport) -> Table:
    first = report.plain.runs[0]
    table = Table(
        title=f"One request at a time: {report.num_prompts} prompts, {len(report.plain.runs)} runs of each tree, "
        f"{first.num_tokens} tokens after the first; medians"
    )
    table.add_column("tree")
    for heading in ("tokens/s", "ms/token", "speedup", "quartiles", "min-max", "with prompt", "tokens/pass"):
        table.add_column(heading, justify="right")
    for arm in report.arms:
        table.add_row(
            arm.name,
            f"{arm.tokens_per_second.median:.4g}",
            f"{arm.ms_per_token.median:.4g}",
            *_speedup_cells(report, arm),
            f"{arm.tokens_per_pass:.2f}",
        )
    return table


def _speedup_cells(report: LatencyReport, arm: Arm) -> tuple[str, str, str, str]:
    if arm is report.plain:
        return ("1.00", "", "", "1.00")
    speedup = report.speedup_of(arm)
    return (
        f"{speedup.median:.2f}",
        f"{speedup.lower_quartile:.2f}-{speedup.upper_quartile:.2f}",
        f"{speedup.min:.2f}-{speedup.max:.2f}",
        f"{report.request_speedup_of(arm).median:.2f}",
    )


def _pass_table(report: LatencyReport) -> Table:
    table = Table(title="Mean time of one pass, ms")
    table.add_column("tree")
    for heading in ("draft", "target", "rest", "total", "guessed/pass"):
        table.add_column(heading, justify="right")
    for arm in report.arms:
        split = arm.split
        parts = (f"{ms:.2f} ({ms / split.total:.0%})" for ms in (split.draft, split.target, split.rest))
        table.add_row(arm.name, *parts, f"{split.total:.2f}", f"{arm.guessed_per_pass:.1f}")
    return table


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M parameters"
