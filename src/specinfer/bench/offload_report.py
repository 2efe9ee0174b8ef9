"""Results of a measurement on streamed targets, and statistics of them. Nothing is timed or plotted here."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from specinfer.bench.environment import Environment
from specinfer.bench.offload_peers import OffloadPeer
from specinfer.bench.report import Spread
from specinfer.bench.throughput_report import BatchArm, BatchResult, BatchRun


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


@dataclass(frozen=True, slots=True)
class OffloadRun:
    """Run of one batch by one of our arms.

    Attributes:
        bytes_read: Bytes streamed during decoding.
        seconds_reading: Seconds of decoding in which a read was in progress.
        seconds_waiting: Seconds of decoding in which a pass waited for weights.
        peak_resident: Peak resident bytes of the process during the run, as the operating system counts them.
        disk_rate: Bytes per second of direct reads, or of copies to the device, without other load around the run.
    """

    batch: BatchRun
    bytes_read: int
    seconds_reading: float
    seconds_waiting: float
    peak_resident: int
    disk_rate: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second streamed during decoding."""
        return self.bytes_read / self.batch.decode_time

    @property
    def disk_share(self) -> float:
        """Bandwidth as a share of the disk's or link's rate around the run."""
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
    """One way to decode in one situation, with its runs in order."""

    name: str
    runs: tuple[OffloadRun, ...]

    @property
    def batches(self) -> BatchArm:
        """This arm without the streaming counters."""
        return BatchArm(self.name, tuple(run.batch for run in self.runs))

    @property
    def bandwidth(self) -> Spread:
        return Spread.of(run.bandwidth for run in self.runs)

    @property
    def disk_share(self) -> Spread:
        return Spread.of(run.disk_share for run in self.runs)

    @property
    def waiting_share(self) -> float:
        """Share of the decoding time that passes waited for weights."""
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
    """Plain decoding and each tree at one batch size and temperature. Runs with the same index form a pair."""

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
        """This result without the streaming counters, which has the ratios and partings."""
        return BatchResult(self.size, self.plain.batches, tuple(arm.batches for arm in self.trees))

    @property
    def best(self) -> OffloadArm:
        """Tree with the largest speedup over plain decoding, with which peers are compared."""
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
    """Comparison of the outputs of the target in memory with those of the streamed target.

    Attributes:
        num_outputs: Number of outputs compared, all of plain decoding.
        partings: Number of shared leading tokens of each pair of outputs that differ.
    """

    num_outputs: int
    partings: tuple[int, ...]

    def as_dict(self) -> dict[str, object]:
        return {"num_outputs": self.num_outputs, "tokens_before_parting": list(self.partings)}


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """Results for each batch size and temperature, in the requested order.

    Attributes:
        target_bytes: Approximate bytes of all weights of the target.
        memory_budget: Memory limit of a process in bytes.
        own_cap: Method by which the operating system held our process to the budget, or "none".
        disk_rates: Bytes per second of each way to read the disk directly, or to copy to the device, by round.
        disk_is_direct: True if those reads bypassed the page cache.
        peers: Peers measured in the same run; `peers_skipped` has the reason for each that was not.
        resident: Comparison with the target in memory, or None if it was not requested.
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
        return max(self.loading.peak_resident, *(arm.peak_resident for result in self.results for arm in result.arms))

    def alone(self, temperature: float) -> OffloadResult:
        """Return the result of one request at a time, with which peers are compared."""
        return next(result for result in self.results if (result.size, result.temperature) == (1, temperature))

    def as_dict(self) -> dict[str, object]:
        """Return the report as values that JSON can hold."""
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
