"""Comparison of peers with our arms, as tables on a terminal."""

from collections.abc import Callable

from rich.console import Console

from benchmarks.peers.report import PeerReport, peer_partings, ratio_over, settings_text
from specinfer.bench.latency_report import LatencyReport
from specinfer.bench.results import Arm
from specinfer.reporting.tables import Column, print_rows


def print_peers(report: LatencyReport, peers: PeerReport, console: Console) -> None:
    """Print each peer's speed, our speed divided by it and its settings, and the reason for each skipped peer."""
    if peers.arms:
        _print_speeds(report, peers.arms, console)
    console.print()
    for peer in peers.arms:
        about = f"{settings_text(peer)}, {peer.details['version']}{_parting(peer, report)}"
        console.print(f"peer {peer.name}{about}", highlight=False)
    for name, reason in peers.skipped.items():
        console.print(f"peer {name} skipped: {reason}", highlight=False, markup=False)


def _print_speeds(report: LatencyReport, peers: tuple[Arm, ...], console: Console) -> None:
    plain, best = report.result.plain, report.result.best
    name = Column[Arm]("peer", lambda peer: peer.name, label=True)
    speeds = (
        Column[Arm]("tokens/s", lambda peer: f"{peer.tokens_per_second.median:.4g}"),
        Column[Arm]("tree/peer", lambda peer: f"{ratio_over(best, peer).median:.2f}"),
        Column[Arm]("quartiles", lambda peer: ratio_over(best, peer).quartiles),
        Column[Arm](
            "plain/peer", lambda peer: "" if peer.details["drafts"] else f"{ratio_over(plain, peer).median:.2f}"
        ),
    )
    title = f"Other engines on the same weights: speed of our tree {best.name} and of plain decoding over theirs"
    print_rows(console, title, (name, *speeds), peers)
    if report.kinds:
        kinds = [Column(kind, _of_kind(part, best.name)) for kind, part in report.by_kind().items()]
        print_rows(console, f"Speed of our tree {best.name} over theirs, by kind of prompt", (name, *kinds), peers)


def _of_kind(part: LatencyReport, tree: str) -> Callable[[Arm], str]:
    numbers = {number for run in part.result.plain.runs for number in run.prompts}
    return lambda peer: f"{ratio_over(part.result.arm(tree), peer.of(numbers)).median:.2f}"


def _parting(peer: Arm, report: LatencyReport) -> str:
    if report.options["temperature"] != 0:
        return ""
    if parted := peer_partings(report.result.plain, peer):
        return (
            f": {len(parted)} of {len(peer.runs)} outputs part from our plain decoding, "
            f"the earliest after {min(parted)} tokens"
        )
    return f": the same tokens as our plain decoding in all {len(peer.runs)} runs"
