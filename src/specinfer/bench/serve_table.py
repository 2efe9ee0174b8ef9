"""A serving report on a terminal, with the same table as vLLM's benchmark for each rate and arm, and as a plot."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console

from specinfer.bench.serve_report import Overhead, RateResult, ServeArm, ServeReport, goodput_of
from specinfer.reporting.plots import Panel, Series, draw_plot
from specinfer.reporting.spread import Spread
from specinfer.reporting.tables import Column, print_rows

_WIDTH = 50
_HEADINGS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_MAX_ERRORS = 3


def print_serve(report: ServeReport, console: Console) -> None:
    """Print each arm's numbers, then the comparison of arms and the overhead of streaming."""
    for result in report.results:
        for arm in result.arms:
            for line in arm_lines(result.rate, arm, report.options):
                console.print(line, markup=False, highlight=False)
            _print_errors(arm, console)
    _print_goodput(report, console)
    _print_ratios(report, console)
    if report.overhead is not None:
        console.print(f"\n{overhead_line(report.overhead)}", highlight=False)


def arm_lines(rate: float, arm: ServeArm, options: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines of vLLM's table for one arm."""
    numbers = arm.numbers(options)
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Tree:", arm.name)
    yield _line("Successful requests:", numbers["completed"])
    yield _line("Failed requests:", numbers["failed"])
    yield _line("Refused of these (429, 503):", numbers["refused"])
    if options["max_concurrency"] is not None:
        yield _line("Maximum request concurrency:", options["max_concurrency"])
    if not math.isinf(rate):
        yield _line("Request rate configured (RPS):", rate)
    yield _line("Benchmark duration (s):", numbers["duration"])
    yield _line("Total input tokens:", numbers["total_input_tokens"])
    yield _line("Total generated tokens:", numbers["total_output_tokens"])
    yield _line("Request throughput (req/s):", numbers["request_throughput"])
    if numbers["request_goodput"] is not None:
        yield _line("Request goodput (req/s):", numbers["request_goodput"])
        yield _line("Requests that met their targets (%):", numbers["met_targets_rate"])
    for kind, found in arm.by_class(goodput_of(options)).items():
        yield _line(f"  of {kind:.20} (req/s):", found["request_goodput"])
        yield _line(f"  of {kind:.20} (met):", f"{found['good']:.0f} of {found['requests']:.0f}")
    yield _line("Output token throughput (tok/s):", numbers["output_throughput"])
    yield _line("Peak concurrent requests:", numbers["max_concurrent_requests"])
    yield _line("Total Token throughput (tok/s):", numbers["total_token_throughput"])
    for metric, heading in _HEADINGS.items():
        names = [name for name in numbers if name.endswith(f"_{metric}_ms") and not name.startswith("std_")]
        if names:
            yield f"{heading:-^{_WIDTH}}"
        for name in names:
            label = name.split("_")[0]
            yield _line(f"{label.capitalize()} {metric.upper()} (ms):", numbers[name])
    if "spec_decode_num_drafts" in numbers:
        yield f"{'Speculative Decoding':-^{_WIDTH}}"
        yield _line("Acceptance rate (%):", numbers["spec_decode_acceptance_rate"])
        yield _line("Acceptance length:", numbers["spec_decode_acceptance_length"])
        yield _line("Drafts:", numbers["spec_decode_num_drafts"])
        yield _line("Draft tokens:", numbers["spec_decode_num_draft_tokens"])
        yield _line("Accepted tokens:", numbers["spec_decode_num_accepted_tokens"])
    yield "=" * _WIDTH


def _line(label: str, value: object) -> str:
    return f"{label:<40} {f'{value:.2f}' if isinstance(value, float) else str(value):<10}".rstrip()


def _print_errors(arm: ServeArm, console: Console) -> None:
    errors = [run.error for run in arm.runs if run.error is not None]
    for error in list(dict.fromkeys(errors))[:_MAX_ERRORS]:
        console.print(f"tree {arm.name}: {errors.count(error)} requests failed: {error}", markup=False, highlight=False)


def _print_goodput(report: ServeReport, console: Console) -> None:
    """Print goodput by rate, and the highest rates of a search."""
    limits = goodput_of(report.options)
    rows = [(result.rate, arm) for result in report.results for arm in result.arms]
    if len(rows) > 1 and (limits or any(run.limits for run in rows[0][1].runs)):
        columns: tuple[Column[tuple[float, ServeArm]], ...] = (
            Column("rate", lambda row: f"{row[0]:.3g}", label=True),
            Column("tree", lambda row: row[1].name, label=True),
            Column("goodput", lambda row: f"{row[1].num_good(limits) / row[1].duration:.2f}"),
            Column("met, %", lambda row: f"{row[1].share_good(limits):.1f}"),
        )
        print_rows(console, "Requests a second that met their targets, and their share", columns, rows)
    if report.highest_rates is not None:
        rates = (f"{name} {'none' if rate is None else f'{rate:.3g}'}" for name, rate in report.highest_rates.items())
        share = report.options["find_rate"]
        console.print(f"Highest rate at which {share:g} % met their targets: {', '.join(rates)}", highlight=False)


def _print_ratios(report: ServeReport, console: Console) -> None:
    rows = [
        (result, arm)
        for result in report.results
        for arm in result.arms
        if result.plain is not None and arm is not result.plain
    ]
    if not rows:
        return

    def ratio(heading: str, name: str) -> Column[tuple[RateResult, ServeArm]]:
        def cell(row: tuple[RateResult, ServeArm]) -> str:
            found = row[0].ratios_of(row[1]).get(name)
            return "" if found is None else f"{found.median:.2f}\n{found.quartiles}"

        return Column(heading, cell)

    def other_texts(row: tuple[RateResult, ServeArm]) -> str:
        different, count = row[0].partings(row[1])
        return f"{different} of {count}"

    metrics = {"tokens/s": "output_throughput", "TTFT": "ttft", "TPOT": "tpot", "E2EL": "e2el"}
    columns = (
        Column("rate", lambda row: f"{row[0].rate:.3g}", label=True),
        Column("tree", lambda row: row[1].name, label=True),
        *(ratio(heading, name) for heading, name in metrics.items()),
        Column("other texts", other_texts),
    )
    print_rows(console, "Times faster than plain decoding: medians of ratios, and quartiles", columns, rows)
    console.print("tokens/s: round by round; TTFT, TPOT, E2EL: request by request")


def overhead_line(overhead: Overhead) -> str:
    token, first = overhead.token_ms, overhead.first_ms
    return (
        f"Streaming over HTTP, one request at a time, plain decoding: {token.median:.3f} ms a token "
        f"({token.lower_quartile:.3f} to {token.upper_quartile:.3f}) and {first.median:.2f} ms to the first token "
        f"beyond the same in one process ({overhead.local_ms.median:.2f} ms a token), {overhead.num_pairs} pairs"
    )


def plot_serve(report: ServeReport, path: str | Path) -> None:
    """Draw throughput and latencies of each arm by request rate. Rates are at even steps, since one may be infinite.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    rates = ["all at once" if math.isinf(result.rate) else f"{result.rate:.3g}" for result in report.results]

    def panel(label: str, spread: Callable[[ServeArm], Spread]) -> Panel:
        series = [
            Series(first.name, [spread(result.arms[number]) for result in report.results])
            for number, first in enumerate(report.results[0].arms)
        ]
        return Panel(
            label, series, names=rates, place_label="requests per second", legend="inside", legend_title="tree"
        )

    def milliseconds(metric: str) -> Callable[[ServeArm], Spread]:
        return lambda arm: Spread.from_values(arm.values(metric) or [0.0])

    panels = [
        panel("output tokens per second", lambda arm: Spread.from_values(one.output_throughput for one in arm.rounds)),
        panel("time to first token, ms", milliseconds("ttft")),
        panel("time per output token, ms", milliseconds("tpot")),
        panel("whole request, ms", milliseconds("e2el")),
    ]
    options = report.options
    load = f"{options['num_prompts']} requests of {options['max_tokens']} tokens, {options['repeats']} rounds"
    draw_plot(path, f"{report.environment['served_model']}: {load}", panels, width=15, height=4.2)
