"""The page of a serving run: the same table as vLLM's benchmark for each rate and arm, comparisons, and a plot."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.markup import escape

from specinfer.bench.serve_options import METRICS, ServeConfig
from specinfer.bench.serve_report import RateResult, ServeArm, Served
from specinfer.reporting.plots import Panel, Series, draw_plot
from specinfer.reporting.report import Report, Table, Value
from specinfer.reporting.spread import Spread

_WIDTH = 50
# Headings of vLLM's table, with the labels of the numbers below each.
_RESULT = {
    "tree": "Tree:",
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "refused": "Refused of these (429, 503):",
    "max_concurrency": "Maximum request concurrency:",
    "rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "met_targets_rate": "Requests that met their targets (%):",
}
_THROUGHPUT = {
    "output_throughput": "Output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total Token throughput (tok/s):",
}
_SPECULATION = {
    "spec_decode_acceptance_rate": "Acceptance rate (%):",
    "spec_decode_acceptance_length": "Acceptance length:",
    "spec_decode_num_drafts": "Drafts:",
    "spec_decode_num_draft_tokens": "Draft tokens:",
    "spec_decode_num_accepted_tokens": "Accepted tokens:",
}
_HEADINGS = dict(
    zip(
        METRICS,
        (
            "Time to First Token",
            "Time per Output Token (excl. 1st token)",
            "Inter-token Latency",
            "End-to-end Latency",
        ),
        strict=True,
    )
)
_MAX_ERRORS = 3


class ServeRow(NamedTuple):
    """An arm at one rate."""

    result: RateResult
    arm: ServeArm


def serve_page(measured: Served, environment: Mapping[str, object]) -> Report[Served]:
    """Return the report: each arm's numbers, then the comparison of arms and the overhead of streaming."""
    config = measured.config
    rows = [ServeRow(result, arm) for result in measured.results for arm in result.arms]
    lines = [
        escape(line) for result, arm in rows for line in (*arm_lines(result.rate, arm, config), *_error_lines(arm))
    ]
    last = []
    if measured.highest_rates is not None:
        rates = (f"{name} {'none' if rate is None else f'{rate:.3g}'}" for name, rate in measured.highest_rates.items())
        last.append(f"Highest rate at which {config.find_rate:g} % met their targets: {', '.join(rates)}")
    if measured.overhead is not None:
        last += ["", str(measured.overhead)]
    tables = (_goodput_table(rows, config.goodput), _ratios_table(rows))
    return Report(lines, tables, measured, environment, measured.as_dict(), last, partial(plot_serve, measured))


def arm_lines(rate: float, arm: ServeArm, config: ServeConfig) -> Iterator[str]:
    """Yield the lines of vLLM's table for one arm."""
    numbers = arm.numbers(config) | {"tree": arm.name, "max_concurrency": config.max_concurrency}
    numbers["rate"] = None if math.isinf(rate) else rate
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield from _lines(_RESULT, numbers)
    for kind, found in arm.by_class(config.goodput).items():
        yield _line(f"  of {kind:.20} (req/s):", found["request_goodput"])
        yield _line(f"  of {kind:.20} (met):", f"{found['good']:.0f} of {found['requests']:.0f}")
    yield from _lines(_THROUGHPUT, numbers)
    for metric, heading in _HEADINGS.items():
        names = [name for name in numbers if name.endswith(f"_{metric}_ms") and not name.startswith("std_")]
        labels = {name: f"{name.split('_')[0].capitalize()} {metric.upper()} (ms):" for name in names}
        yield from _lines(labels, numbers, heading)
    yield from _lines(_SPECULATION, numbers, "Speculative Decoding")
    yield "=" * _WIDTH


def _lines(labels: Mapping[str, str], numbers: Mapping[str, object], heading: str = "") -> Iterator[str]:
    """Yield the heading, and a line for each number that there is."""
    found = {label: numbers[name] for name, label in labels.items() if numbers.get(name) is not None}
    if heading and found:
        yield f"{heading:-^{_WIDTH}}"
    yield from (_line(label, value) for label, value in found.items())


def _line(label: str, value: object) -> str:
    return f"{label:<40} {f'{value:.2f}' if isinstance(value, float) else value}"


def _error_lines(arm: ServeArm) -> Iterator[str]:
    errors = [run.error for run in arm.runs if run.error is not None]
    for error in list(dict.fromkeys(errors))[:_MAX_ERRORS]:
        yield f"tree {arm.name}: {errors.count(error)} requests failed: {error}"


_RATE = Value[ServeRow]("rate", lambda row: row.result.rate, "{:.3g}")
_TREE = Value[ServeRow]("tree", lambda row: row.arm.name, label=True)


def _goodput_table(rows: Sequence[ServeRow], limits: Mapping[str, float]) -> Table[ServeRow]:
    """Return goodput by rate, if there are targets, and more than one rate or arm."""
    values = (
        _RATE,
        _TREE,
        Value[ServeRow]("goodput", lambda row: row.arm.num_good(limits) / row.arm.duration, "{:.2f}"),
        Value[ServeRow]("met, %", lambda row: row.arm.share_good(limits), "{:.1f}"),
    )
    shown = rows if len(rows) > 1 and rows[0].arm.has_limits(limits) else ()
    return Table("", "Requests a second that met their targets, and their share", values, shown)


def _ratios_table(rows: Sequence[ServeRow]) -> Table[ServeRow]:
    def ratio(heading: str, name: str) -> Value[ServeRow]:
        def cell(row: ServeRow) -> str | None:
            found = row.result.ratios_of(row.arm).get(name)
            return None if found is None else f"{found.median:.2f}\n{found.quartiles}"

        return Value(heading, cell)

    metrics = {"tokens/s": "output_throughput", "TTFT": "ttft", "TPOT": "tpot", "E2EL": "e2el"}
    others = Value[ServeRow]("other texts", lambda row: "{} of {}".format(*row.result.partings(row.arm)))
    values = (_RATE, _TREE, *(ratio(heading, name) for heading, name in metrics.items()), others)
    compared = [row for row in rows if row.result.plain is not None and row.arm is not row.result.plain]
    title = "Times faster than plain decoding: medians of ratios, and quartiles"
    return Table("", title, values, compared, "tokens/s: round by round; TTFT, TPOT, E2EL: request by request")


def plot_serve(measured: Served, path: str | Path) -> None:
    """Draw throughput and latencies of each arm by request rate. Rates are at even steps, since one may be infinite.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    results, config = measured.results, measured.config
    rates = ["all at once" if math.isinf(result.rate) else f"{result.rate:.3g}" for result in results]

    def panel(label: str, spread: Callable[[ServeArm], Spread]) -> Panel:
        series = [
            Series(first.name, [spread(result.arms[number]) for result in results])
            for number, first in enumerate(results[0].arms)
        ]
        return Panel(
            label, series, names=rates, place_label="requests per second", legend="inside", legend_title="tree"
        )

    def milliseconds(metric: str) -> Callable[[ServeArm], Spread]:
        return lambda arm: Spread.from_values(arm.values(metric) or [0.0])

    panels = [
        panel(
            "output tokens per second", lambda arm: Spread.from_values(each.output_throughput for each in arm.rounds)
        ),
        panel("time to first token, ms", milliseconds("ttft")),
        panel("time per output token, ms", milliseconds("tpot")),
        panel("whole request, ms", milliseconds("e2el")),
    ]
    load = f"{config.num_prompts} requests of {config.max_tokens} tokens, {config.repeats} rounds"
    draw_plot(path, f"{measured.model}: {load}", panels, width=15, height=4.2)
