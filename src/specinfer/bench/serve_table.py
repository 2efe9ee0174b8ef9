"""A serving report on a terminal, with the same table as vLLM's benchmark for each rate and arm."""

import math
from collections.abc import Iterator, Mapping

from rich.console import Console

from specinfer.bench.serve_report import Overhead, RateResult, ServeArm, ServeReport
from specinfer.bench.table import new_table, print_table

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


def _print_ratios(report: ServeReport, console: Console) -> None:
    table = new_table("rate", "tree", "tokens/s", "TTFT", "TPOT", "E2EL", "other texts", num_labels=2)
    for result, arm in _compared(report):
        ratios = result.ratios_of(arm)
        cells = [
            f"{ratios[name].median:.2f}\n{ratios[name].lower_quartile:.2f}-{ratios[name].upper_quartile:.2f}"
            if name in ratios
            else ""
            for name in ("output_throughput", "ttft", "tpot", "e2el")
        ]
        different, count = result.partings(arm)
        table.add_row(f"{result.rate:g}", arm.name, *cells, f"{different} of {count}")
    if table.row_count:
        print_table(console, "Times faster than plain decoding: medians of ratios, and quartiles", table)
        console.print("tokens/s: round by round; TTFT, TPOT, E2EL: request by request")


def _compared(report: ServeReport) -> Iterator[tuple[RateResult, ServeArm]]:
    for result in report.results:
        for arm in result.arms:
            if result.plain is not None and arm is not result.plain:
                yield result, arm


def overhead_line(overhead: Overhead) -> str:
    token, first = overhead.token_ms, overhead.first_ms
    return (
        f"Streaming over HTTP, one request at a time, plain decoding: {token.median:.3f} ms a token "
        f"({token.lower_quartile:.3f} to {token.upper_quartile:.3f}) and {first.median:.2f} ms to the first token "
        f"beyond the same in one process ({overhead.local_ms.median:.2f} ms a token), {overhead.num_pairs} pairs"
    )
