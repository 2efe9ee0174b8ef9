"""The result of a measurement on streamed targets, and the numbers derived from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.report import ratio_over
from specinfer.bench.comparisons import Comparison
from specinfer.bench.results import Arm, Run
from specinfer.reporting.environment import Environment
from specinfer.reporting.spread import partings


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
        """Return the number of shared leading tokens of each run that is no prefix of our plain decoding.

        They are compared up to the end of the shorter.
        """
        pairs = zip(self.alone(peer).plain.runs, peer.runs, strict=True)
        outputs = [(run.token_ids, plain.token_ids) for plain, run in pairs]
        return partings((theirs[: len(ours)], ours[: len(theirs)]) for theirs, ours in outputs)

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
