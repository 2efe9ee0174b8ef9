"""Terminal tables of an offload report; each fits 80 columns."""

from collections.abc import Iterator

from rich.console import Console

from specinfer.bench.offload_peers import OffloadPeer
from specinfer.bench.offload_report import OffloadArm, OffloadReport, OffloadResult
from specinfer.bench.table import new_table, print_models, print_table


def print_offload(report: OffloadReport, console: Console) -> None:
    """Print speeds, streaming and memory, peers, and whether the tokens are those of plain decoding."""
    print_models(report, console)
    _print_setting(report, console)
    labels = ("batch", "tree")
    speeds = new_table(*labels, "nodes", "tokens", "s/pass", "tokens/s", "ratio", "quartiles", num_labels=2)
    streams = new_table(*labels, "GB/s", f"of {report.source}", "waiting", "peak MiB", "of budget", num_labels=2)
    for result, arm, situation in _rows(report):
        ends, batches = arm is result.arms[-1], arm.batches
        speeds.add_row(
            situation, arm.name, f"{batches.nodes:.1f}", f"{batches.tokens_per_pass:.2f}",
            f"{batches.ms_per_pass / 1000:.3g}", f"{batches.tokens_per_second.median:.3g}", *_ratio(result, arm),
            end_section=ends,
        )  # fmt: skip
        streams.add_row(
            situation, arm.name, f"{arm.bandwidth.median / 1e9:.2f}", f"{arm.disk_share.median:.0%}",
            f"{arm.waiting_share:.0%}", f"{arm.peak_resident / 2**20:,.0f}",
            # With a link the budget is device memory, while the process's peak is host memory.
            f"{arm.peak_resident / report.memory_budget:.0%}" if report.source == "disk" else "-", end_section=ends,
        )  # fmt: skip
    tokens = f"{report.options['max_tokens']} tokens for each request"
    heading = f"Streamed through the {report.source}, {tokens}; medians of batches"
    print_table(console, heading, speeds)
    console.print(
        "T: temperature; nodes, tokens: of a request in a pass; tokens/s: of all requests; ratio: over plain decoding"
    )
    print_table(console, "What was streamed while decoding, and the most that the process held", streams)
    alone = "direct reads" if report.source == "disk" else "copies"
    console.print(
        f"of {report.source}: of what {alone} alone gave just before; waiting: share of the time, for weights"
    )
    if report.peers:
        _print_peers(report, console)
    console.print()
    for place in range(1, len(report.names)):
        console.print(_fidelity(report, place))
    if report.resident is not None:
        console.print(_resident(report))
    for name, reason in report.peers_skipped.items():
        console.print(f"peer {name} skipped: {reason}", highlight=False, markup=False)


def _print_setting(report: OffloadReport, console: Console) -> None:
    loading, budget = report.loading, report.memory_budget
    direct = "" if report.disk_is_direct else " (the file system has no direct reads: its cache may have helped)"
    console.print(
        f"budget {budget / 2**20:,.0f} MiB for {report.target_bytes / 2**20:,.0f} MiB of weights; "
        f"{loading.num_layers - loading.num_resident} of {loading.num_layers} layers streamed, "
        f"{loading.bytes_per_pass / 1e9:.2f} GB a pass; "
        f"{report.source} {report.disk_rate / 1e9:.2f} GB/s at best{direct}; "
        f"own process held to the budget by: {report.own_cap}; "
        f"{loading.peak_resident / 2**20:,.0f} MiB held at most while loading"
    )


def _rows(report: OffloadReport) -> Iterator[tuple[OffloadResult, OffloadArm, str]]:
    """Yield each arm of each result. The label of a situation is given only with its first arm."""
    for result in report.results:
        for place, arm in enumerate(result.arms):
            yield result, arm, "" if place else f"{result.size} T={result.temperature:g}"


def _ratio(result: OffloadResult, arm: OffloadArm) -> tuple[str, str]:
    if arm is result.plain:
        return "1.00", ""
    ratio = result.batches.speedup_of(arm.batches)
    return f"{ratio.median:.2f}", f"{ratio.lower_quartile:.2f}-{ratio.upper_quartile:.2f}"


def _print_peers(report: OffloadReport, console: Console) -> None:
    table = new_table("peer", "T", "tokens/s", "tree", "quartiles", "plain", "peak MiB")
    for peer in report.peers:
        result = report.alone(peer.temperature)
        ratio = peer.ratio(result.best.batches)
        table.add_row(
            peer.name,
            f"{peer.temperature:g}",
            f"{peer.tokens_per_second.median:.3g}",
            f"{ratio.median:.2f}",
            f"{ratio.lower_quartile:.2f}-{ratio.upper_quartile:.2f}",
            "" if peer.drafts else f"{peer.ratio(result.plain.batches).median:.2f}",
            f"{peer.peak_resident / 2**20:,.0f}",
        )
    print_table(console, "Other engines on the same weights, with as much memory", table)
    console.print("tree, plain: the speed of our fastest tree, and of our plain decoding, over theirs\n")
    # Each peer is described once, at its lowest temperature.
    for peer in {peer.name: peer for peer in sorted(report.peers, key=lambda peer: -peer.temperature)}.values():
        settings = f" with {peer.settings_text}" if peer.settings else ""
        held = "not held to any memory" if not peer.limit else f"held to {peer.limit / 2**20:,.0f} MiB by {peer.cap}"
        console.print(
            f"peer {peer.name}{settings}, {peer.version}, {held}{_parting(peer, report)}", highlight=False, markup=False
        )


def _parting(peer: OffloadPeer, report: OffloadReport) -> str:
    if peer.temperature != 0:
        return ""
    if partings := peer.partings(report.alone(0.0).plain.batches):
        return f": {len(partings)} of {len(peer.runs)} outputs part from our plain decoding"
    return f": the same tokens as our plain decoding in all {len(peer.runs)} runs"


def _fidelity(report: OffloadReport, place: int) -> str:
    results = [result.batches for result in report.results]
    num_outputs = sum(result.num_outputs for result in results)
    partings = [shared for result in results for shared in result.partings(result.arms[place])]
    if not partings:
        return f"tree {report.names[place]}: the same tokens as plain decoding in all {num_outputs} outputs"
    return (
        f"tree {report.names[place]}: {len(partings)} of {num_outputs} outputs part from plain decoding in "
        f"{report.environment.precision} rounding, the earliest after {min(partings)} tokens"
    )


def _resident(report: OffloadReport) -> str:
    assert report.resident is not None
    count, partings = report.resident.num_outputs, report.resident.partings
    if not partings:
        return f"loaded whole: the same tokens in all {count} outputs"
    return f"loaded whole: {len(partings)} of {count} outputs part, the earliest after {min(partings)} tokens"
