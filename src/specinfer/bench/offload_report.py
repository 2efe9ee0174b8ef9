"""What a run on streamed targets measured, and the numbers read off it. Values only: nothing here is timed or drawn."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from specinfer.bench.environment import Environment
from specinfer.bench.offload_peers import OffloadPeer
from specinfer.bench.report import Spread
from specinfer.bench.throughput_report import BatchArm, BatchResult, BatchRun


@dataclass(frozen=True, slots=True)
class Loading:
    """How the target lies after loading, sizes in bytes.

    Attributes:
        num_layers: Of the target; 0 if nothing is streamed. `num_resident` of them stay in memory.
        bytes_per_pass: Read for each pass.
        peak_resident: Most that the process held until all was loaded and passes were timed.
    """

    num_layers: int
    num_resident: int
    bytes_per_pass: int
    peak_resident: int


@dataclass(frozen=True, slots=True)
class OffloadRun:
    """One batch decoded once by one arm of ours.

    Attributes:
        bytes_read: While it decoded; seconds alike: those in which a read was under way, and those in which a pass
            waited for weights.
        peak_resident: Most bytes that the process held during the run, as the operating system counts them.
        disk_rate: Bytes per second that direct reads alone, or copies to the device, gave just before.
    """

    batch: BatchRun
    bytes_read: int
    seconds_reading: float
    seconds_waiting: float
    peak_resident: int
    disk_rate: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second that were streamed while it decoded."""
        return self.bytes_read / self.batch.decode_time

    @property
    def disk_share(self) -> float:
        """Of what the disk gave just before."""
        return self.bandwidth / self.disk_rate

    def as_dict(self) -> dict[str, object]:
        return {
            **self.batch.as_dict(),
            "bytes_read": self.bytes_read,
            "bytes_per_second": self.bandwidth,
            "disk_bytes_per_second": self.disk_rate,
            "disk_share": self.disk_share,
            "reading_ms": 1000 * self.seconds_reading,
            "waiting_ms": 1000 * self.seconds_waiting,
            "peak_resident": self.peak_resident,
        }


@dataclass(frozen=True, slots=True)
class OffloadArm:
    """One way to decode in one situation, and its runs in the order they were made."""

    name: str
    runs: tuple[OffloadRun, ...]

    @property
    def batches(self) -> BatchArm:
        """The same without what was streamed."""
        return BatchArm(self.name, tuple(run.batch for run in self.runs))

    @property
    def bandwidth(self) -> Spread:
        return Spread.of(run.bandwidth for run in self.runs)

    @property
    def disk_share(self) -> Spread:
        return Spread.of(run.disk_share for run in self.runs)

    @property
    def waiting_share(self) -> float:
        """Of the time of decoding, what passes waited for weights."""
        return sum(run.seconds_waiting for run in self.runs) / sum(run.batch.decode_time for run in self.runs)

    @property
    def peak_resident(self) -> int:
        return max(run.peak_resident for run in self.runs)

    def as_dict(self) -> dict[str, object]:
        return self.batches.as_dict() | {
            "bytes_per_second": self.bandwidth.median,
            "disk_share": self.disk_share.median,
            "disk_share_spread": self.disk_share.as_dict(),
            "waiting_share": self.waiting_share,
            "peak_resident": self.peak_resident,
            "runs": [run.as_dict() for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class OffloadResult:
    """Plain decoding and each tree at one batch size and temperature; runs at the same place are one pair."""

    temperature: float
    plain: OffloadArm
    trees: tuple[OffloadArm, ...]

    @property
    def size(self) -> int:
        return len(self.plain.runs[0].batch.prompts)

    @property
    def arms(self) -> tuple[OffloadArm, ...]:
        return (self.plain, *self.trees)

    @property
    def batches(self) -> BatchResult:
        """The same without what was streamed: ratios and partings are its."""
        return BatchResult(self.size, self.plain.batches, tuple(arm.batches for arm in self.trees))

    @property
    def best(self) -> OffloadArm:
        """The tree that was the fastest over plain decoding: the one that peers are compared with."""
        return max(self.trees, key=lambda arm: self.batches.speedup_of(arm.batches).median)

    def as_dict(self) -> dict[str, object]:
        numbers = self.batches.as_dict()
        arms: dict[str, object] = {}
        for arm in self.arms:
            ratios: object = numbers["arms"][arm.name]  # type: ignore[index]
            assert isinstance(ratios, dict)
            arms[arm.name] = ratios | arm.as_dict()
        return numbers | {"temperature": self.temperature, "arms": arms}


@dataclass(frozen=True, slots=True)
class ResidentCheck:
    """What the target said when it was loaded whole, against what it said streamed.

    Attributes:
        num_outputs: Compared, all of plain decoding.
        partings: For each that differs, how many tokens they share.
    """

    num_outputs: int
    partings: tuple[int, ...]

    def as_dict(self) -> dict[str, object]:
        return {"num_outputs": self.num_outputs, "tokens_before_parting": list(self.partings)}


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """A result for each batch size and temperature, in the order asked for.

    Attributes:
        target_bytes: Of all weights of the target, about; `memory_budget` is what a process may hold.
        own_cap: How the operating system held our process to the budget; "none" if it was not asked to.
        disk_rates: Way to read the disk directly, or to copy to the device -> bytes per second, round by round.
        disk_is_direct: Whether those reads went past the page cache.
        peers: Measured in the same run; `peers_skipped` has the reason for each that was not.
        resident: None if the comparison was not asked for.
    """

    results: tuple[OffloadResult, ...]
    loading: Loading
    target_bytes: int
    memory_budget: int
    own_cap: str
    disk_rates: Mapping[str, tuple[float, ...]]
    disk_is_direct: bool
    options: Mapping[str, object]
    environment: Environment
    peers: tuple[OffloadPeer, ...] = ()
    peers_skipped: Mapping[str, str] = field(default_factory=dict)
    resident: ResidentCheck | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of our arms; the first is plain decoding."""
        return tuple(arm.name for arm in self.results[0].arms)

    @property
    def source(self) -> str:
        """What layers come through: "disk" or "link"."""
        return "link" if self.options["offload"] == "cpu" else "disk"

    @property
    def disk_rate(self) -> float:
        """Bytes per second, the best of all ways and rounds."""
        return max(rate for rates in self.disk_rates.values() for rate in rates)

    @property
    def peak_resident(self) -> int:
        """Of our process, loading included."""
        return max(self.loading.peak_resident, *(arm.peak_resident for result in self.results for arm in result.arms))

    def alone(self, temperature: float) -> OffloadResult:
        """The result of one request at a time: what peers are compared with."""
        return next(result for result in self.results if (result.size, result.temperature) == (1, temperature))

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "results": [result.as_dict() for result in self.results],
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
            "peers": [self._peer(peer) for peer in self.peers],
            "peers_skipped": dict(self.peers_skipped),
            "resident": None if self.resident is None else self.resident.as_dict(),
            "options": dict(self.options),
            "environment": self.environment.as_dict(),
        }

    def _peer(self, peer: OffloadPeer) -> dict[str, object]:
        result = self.alone(peer.temperature)
        return peer.as_dict(result.plain.batches, result.best.batches)
