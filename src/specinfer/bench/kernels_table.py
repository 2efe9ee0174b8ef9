"""Terminal tables of pass times; each fits 80 columns."""

from rich.console import Console

from specinfer.bench.kernels_report import CONTEXT, LEVEL, PROMPT, TREE, ArmTimes, KernelsReport, Pass, prompt_rate
from specinfer.bench.report import Spread
from specinfer.bench.table import new_table, print_models, print_table


def print_kernels(report: KernelsReport, console: Console) -> None:
    """Print the memory bandwidth, the times of each arm by rows, and the other passes."""
    print_models(report, console)
    console.print(
        f"Native kernels: {report.kernels}. Memory is read at {report.limit / 1e9:.1f} GB/s at best "
        f"({report.fastest_way}, of {len(report.bandwidth)} ways, each once a repeat beside the passes), at "
        f"{report.rounds.median / 1e9:.1f} in the median repeat and {report.rounds.min / 1e9:.1f} in the worst"
    )
    if busy := report.options["busy"]:
        console.print(f"Beside {busy} busy process{'es' if busy != 1 else ''}")
    for times in report.arms:
        _print_curve(report, times, console)
    _print_others(report, console)
    if report.attention:
        _print_attention(report, console)


def _print_curve(report: KernelsReport, times: ArmTimes, console: Console) -> None:
    table = new_table("rows", "ms", "quartiles", "of 1 row", "GB/s", "of memory", "over torch")
    table.columns[0].justify = "right"
    for rows in times.sizes(TREE):
        ms, rate = times.ms(Pass(TREE, rows)), times.bytes_per_second(rows)
        over_torch = report.over_torch(times, Pass(TREE, rows))
        table.add_row(
            str(rows),
            f"{ms.median:.2f}",
            f"{ms.lower_quartile:.2f}-{ms.upper_quartile:.2f}",
            f"{times.relative(rows).median:.2f}",
            f"{rate / 1e9:.1f}",
            f"{rate / report.limit:.0%}",
            "" if over_torch is None else f"{over_torch.median:.2f}",
        )
    options = report.options
    print_table(
        console,
        f"{times.arm.name}: a pass over a tree, {options['context']} tokens before it; "
        f"{times.weight_bytes / 1e6:,.0f} MB of weights; medians of {options['repeats']}",
        table,
    )


def _print_others(report: KernelsReport, console: Console) -> None:
    """Print one row for each arm; all have the same passes."""
    first = report.arms[0]
    (prompt,), levels, contexts = (first.sizes(kind) for kind in (PROMPT, LEVEL, CONTEXT))
    table = new_table(
        "", "prompt", "1 row", *(f"level {size}" for size in levels), *(f"after {size}" for size in contexts)
    )
    for times in report.arms:
        timed = (*(Pass(LEVEL, size) for size in levels), *(Pass(CONTEXT, size) for size in contexts))
        table.add_row(
            times.arm.name,
            f"{prompt_rate(times):.0f}",
            f"{report.of_first(times).median:.2f}",
            *(f"{times.ms(one).median:.2f}" for one in timed),
        )
    print_table(console, "Other passes, medians", table)
    words = [f"prompt: tokens/s of reading one of {prompt}; 1 row: time of a pass over one, of the first line's"]
    if levels:
        words.append(f"level: ms of a draft level of {', '.join(map(str, levels))} nodes")
    if contexts:
        words.append(f"after: ms of one row after {', '.join(map(str, contexts))} tokens")
    console.print("; ".join(words))


def _print_attention(report: KernelsReport, console: Console) -> None:
    table = new_table("requests", "nodes", "us", "quartiles", "torch", "over torch", "of memory")
    for times in report.attention:
        us = Spread.of(1e6 * seconds for seconds in times.seconds)
        table.add_row(
            str(times.requests),
            str(times.nodes),
            f"{us.median:.1f}",
            f"{us.lower_quartile:.1f}-{us.upper_quartile:.1f}",
            f"{1e6 * Spread.of(times.torch_seconds).median:.1f}",
            f"{times.over_torch.median:.2f}",
            f"{times.of_floor(report.limit):.0%}",
        )
    context = report.attention[0].context
    print_table(console, f"Attention of one layer, {context} tokens before each tree; medians", table)
