"""Measurements of peers, and their comparison with our arms on the same prompts and repeats, in numbers and tables.

A peer is an arm whose details are whether it drafts, its version, and its fastest settings.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.markup import escape

from specinfer.bench.comparisons import Compared, Comparison, numbers_by_kind
from specinfer.bench.latency import latency_numbers_by_kind
from specinfer.bench.results import Arm, Run
from specinfer.reporting.report import Table, Value, fields_of
from specinfer.reporting.spread import Spread, partings


def ratio_over(ours: Arm, peer: Arm) -> Spread:
    """Return our decoding speed after the first tokens divided by the peer's, for each pair of runs."""
    return _ratio(ours, peer, lambda run: run.tokens_per_second)


def settings_text(peer: Arm) -> str:
    """Return the peer's settings, such as " with num_draft 4", or an empty text if it has none."""
    settings = ", ".join(f"{name} {value}" for name, value in peer.details["settings"].items())
    return f" with {settings}" if settings else ""


def peer_partings(plain: Arm, peer: Arm) -> list[int]:
    """Return the length of the common prefix with our plain decoding, for each run that differs from it."""
    return partings(
        pair
        for ours, theirs in zip(plain.runs, peer.runs, strict=True)
        for pair in zip(ours.outputs, theirs.outputs, strict=True)
    )


def _ratio(ours: Arm, peer: Arm, value: Any) -> Spread:
    pairs = list(zip(ours.runs, peer.runs, strict=True))
    assert all((mine.repeat, mine.prompts) == (run.repeat, run.prompts) for mine, run in pairs)
    return Spread.from_values(value(mine) / value(run) for mine, run in pairs)


@dataclass(frozen=True, slots=True)
class PeerRuns:
    """The peers that were measured, and the reason for each one that was not."""

    arms: tuple[Arm, ...]
    skipped: Mapping[str, str]

    def as_dict(self, ours: Compared) -> dict[str, object]:
        """Return a form ready for JSON, with ratios to our plain decoding and to the best of our trees."""
        found: dict[str, Any] = {
            "peers": {peer.name: fields_of(_values(ours.result), peer) for peer in self.arms},
            "peers_skipped": dict(self.skipped),
        }
        if ours.kinds:
            parts = latency_numbers_by_kind(ours)
            for kind, numbers in numbers_by_kind(ours.kinds).items():
                result = ours.result.of(numbers)
                parts[kind]["peers"] = {peer.name: _kind_dict(peer.of(numbers), result) for peer in self.arms}
            found["by_kind"] = parts
        return found


def _kind_dict(peer: Arm, result: Comparison) -> dict[str, object]:
    return {
        "tokens_per_second": peer.tokens_per_second.median,
        "tree_over_peer": ratio_over(result.best, peer).median,
        "plain_over_peer": ratio_over(result.plain, peer).median,
    }


def _values(result: Comparison) -> tuple[Value[Arm], ...]:
    """Return what is reported of a peer beside our arms."""
    plain, best = result.plain, result.best
    return (
        Value("", lambda peer: peer.name, heading="peer"),
        Value("version", lambda peer: peer.details["version"], None),
        Value("settings", lambda peer: dict(peer.details["settings"]), None),
        Value("tokens_per_second", lambda peer: peer.tokens_per_second, "{:.4g}", "tokens/s"),
        Value("tree", lambda _: best.name, None),
        Value("tree_over_peer", lambda peer: ratio_over(best, peer), "{:.2f}", "tree/peer"),
        Value("", lambda peer: ratio_over(best, peer).quartiles, heading="quartiles"),
        Value("tree_request_over_peer", lambda peer: _ratio(best, peer, _requests_per_second).median, None),
        Value("plain_over_peer", lambda peer: ratio_over(plain, peer).median, None),
        Value("", lambda peer: None if peer.details["drafts"] else ratio_over(plain, peer), "{:.2f}", "plain/peer"),
        Value("tokens_before_parting", lambda peer: peer_partings(plain, peer), None),
        Value("runs", lambda peer: [run.as_request() for run in peer.runs], None),
    )


def _requests_per_second(run: Run) -> float:
    return 1 / (run.prompt_time + run.time)


def peer_tables(ours: Compared, peers: PeerRuns) -> list[Table[Arm]]:
    """Return each peer's speed, and our speed divided by it, also by kind of prompt."""
    values, best = _values(ours.result), ours.result.best.name
    title = f"Other engines on the same weights: speed of our tree {best} and of plain decoding over theirs"
    tables = [Table("", title, values, peers.arms)]
    if ours.kinds:
        kinds = [_over_of_kind(kind, part, best) for kind, part in ours.by_kind().items()]
        title = f"Speed of our tree {best} over theirs, by kind of prompt"
        tables.append(Table("", title, (values[0], *kinds), peers.arms))
    return tables


def _over_of_kind(kind: str, part: Compared, tree: str) -> Value[Arm]:
    numbers = {number for run in part.result.plain.runs for number in run.prompts}
    return Value(kind, lambda peer: ratio_over(part.result.arm(tree), peer.of(numbers)).median, "{:.2f}")


def peer_lines(ours: Compared, peers: PeerRuns) -> Iterator[str]:
    """Yield each peer's settings and whether its tokens are ours, and the reason for each skipped peer."""
    for peer in peers.arms:
        about = f"{settings_text(peer)}, {peer.details['version']}{_parting(peer, ours)}"
        yield f"peer {peer.name}{about}"
    for name, reason in peers.skipped.items():
        yield escape(f"peer {name} skipped: {reason}")


def _parting(peer: Arm, ours: Compared) -> str:
    if ours.config.temperature != 0:
        return ""
    if parted := peer_partings(ours.result.plain, peer):
        return (
            f": {len(parted)} of {ours.result.num_outputs} outputs part from our plain decoding, "
            f"the earliest after {min(parted)} tokens"
        )
    return f": the same tokens as our plain decoding in all {len(peer.runs)} runs"
