"""A report on streamed targets as tables on a terminal, and as a plot."""

from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.offload.report import OffloadReport, bandwidth, disk_share, peak_of, waiting_share
from benchmarks.peers.report import ratio_over, settings_text
from specinfer.bench.comparisons import Comparison, fidelity
from specinfer.bench.results import Arm
from specinfer.core.text import counted
from specinfer.reporting.plots import SERIES_COLOURS, Panel, Series, draw_plot
from specinfer.reporting.spread import Spread
from specinfer.reporting.tables import Column, print_models, print_rows


class _Row(NamedTuple):
    result: Comparison
    arm: Arm

    @property
    def is_plain(self) -> bool:
        return self.arm is self.result.plain


_LABELS = (
    Column[_Row]("batch", lambda row: f"{row.result.size} T={row.result.situation['temperature']:g}", True, True),
    Column[_Row]("tree", lambda row: row.arm.name, label=True),
)
_SPEEDS = (
    Column[_Row]("nodes", lambda row: f"{row.arm.nodes:.1f}"),
    Column[_Row]("tokens", lambda row: f"{row.arm.tokens_per_pass:.2f}"),
    Column[_Row]("s/pass", lambda row: f"{row.arm.ms_per_pass / 1000:.3g}"),
    Column[_Row]("tokens/s", lambda row: f"{row.arm.tokens_per_second.median:.3g}"),
    Column[_Row]("ratio", lambda row: f"{row.result.speedup_of(row.arm).median:.2f}"),
    Column[_Row]("quartiles", lambda row: "" if row.is_plain else row.result.speedup_of(row.arm).quartiles),
)


def print_offload(report: OffloadReport, console: Console) -> None:
    """Print speeds, streaming and memory, peers, and whether the tokens are those of plain decoding."""
    print_models(report, console)
    _print_setting(report, console)
    rows, source = [_Row(result, arm) for result in report.results for arm in result.arms], report.source
    tokens = f"{report.options['max_tokens']} tokens for each request"
    if (plain := report.options.get("plain_tokens")) is not None:
        tokens += f", {plain} by plain decoding"
    print_rows(console, f"Streamed through the {source}, {tokens}; medians of batches", (*_LABELS, *_SPEEDS), rows)
    console.print(
        "T: temperature; nodes, tokens: of a request in a pass; tokens/s: of all requests; ratio: over plain decoding"
    )
    # With a link the budget is device memory, while the process's peak is host memory.
    budget = report.memory_budget if source == "disk" else None
    streams = (
        Column[_Row]("GB/s", lambda row: f"{row.arm.spread(bandwidth).median / 1e9:.2f}"),
        Column[_Row](f"of {source}", lambda row: f"{row.arm.spread(disk_share).median:.0%}"),
        Column[_Row]("waiting", lambda row: f"{waiting_share(row.arm):.0%}"),
        Column[_Row]("peak MiB", lambda row: f"{peak_of(row.arm) / 2**20:,.0f}"),
        Column[_Row]("of budget", lambda row: "-" if budget is None else f"{peak_of(row.arm) / budget:.0%}"),
    )
    print_rows(console, "What was streamed while decoding, and the process's peak memory", (*_LABELS, *streams), rows)
    alone = "direct reads" if source == "disk" else "copies"
    console.print(f"of {source}: of what {alone} alone gave just before; waiting: share of the time, for weights")
    if report.peers:
        _print_peers(report, console)
    console.print()
    for name in report.names[1:]:
        console.print(fidelity(name, report.results, report.environment, report.options))
    if report.resident is not None:
        console.print(str(report.resident))
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
        f"own process limited to the budget by: {report.own_cap}; "
        f"peak of {loading.peak_resident / 2**20:,.0f} MiB while loading"
    )


def _print_peers(report: OffloadReport, console: Console) -> None:
    def over_best(peer: Arm) -> Spread:
        return ratio_over(report.alone(peer).best, peer)

    def over_plain(peer: Arm) -> str:
        return "" if peer.details["drafts"] else f"{ratio_over(report.alone(peer).plain, peer).median:.2f}"

    columns = (
        Column[Arm]("peer", lambda peer: peer.name, label=True),
        Column[Arm]("T", lambda peer: f"{peer.details['temperature']:g}"),
        Column[Arm]("tokens/s", lambda peer: f"{peer.tokens_per_second.median:.3g}"),
        Column[Arm]("tree", lambda peer: f"{over_best(peer).median:.2f}"),
        Column[Arm]("quartiles", lambda peer: over_best(peer).quartiles),
        Column[Arm]("plain", over_plain),
        Column[Arm]("peak MiB", lambda peer: f"{peak_of(peer) / 2**20:,.0f}"),
    )
    print_rows(console, "Other engines on the same weights, with as much memory", columns, report.peers)
    console.print("tree, plain: the speed of our fastest tree, and of our plain decoding, over theirs\n")
    # Each peer is described once, at its lowest temperature.
    for peer in {
        peer.name: peer for peer in sorted(report.peers, key=lambda one: -one.details["temperature"])
    }.values():
        limit, cap = peer.details["limit"], peer.details["cap"]
        memory = f"limited to {limit / 2**20:,.0f} MiB by {cap}" if limit else "without a limit of memory"
        console.print(
            f"peer {peer.name}{settings_text(peer)}, {peer.details['version']}, {memory}{_parting(peer, report)}",
            highlight=False,
            markup=False,
        )


def _parting(peer: Arm, report: OffloadReport) -> str:
    if peer.details["temperature"] != 0:
        return ""
    if parted := report.peer_partings(peer):
        return f": {len(parted)} of {counted(len(peer.runs), 'output')} part from our plain decoding"
    return f": the same tokens as our plain decoding in all {len(peer.runs)} runs"


def plot_offload(report: OffloadReport, path: str | Path) -> None:
    """Draw speedup over plain decoding, the bandwidth that was used, and peak memory.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    names = [f"{result.size} together\ntemp {result.situation['temperature']:g}" for result in report.results]
    colours = [SERIES_COLOURS[place % len(SERIES_COLOURS)] for place in range(len(report.names))]
    arms = [[result.arms[place] for result in report.results] for place in range(len(report.names))]
    ratios = [
        Series(name, [result.speedup_of(result.arms[place]) for result in report.results], colour=colours[place],
               notes=[f"{result.speedup_of(result.arms[place]).median:.2f}" for result in report.results])
        for place, name in enumerate(report.names)
        if place
    ]  # fmt: skip
    disk = [
        Series(name, [arm.spread(bandwidth).median / 1e9 for arm in one], colour=colour,
               notes=[f"{arm.spread(disk_share).median:.0%}" for arm in one])
        for name, colour, one in zip(report.names, colours, arms, strict=True)
    ]  # fmt: skip
    memory = [
        Series(name, [peak_of(arm) / 2**20 for arm in one], colour=colour)
        for name, colour, one in zip(report.names, colours, arms, strict=True)
    ]
    panels = [
        Panel("Speed over plain decoding", ratios, kind="bars", names=names, levels=(1.0,),
              label="ratio, median over batches; bars: quartiles"),
        Panel(f"Streamed while decoding; dashed: the {report.source}'s best", disk, kind="bars", names=names,
              label=f"GB per second, and share of the {report.source}'s", levels=(report.disk_rate / 1e9,),
              legend="below"),
        Panel("Peak memory; dashed: the budget", memory, kind="bars", names=names, label="MiB",
              levels=(report.memory_budget / 2**20,)),
    ]  # fmt: skip
    if report.peers:
        found = [(peer.name, 1 / ratio_over(report.alone(peer).plain, peer).median) for peer in report.peers]
        peers = Series("peers", [ratio for _, ratio in found], notes=[f"{ratio:.2f}" for _, ratio in found])
        panels.append(
            Panel("Peers' speed over our plain decoding", [peers], kind="bars", horizontal=True, levels=(1.0,),
                  names=[f"{peer.name}, temp {peer.details['temperature']:g}" for peer in report.peers])
        )  # fmt: skip
    model = Path(str(report.options["model"])).name
    streamed = f"streamed within {report.memory_budget / 2**30:.2f} GiB"
    draw_plot(path, f"{model}: {report.environment.description}, {streamed}", panels)
