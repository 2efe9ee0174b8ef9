"""Comparison of peers with our arms, as a table on a terminal."""

from rich.console import Console

from specinfer.bench.peers.report import PeerArm, best_tree
from specinfer.bench.report import LatencyReport
from specinfer.bench.table import new_table, print_table


def print_peers(report: LatencyReport, console: Console) -> None:
    """Print each peer's speed, our speed divided by it and its settings, and the reason for each skipped peer."""
    if report.peers is None:
        return
    if report.peers.arms:
        _print_speeds(report, report.peers.arms, console)
    console.print()
    for arm in report.peers.arms:
        settings = f" with {arm.settings_text}" if arm.settings else ""
        console.print(f"peer {arm.name}{settings}, {arm.version}{_parting(arm, report)}", highlight=False)
    for name, reason in report.peers.skipped.items():
        console.print(f"peer {name} skipped: {reason}", highlight=False, markup=False)


def _print_speeds(report: LatencyReport, arms: tuple[PeerArm, ...], console: Console) -> None:
    best = best_tree(report)
    table = new_table("peer", "tokens/s", "tree/peer", "quartiles", "plain/peer")
    for arm in arms:
        ratio = arm.ratio(best)
        table.add_row(
            arm.name,
            f"{arm.tokens_per_second.median:.4g}",
            f"{ratio.median:.2f}",
            f"{ratio.lower_quartile:.2f}-{ratio.upper_quartile:.2f}",
            "" if arm.drafts else f"{arm.ratio(report.plain).median:.2f}",
        )
    title = f"Other engines on the same weights: speed of our tree {best.name} and of plain decoding over theirs"
    print_table(console, title, table)
    if report.kinds:
        parts = report.by_kind()
        kinds = new_table("peer", *parts)
        for place, arm in enumerate(arms):
            ratios = (part.peers.arms[place].ratio(part.arm(best.name)).median for part in parts.values() if part.peers)
            kinds.add_row(arm.name, *(f"{ratio:.2f}" for ratio in ratios))
        print_table(console, f"Speed of our tree {best.name} over theirs, by kind of prompt", kinds)


def _parting(arm: PeerArm, report: LatencyReport) -> str:
    if report.options["temperature"] != 0:
        return ""
    if partings := arm.partings(report.plain):
        return (
            f": {len(partings)} of {len(arm.runs)} outputs part from our plain decoding, "
            f"the earliest after {min(partings)} tokens"
        )
    return f": the same tokens as our plain decoding in all {len(arm.runs)} runs"
