"""A throughput report as tables on a terminal; each fits 80 columns."""

import math
from collections.abc import Iterator

from rich.console import Console

from specinfer.bench.stages import HEADINGS
from specinfer.bench.table import new_table, print_models, print_stages, print_table
from specinfer.bench.throughput_report import PARTS, BatchArm, BatchResult, ThroughputReport


def print_throughput(report: ThroughputReport, console: Console) -> None:
    """Print speeds, the parts of the time, and whether the tokens equal those of plain decoding."""
    print_models(report, console)
    options = report.options
    speeds = new_table("batch", "tree", "nodes", "tokens/s", "ratio", "quartiles", "in all", "ratio", num_labels=2)
    passes = new_table("batch", "tree", "tokens", "ms", *PARTS, num_labels=2)
    stages = new_table("batch", "tree", *HEADINGS, "total", num_labels=2)
    for result, arm, label in _rows(report):
        is_last = arm is result.arms[-1]
        rates = (f"{rate.median:.1f}" for rate in (arm.tokens_per_second, arm.total_tokens_per_second))
        ratio, quartiles, total_ratio = _ratios(result, arm)
        speeds.add_row(
            label, arm.name, f"{arm.nodes:.1f}", next(rates), ratio, quartiles, next(rates), total_ratio,
            end_section=is_last,
        )  # fmt: skip
        shares = (f"{share:.0%}" for share in arm.shares.values())
        passes.add_row(
            label, arm.name, f"{arm.tokens_per_pass:.2f}", f"{arm.ms_per_pass:.1f}", *shares, end_section=is_last
        )
        stages.add_row(label, arm.name, *arm.stages.cells(), end_section=is_last)
    heading = f"Requests that run together, {options['max_tokens']} tokens each; medians of batches"
    print_table(console, heading, speeds)
    console.print(
        "nodes: guesses of a request in a pass; tokens/s: of decoding, after all prompts were read, and in all; "
        "ratio: over plain decoding, batch by batch"
    )
    print_table(console, "Tokens of a request in a pass, its time, and the share of each part", passes)
    if report.kinds:
        _print_kinds(report, console)
    print_stages(report.ceilings, stages, console)
    console.print()
    for place in range(1, len(report.names)):
        console.print(_fidelity(report, place))


def _rows(report: ThroughputReport) -> Iterator[tuple[BatchResult, BatchArm, str]]:
    """Yield (result, arm, batch size) for each row. The batch size is empty except for its first arm."""
    for result in report.results:
        for place, arm in enumerate(result.arms):
            yield result, arm, "" if place else str(result.size)


def _print_kinds(report: ThroughputReport, console: Console) -> None:
    table = new_table("batch", "tree", *dict.fromkeys(report.kinds), num_labels=2)
    for result, arm, label in _rows(report):
        if arm is not result.plain:
            found = report.by_kind(result, arm).values()
            cells = ("" if math.isnan(tokens) else f"{tokens:.2f} {speedup:.2f}" for tokens, speedup in found)
            size = str(result.size) if arm is result.trees[0] else label
            table.add_row(size, arm.name, *cells, end_section=arm is result.arms[-1])
    print_table(console, "By kind of prompt: tokens of a request in a pass, its speed over plain decoding", table)


def _ratios(result: BatchResult, arm: BatchArm) -> tuple[str, str, str]:
    """Return the texts of the decoding ratio, its quartiles and the ratio of the whole time."""
    if arm is result.plain:
        return "1.00", "", "1.00"
    ratio, total = result.speedup_of(arm), result.total_speedup_of(arm)
    return f"{ratio.median:.2f}", f"{ratio.lower_quartile:.2f}-{ratio.upper_quartile:.2f}", f"{total.median:.2f}"


def _fidelity(report: ThroughputReport, place: int) -> str:
    num_outputs = sum(result.num_outputs for result in report.results)
    partings = [shared for result in report.results for shared in result.partings(result.arms[place])]
    if not partings:
        return f"tree {report.names[place]}: the same tokens as plain decoding in all {num_outputs} outputs"
    return (
        f"tree {report.names[place]}: {len(partings)} of {num_outputs} outputs part from plain decoding in "
        f"{report.environment.dtype} rounding, the earliest after {min(partings)} tokens"
    )
