"""Measurements of peers, and their comparison with our arms on the same prompts and repeats, in numbers and tables.

A peer is an arm whose details are whether it drafts, its version, and its fastest settings.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from specinfer.bench.comparisons import Comparison
from specinfer.bench.latency_report import LatencyReport
from specinfer.bench.results import Arm, Run
from specinfer.reporting.spread import Spread, partings
from specinfer.reporting.tables import Column, print_rows


def ratio_over(ours: Arm, peer: Arm) -> Spread:
    """Return our decoding speed after the first tokens divided by the peer's, for each pair of runs."""
    return _ratio(ours, peer, lambda run: run.tokens_per_second)


def settings_text(peer: Arm) -> str:
    """Return the peer's settings, such as " with num_draft 4", or an empty text if it has none."""
    settings = ", ".join(f"{name} {value}" for name, value in peer.details["settings"].items())
    return f" with {settings}" if settings else ""


def peer_partings(plain: Arm, peer: Arm) -> list[int]:
    """Return the length of the common prefix with our plain decoding, for each run that differs from it."""
    return partings((one.token_ids, run.token_ids) for one, run in zip(plain.runs, peer.runs, strict=True))


def _ratio(ours: Arm, peer: Arm, value: Any) -> Spread:
    pairs = list(zip(ours.runs, peer.runs, strict=True))
    assert all((mine.repeat, mine.prompts) == (run.repeat, run.prompts) for mine, run in pairs)
    return Spread.from_values(value(mine) / value(run) for mine, run in pairs)


@dataclass(frozen=True, slots=True)
class PeerReport:
    """The peers that were measured, and the reason for each one that was not."""

    arms: tuple[Arm, ...]
    skipped: Mapping[str, str]

    def of(self, prompts: Collection[int]) -> "PeerReport":
        """Return a report with only the runs on these prompts."""
        return replace(self, arms=tuple(arm.of(prompts) for arm in self.arms))

    def as_ratios(self, result: Comparison) -> dict[str, object]:
        """Return each peer's speed and the ratio of our speeds to it, ready for JSON."""
        return {
            peer.name: {
                "tokens_per_second": peer.tokens_per_second.median,
                "tree_over_peer": ratio_over(result.best, peer).median,
                "plain_over_peer": ratio_over(result.plain, peer).median,
            }
            for peer in self.arms
        }

    def as_dict(self, result: Comparison) -> dict[str, object]:
        """Return a form ready for JSON, with ratios to our plain decoding and to the best of our trees."""
        return {
            "peers": {peer.name: _peer_dict(peer, result) for peer in self.arms},
            "peers_skipped": dict(self.skipped),
        }


def _peer_dict(peer: Arm, result: Comparison) -> dict[str, object]:
    best = result.best
    return {
        "version": peer.details["version"],
        "settings": dict(peer.details["settings"]),
        **peer.tokens_per_second.fields("tokens_per_second"),
        "tree": best.name,
        **ratio_over(best, peer).fields("tree_over_peer"),
        "tree_request_over_peer": _ratio(best, peer, _requests_per_second).median,
        "plain_over_peer": ratio_over(result.plain, peer).median,
        "tokens_before_parting": peer_partings(result.plain, peer),
        "runs": [run.as_request() for run in peer.runs],
    }


def _requests_per_second(run: Run) -> float:
    return 1 / (run.prompt_time + run.time)


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
