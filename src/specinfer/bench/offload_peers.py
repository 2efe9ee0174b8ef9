"""Runs of other engines with the same memory cap, compared with ours on the same prompts, one at a time."""

from collections.abc import Mapping
from dataclasses import dataclass

from specinfer.bench.report import Run, Spread, first_difference
from specinfer.bench.throughput_report import BatchArm


@dataclass(frozen=True, slots=True)
class PeerRun:
    """Run of a peer on one prompt.

    Attributes:
        peak_resident: Peak resident bytes of the process during the run, mapped pages of files included.
    """

    run: Run
    peak_resident: int


@dataclass(frozen=True, slots=True)
class OffloadPeer:
    """Runs of one peer at one temperature, in order.

    Attributes:
        name: Name of the peer with the type of its weights, such as "llama.cpp:bf16".
        drafts: True if the peer speculates.
        cap: Method by which the operating system limited the peer to `limit` bytes, or "none".
        settings: Settings with which the peer was fastest.
    """

    name: str
    temperature: float
    drafts: bool
    version: str
    settings: Mapping[str, object]
    cap: str
    limit: int
    runs: tuple[PeerRun, ...]

    @property
    def tokens_per_second(self) -> Spread:
        """Tokens per second after the first tokens."""
        return Spread.of(one.run.tokens_per_second for one in self.runs)

    @property
    def peak_resident(self) -> int:
        return max(one.peak_resident for one in self.runs)

    @property
    def settings_text(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())

    def ratio(self, ours: BatchArm) -> Spread:
        """Return our speed divided by the peer's for each pair; ours are batches of one prompt, in the same order."""
        pairs = list(zip(ours.runs, self.runs, strict=True))
        assert all((mine.repeat, mine.prompts) == (one.run.repeat, (one.run.prompt,)) for mine, one in pairs)
        return Spread.of(mine.tokens_per_second / one.run.tokens_per_second for mine, one in pairs)

    def partings(self, plain: BatchArm) -> list[int]:
        """Return the number of shared leading tokens of each run that is no prefix of our plain decoding."""
        pairs = [(one.run.token_ids, mine.outputs[0]) for mine, one in zip(plain.runs, self.runs, strict=True)]
        return [first_difference(said, expected) for said, expected in pairs if said != expected[: len(said)]]

    def as_dict(self, plain: BatchArm, best: BatchArm) -> dict[str, object]:
        """Return values that JSON can hold, compared with our plain decoding and our best tree."""
        speeds, tree = self.tokens_per_second, self.ratio(best)
        return {
            "name": self.name,
            "temperature": self.temperature,
            "version": self.version,
            "settings": dict(self.settings),
            "cap": self.cap,
            "limit": self.limit,
            "tokens_per_second": speeds.median,
            "tokens_per_second_spread": speeds.as_dict(),
            "tree": best.name,
            "tree_over_peer": tree.median,
            "tree_over_peer_spread": tree.as_dict(),
            "plain_over_peer": self.ratio(plain).median,
            "tokens_before_parting": self.partings(plain),
            "peak_resident": self.peak_resident,
            "runs": [one.run.as_dict() | {"peak_resident": one.peak_resident} for one in self.runs],
        }
