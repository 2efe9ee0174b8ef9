"""Measurements of peers, and their comparison with our arms on the same prompts and repeats."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from specinfer.bench.report import Arm, LatencyReport, Run, Spread, first_difference


@dataclass(frozen=True, slots=True)
class PeerArm:
    """One peer with its fastest settings and its runs, in the order they were made.

    Attributes:
        name: Name with the type of the weights, such as "llama.cpp:bf16".
        version: Version of the library.
    """

    name: str
    drafts: bool
    version: str
    settings: Mapping[str, object]
    runs: tuple[Run, ...]

    @property
    def tokens_per_second(self) -> Spread:
        return Spread.of(run.tokens_per_second for run in self.runs)

    @property
    def settings_text(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())

    def ratio(self, ours: Arm) -> Spread:
        """Return our decoding speed after the first tokens divided by the peer's, for each pair of runs."""
        pairs = zip(ours.runs, self.runs, strict=True)
        return Spread.of(one.tokens_per_second / other.tokens_per_second for one, other in pairs)

    def request_ratio(self, ours: Arm) -> Spread:
        """Return our speed divided by the peer's for whole requests, including prefill, for each pair of runs."""
        pairs = zip(ours.runs, self.runs, strict=True)
        return Spread.of((other.prompt_time + other.time) / (one.prompt_time + one.time) for one, other in pairs)

    def partings(self, plain: Arm) -> list[int]:
        """Return the length of the common prefix with our plain decoding, for each run that differs from it."""
        pairs = [(one.token_ids, other.token_ids) for one, other in zip(plain.runs, self.runs, strict=True)]
        return [first_difference(one, other) for one, other in pairs if one != other]

    def as_dict(self, plain: Arm, best: Arm) -> dict[str, object]:
        """Return a form ready for JSON, with ratios to our plain decoding and to the best of our trees."""
        tree, whole = self.ratio(best), self.request_ratio(best)
        speeds = self.tokens_per_second
        return {
            "version": self.version,
            "settings": dict(self.settings),
            "tokens_per_second": speeds.median,
            "tokens_per_second_spread": speeds.as_dict(),
            "tree": best.name,
            "tree_over_peer": tree.median,
            "tree_over_peer_spread": tree.as_dict(),
            "tree_request_over_peer": whole.median,
            "plain_over_peer": self.ratio(plain).median,
            "tokens_before_parting": self.partings(plain),
            "runs": [run.as_dict() for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class PeerReport:
    """The peers that were measured, and the reason for each one that was not."""

    arms: tuple[PeerArm, ...]
    skipped: Mapping[str, str]

    def of(self, prompts: Collection[int]) -> "PeerReport":
        """Return a report with only the runs on these prompts."""
        kept = (replace(arm, runs=tuple(run for run in arm.runs if run.prompt in prompts)) for arm in self.arms)
        return replace(self, arms=tuple(kept))

    def as_ratios(self, report: LatencyReport) -> dict[str, object]:
        """Return each peer's speed and the ratio of our speeds to it, ready for JSON."""
        best = best_tree(report)
        return {
            arm.name: {
                "tokens_per_second": arm.tokens_per_second.median,
                "tree_over_peer": arm.ratio(best).median,
                "plain_over_peer": arm.ratio(report.plain).median,
            }
            for arm in self.arms
        }

    def as_dict(self, report: LatencyReport) -> dict[str, object]:
        best = best_tree(report)
        return {
            "peers": {arm.name: arm.as_dict(report.plain, best) for arm in self.arms},
            "peers_skipped": dict(self.skipped),
        }


def best_tree(report: LatencyReport) -> Arm:
    """Return the tree that peers are compared with: our fastest in this run."""
    return max(report.trees, key=lambda arm: report.speedup_of(arm).median)
