"""The result of a measurement on streamed targets: its numbers, its tables on a terminal, and its plot."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.peers.report import ratio_over, settings_text
from specinfer.bench.results import Arm, Comparison, Run, fidelity
from specinfer.reporting.environment import Environment
from specinfer.reporting.plots import SERIES_COLOURS, Panel, Series, draw_plot
from specinfer.reporting.spread import Spread, partings
from specinfer.reporting.tables import Column, print_models, print_rows


@dataclass(frozen=True, slots=True)
class Loading:
    """State of the target after loading, with sizes in bytes.

    Attributes:
        num_layers: Layers of the target, or 0 if nothing is streamed. `num_resident` of them stay in memory.
        bytes_per_pass: Bytes streamed for each pass.
        peak_resident: Peak resident bytes of the process until all was loaded and passes were timed.
    """

    num_layers: int
    num_resident: int
    bytes_per_pass: int
    peak_resident: int


# A run of ours has the counters bytes_read, seconds_reading (a read was in progress), seconds_waiting (a pass waited
# for weights), peak_resident (bytes of the process, as the operating system counts them) and disk_rate (bytes per
# second of direct reads, or of copies to the device, without other load around the run).


def bandwidth(run: Run) -> float:
    """Return the bytes per second streamed during decoding."""
    return float(run.counters["bytes_read"]) / run.time


def disk_share(run: Run) -> float:
    """Return the bandwidth as a share of the disk's or link's rate around the run."""
    return bandwidth(run) / float(run.counters["disk_rate"])


def waiting_share(arm: Arm) -> float:
    """Return the share of the decoding time that passes waited for weights."""
    return float(arm.counted("seconds_waiting")) / sum(run.time for run in arm.runs)


def peak_of(arm: Arm) -> int:
    """Return the peak resident bytes of the process in all runs of an arm."""
    return max(int(run.counters["peak_resident"]) for run in arm.runs)


def _run_dict(run: Run) -> dict[str, object]:
    return {
        **run.as_dict(),
        "bytes_read": run.counters["bytes_read"],
        "bytes_per_second": bandwidth(run),
        "disk_bytes_per_second": run.counters["disk_rate"],
        "disk_share": disk_share(run),
        "reading_ms": 1000 * run.counters["seconds_reading"],
        "waiting_ms": 1000 * run.counters["seconds_waiting"],
        "peak_resident": run.counters["peak_resident"],
    }


def _arm_dict(arm: Arm) -> dict[str, object]:
    return {
        "bytes_per_second": arm.spread(bandwidth).median,
        **arm.spread(disk_share).fields("disk_share"),
        "waiting_share": waiting_share(arm),
        "peak_resident": peak_of(arm),
        "runs": [_run_dict(run) for run in arm.runs],
    }


@dataclass(frozen=True, slots=True)
class ResidentCheck:
    """Comparison of the outputs of the target in memory with those of the streamed target.

    Attributes:
        num_outputs: Number of outputs compared, all of plain decoding.
        partings: Number of shared leading tokens of each pair of outputs that differ.
    """

    num_outputs: int
    partings: tuple[int, ...]

    def __str__(self) -> str:
        if not self.partings:
            return f"loaded whole: the same tokens in all {self.num_outputs} outputs"
        return (
            f"loaded whole: {len(self.partings)} of {self.num_outputs} outputs part, the earliest after "
            f"{min(self.partings)} tokens"
        )

    def as_dict(self) -> dict[str, object]:
        return {"num_outputs": self.num_outputs, "tokens_before_parting": list(self.partings)}


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """Results for each batch size and temperature, in the requested order.

    Attributes:
        target_bytes: Approximate bytes of all weights of the target.
        memory_budget: Memory limit of a process in bytes.
        own_cap: Method by which the operating system limited our process to the budget, or "none".
        disk_rates: Bytes per second of each way to read the disk directly, or to copy to the device, by round.
        disk_is_direct: True if those reads bypassed the page cache.
        peers: Other engines measured in the same run, one arm for each temperature. Their details are the temperature,
            whether they draft, their version and settings, and the cap and limit of their memory.
        peers_skipped: Reason for each engine that was not measured.
        resident: Comparison with the target in memory, or None if it was not requested.
    """

    results: tuple[Comparison, ...]
    loading: Loading
    target_bytes: int
    memory_budget: int
    own_cap: str
    disk_rates: Mapping[str, tuple[float, ...]]
    disk_is_direct: bool
    options: Mapping[str, object]
    environment: Environment
    peers: tuple[Arm, ...] = ()
    peers_skipped: Mapping[str, str] = field(default_factory=dict)
    resident: ResidentCheck | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of our arms; the first is plain decoding."""
        return tuple(arm.name for arm in self.results[0].arms)

    @property
    def source(self) -> str:
        """Source of the streamed layers: "disk" or "link"."""
        return "link" if self.options["offload"] == "cpu" else "disk"

    @property
    def disk_rate(self) -> float:
        """Bytes per second of the best way and round."""
        return max(rate for rates in self.disk_rates.values() for rate in rates)

    @property
    def peak_resident(self) -> int:
        """Peak resident bytes of our process, loading included."""
        return max(self.loading.peak_resident, *(peak_of(arm) for result in self.results for arm in result.arms))

    def alone(self, peer: Arm) -> Comparison:
        """Return the result of one request at a time at a peer's temperature, with which it is compared."""
        wanted = peer.details["temperature"]
        return next(one for one in self.results if one.size == 1 and one.situation["temperature"] == wanted)

    def peer_partings(self, peer: Arm) -> list[int]:
        """Return the number of shared leading tokens of each run that is no prefix of our plain decoding."""
        pairs = zip(self.alone(peer).plain.runs, peer.runs, strict=True)
        return partings((run.token_ids, plain.token_ids[: len(run.token_ids)]) for plain, run in pairs)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return {
            "results": [self._result_dict(result) for result in self.results],
            "num_layers": self.loading.num_layers,
            "num_resident_layers": self.loading.num_resident,
            "bytes_per_pass": self.loading.bytes_per_pass,
            "target_bytes": self.target_bytes,
            "memory_budget": self.memory_budget,
            "own_cap": self.own_cap,
            "loading_peak_resident": self.loading.peak_resident,
            "peak_resident": self.peak_resident,
            "peak_of_budget": self.peak_resident / self.memory_budget,
            "disk_bytes_per_second": self.disk_rate,
            "disk_is_direct": self.disk_is_direct,
            "disk_rates": {way: list(rates) for way, rates in self.disk_rates.items()},
            "peers": [self._peer_dict(peer) for peer in self.peers],
            "peers_skipped": dict(self.peers_skipped),
            "resident": None if self.resident is None else self.resident.as_dict(),
            "options": dict(self.options),
            "environment": self.environment.as_dict(),
        }

    def _result_dict(self, result: Comparison) -> dict[str, object]:
        numbers: dict[str, Any] = result.as_dict() | dict(result.situation)
        return numbers | {"arms": {arm.name: numbers["arms"][arm.name] | _arm_dict(arm) for arm in result.arms}}

    def _peer_dict(self, peer: Arm) -> dict[str, object]:
        result, details = self.alone(peer), peer.details
        return {
            "name": peer.name,
            **{name: details[name] for name in ("temperature", "version", "settings", "cap", "limit")},
            **peer.tokens_per_second.fields("tokens_per_second"),
            "tree": result.best.name,
            **ratio_over(result.best, peer).fields("tree_over_peer"),
            "plain_over_peer": ratio_over(result.plain, peer).median,
            "tokens_before_parting": self.peer_partings(peer),
            "peak_resident": peak_of(peer),
            "runs": [run.as_request() | {"peak_resident": run.counters["peak_resident"]} for run in peer.runs],
        }


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
        console.print(fidelity(name, report.results, report.environment))
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
        return f": {len(parted)} of {len(peer.runs)} outputs part from our plain decoding"
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
