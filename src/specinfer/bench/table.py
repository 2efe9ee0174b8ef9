"""A latency report as tables on a terminal."""

from collections.abc import Mapping
from typing import Protocol

from rich import box
from rich.console import Console
from rich.table import Table

from specinfer.bench.ceilings import Ceilings
from specinfer.bench.environment import Environment
from specinfer.bench.report import PLAIN, LatencyReport
from specinfer.bench.stages import HEADINGS

_UNBOUNDED = 1000  # columns


class Report(Protocol):
    """The common part of all reports on models: the options, and the environment of the measurement."""

    @property
    def options(self) -> Mapping[str, object]: ...

    @property
    def environment(self) -> Environment: ...


def print_report(report: LatencyReport, console: Console) -> None:
    """Print the models and environment, speeds, the parts of a pass, and acceptance."""
    environment = report.environment
    print_models(report, console)
    num_tokens: object = report.plain.runs[0].num_tokens
    if report.kinds:
        num_tokens = f"at most {report.options['max_tokens']}"
    num_runs = len(report.plain.runs)
    print_table(
        console,
        f"One request at a time: {report.num_prompts} prompts, {num_runs} runs of each tree, {num_tokens} tokens "
        "after the first; medians",
        _speed_table(report),
    )
    print_table(console, "Speedup over plain decoding, run by run", _speedup_table(report))
    if report.kinds:
        print_table(console, "By kind of prompt", _kind_table(report))
    print_table(console, "Mean time of one pass, ms", _pass_table(report))
    print_stages(report.ceilings, _stage_table(report), console)
    console.print()
    for arm in report.trees:
        if shares := arm.acceptance_by_depth:
            console.print(
                f"tree {arm.name}: guesses kept at depth 1, 2, ...: " + ", ".join(f"{share:.0%}" for share in shares)
            )
        if partings := report.partings(arm):
            console.print(
                f"tree {arm.name}: {len(partings)} of {len(arm.runs)} outputs part from plain decoding in "
                f"{environment.precision} rounding, the earliest after {min(partings)} tokens"
            )
        else:
            console.print(f"tree {arm.name}: the same tokens as plain decoding in all {len(arm.runs)} runs")


def print_models(report: Report, console: Console) -> None:
    """Print the models and the environment of the measurement."""
    environment = report.environment
    drafters = ", ".join(f"{name} {millions(n)}" for name, n in environment.drafter_parameters.items())
    console.print(
        f"[bold]{report.options['model']}[/bold]: target of {millions(environment.target_parameters)}, "
        f"drafters: {drafters or 'ngram'}; {environment.precision} on {environment.device}, "
        f"{environment.num_threads} threads, {environment.cpu}, at most {environment.peak_memory / 2**30:.2f} GiB held"
    )


def print_table(console: Console, title: str, table: Table) -> None:
    """Print a title and a table. Narrow terminals fold cells, and output to a file is not limited in width."""
    console.print(f"\n[bold]{title}[/bold]")
    console.print(table, width=None if console.is_terminal else _UNBOUNDED, crop=False)


def new_table(*headings: str, num_labels: int = 1) -> Table:
    """Return an empty table. Its first `num_labels` columns are labels, the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < num_labels else "right", overflow="fold")
    return table


def _speed_table(report: LatencyReport) -> Table:
    table = new_table("tree", "tokens/s", "ms/token", "tokens/pass", "guessed/pass")
    for arm in report.arms:
        table.add_row(
            arm.name,
            f"{arm.tokens_per_second.median:.4g}",
            f"{arm.ms_per_token.median:.4g}",
            f"{arm.tokens_per_pass:.2f}",
            f"{arm.guessed_per_pass:.1f}",
        )
    return table


def _speedup_table(report: LatencyReport) -> Table:
    table = new_table("tree", "speedup", "quartiles", "min-max", "with prompt")
    table.add_row(report.plain.name, "1.00", "", "", "1.00")
    for arm in report.trees:
        speedup = report.speedup_of(arm)
        table.add_row(
            arm.name,
            f"{speedup.median:.2f}",
            f"{speedup.lower_quartile:.2f}-{speedup.upper_quartile:.2f}",
            f"{speedup.min:.2f}-{speedup.max:.2f}",
            f"{report.request_speedup_of(arm).median:.2f}",
        )
    return table


def _kind_table(report: LatencyReport) -> Table:
    table = new_table("kind", "tree", "tokens/s", "tokens/pass", "speedup", "quartiles", num_labels=2)
    for kind, part in report.by_kind().items():
        table.add_row(kind, PLAIN, f"{part.plain.tokens_per_second.median:.4g}", "1.00", "1.00", "")
        for arm in part.trees:
            speedup = part.speedup_of(arm)
            table.add_row(
                "",
                arm.name,
                f"{arm.tokens_per_second.median:.4g}",
                f"{arm.tokens_per_pass:.2f}",
                f"{speedup.median:.2f}",
                f"{speedup.lower_quartile:.2f}-{speedup.upper_quartile:.2f}",
                end_section=arm is part.trees[-1],
            )
    return table


def _pass_table(report: LatencyReport) -> Table:
    table = new_table("tree", "draft", "target", "rest", "total")
    for arm in report.arms:
        split = arm.split
        parts = (f"{ms:.2f} ({ms / split.total:.0%})" for ms in (split.draft, split.target, split.rest))
        table.add_row(arm.name, *parts, f"{split.total:.2f}")
    return table


def _stage_table(report: LatencyReport) -> Table:
    table = new_table("tree", *HEADINGS, "total")
    for arm in report.arms:
        table.add_row(arm.name, *arm.stages.cells())
    return table


def print_stages(ceilings: Ceilings | None, table: Table, console: Console) -> None:
    """Print the stages of sampled steps, and the ceilings from which floors are computed."""
    print_table(console, "Sampled steps: ms of each stage, and its floor's share of it", table)
    console.print("floors: weights, keys, values and logits read once, all rows multiplied,", highlight=False)
    console.print(f"at what the device reaches: {ceilings}", highlight=False)


def millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M parameters"
