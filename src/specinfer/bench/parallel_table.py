"""A report on split targets as tables on a terminal; each fits 80 columns."""

from collections.abc import Iterator

from rich.console import Console

from specinfer.bench.parallel_plans import WHOLE
from specinfer.bench.parallel_report import ParallelArm, ParallelReport, ParallelResult
from specinfer.bench.table import new_table, print_models, print_table

_CLOSE = 0.2  # a prediction with at most this relative error is close


def print_parallel(report: ParallelReport, console: Console) -> None:
    """Print speeds, communication, memory, predictions, and whether the tokens equal those of one process."""
    print_models(report, console)
    options = report.options
    joined = "all ranks on this machine"
    if options["namespaces"]:
        joined = f"two hosts joined by {report.cable}, {options['link_bandwidth']} each way"
    console.print(f"{joined}; {options['threads']} threads for each process")
    labels = ("split", "batch", "tree")
    speeds = new_table(*labels, "nodes", "tokens", "ms", "tokens/s", "ratio", num_labels=3)
    talk = new_table(*labels, "KB", "messages", "tokens/s", "foreseen", "error", num_labels=3)
    for result, arm, name, situation in _rows(report):
        ends, batches = arm is result.arms[-1], arm.batches
        rate = f"{batches.tokens_per_second.median:.4g}"
        speeds.add_row(
            name, situation, arm.name, f"{batches.nodes:.1f}", f"{batches.tokens_per_pass:.2f}",
            f"{batches.ms_per_pass:.4g}", rate, _ratio(result, arm), end_section=ends,
        )  # fmt: skip
        if arm.predicted is not None and arm.error is not None:
            talk.add_row(
                name, situation, arm.name,
                f"{(arm.link_bytes_per_token or arm.bytes_per_token) / 1000:,.1f}",
                f"{arm.messages_per_token:.1f}", rate, f"{arm.predicted:.4g}", f"{arm.error:+.0%}", end_section=ends,
            )  # fmt: skip
    print_table(console, f"Split targets, {options['max_tokens']} tokens for each request; medians", speeds)
    console.print(
        "split: tensor ranks x stages, and the link's latency; whole: in one process; batch: requests together, T: "
        "temperature; nodes, tokens: of a request in a pass; ms: of a pass; ratio: over plain decoding split "
        "alike, with quartiles"
    )
    print_table(console, "What ranks told each other for a token, and what the simulation foresaw", talk)
    console.print(
        f"KB: {'over the link, headers included' if options['namespaces'] else 'between rank 0 and the others'}, both "
        "ways; messages: between rank 0 and the others; both while decoding"
    )
    _print_memory(report, console)
    console.print()
    errors = [abs(error) for error in report.errors]
    close = sum(error <= _CLOSE for error in errors)
    console.print(f"foreseen within {_CLOSE:.0%}: {close} of {len(errors)}, the worst off by {max(errors):.0%}")
    console.print(_fidelity(report))


def _rows(report: ParallelReport) -> Iterator[tuple[ParallelResult, ParallelArm, str, str]]:
    """Yield (result, arm, setting, situation) for each row; the texts are empty where they repeat the row above."""
    last = None
    for result in report.results:
        for place, arm in enumerate(result.arms):
            name = "" if place or result.setting == last else result.setting.name
            yield result, arm, name, "" if place else f"{result.size} T={result.temperature:g}"
        last = result.setting


def _ratio(result: ParallelResult, arm: ParallelArm) -> str:
    if arm is result.plain:
        return ""
    ratio = result.ratio(arm)
    return f"{ratio.median:.2f} {ratio.lower_quartile:.2f}-{ratio.upper_quartile:.2f}"


def _print_memory(report: ParallelReport, console: Console) -> None:
    table = new_table("split", "rank", "peak MiB", "of whole", "now MiB", "of whole")
    whole = report.memory[WHOLE.split][0]
    for split, ranks in report.memory.items():
        for number, rank in enumerate(ranks):
            table.add_row(
                (WHOLE.name if split == WHOLE.split else split) if number == 0 else "",
                str(number),
                f"{rank.peak / 2**20:,.0f}",
                f"{rank.peak / max(whole.peak, 1):.0%}",
                f"{rank.now / 2**20:,.0f}",
                f"{rank.now / max(whole.now, 1):.0%}",
                end_section=number == len(ranks) - 1,
            )
    print_table(console, "What each rank's process held: at most while decoding, and at the end", table)


def _fidelity(report: ParallelReport) -> str:
    results = report.split_results
    num_outputs = sum(result.num_outputs for result in results)
    partings = [shared for result in results for shared in result.partings(report.whole(result))]
    if not partings:
        return f"split targets: the same tokens as one process in all {num_outputs} outputs"
    return (
        f"split targets: {len(partings)} of {num_outputs} outputs part from one process in "
        f"{report.environment.precision} rounding, the earliest after {min(partings)} tokens"
    )
