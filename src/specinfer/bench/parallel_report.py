"""Measurements of a run on split targets and the numbers derived from them. Nothing here is timed or drawn."""

from collections.abc import Mapping
from dataclasses import dataclass

from specinfer.bench.environment import Environment
from specinfer.bench.parallel_plans import WHOLE, Setting
from specinfer.bench.report import Spread, first_difference
from specinfer.bench.throughput_report import BatchArm, BatchResult, BatchRun


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Resident memory of a rank's process in bytes, at its peak while decoding and at the end."""

    peak: int
    now: int


@dataclass(frozen=True, slots=True)
class ParallelRun:
    """One batch decoded once by one arm.

    Attributes:
        link_bytes: Bytes that crossed the link between the hosts while decoding, in both directions and with headers.
            0 if the run sets up no link.
        link_packets: Packets that crossed the link, counted in the same way.
        num_bytes: Bytes between rank 0 and all others while decoding, in both directions.
        num_messages: Messages between rank 0 and all others, counted in the same way.
        by_rank: Acceptance rates of the first, second, ... proposed token at a node, as "auto" has measured them so
            far; () for other trees.
    """

    batch: BatchRun
    link_bytes: int
    link_packets: int
    num_bytes: int
    num_messages: int
    by_rank: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, object]:
        return {
            **self.batch.as_dict(),
            "link_bytes": self.link_bytes,
            "link_packets": self.link_packets,
            "rank_0_bytes": self.num_bytes,
            "rank_0_messages": self.num_messages,
        }


@dataclass(frozen=True, slots=True)
class ParallelArm:
    """One tree in one setting and situation, and its runs in the order they were made.

    Attributes:
        predicted: Tokens per second that the simulation predicts, or None for one process.
    """

    name: str
    runs: tuple[ParallelRun, ...]
    predicted: float | None = None

    @property
    def batches(self) -> BatchArm:
        """The arm without the ranks' communication."""
        return BatchArm(self.name, tuple(run.batch for run in self.runs))

    @property
    def error(self) -> float | None:
        """Error of the prediction relative to the measured speed, or None without a prediction."""
        return None if self.predicted is None else self.predicted / self.batches.tokens_per_second.median - 1

    @property
    def link_bytes_per_token(self) -> float:
        """Bytes that crossed the link for each token generated while decoding."""
        return self._per_token("link_bytes")

    @property
    def bytes_per_token(self) -> float:
        """Bytes between rank 0 and the others for each token generated while decoding."""
        return self._per_token("num_bytes")

    @property
    def messages_per_token(self) -> float:
        return self._per_token("num_messages")

    def _per_token(self, name: str) -> float:
        total: int = sum(getattr(run, name) for run in self.runs)
        return total / sum(run.batch.num_decoded for run in self.runs)

    def as_dict(self) -> dict[str, object]:
        return self.batches.as_dict() | {
            "link_bytes_per_token": self.link_bytes_per_token,
            "rank_0_bytes_per_token": self.bytes_per_token,
            "rank_0_messages_per_token": self.messages_per_token,
            "predicted_tokens_per_second": self.predicted,
            "prediction_error": self.error,
            "runs": [run.as_dict() for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class ParallelResult:
    """Plain decoding and each tree in one setting, at one batch size and temperature.

    Runs at the same index form a pair.
    """

    setting: Setting
    temperature: float
    plain: ParallelArm
    trees: tuple[ParallelArm, ...]

    @property
    def size(self) -> int:
        return len(self.plain.runs[0].batch.prompts)

    @property
    def arms(self) -> tuple[ParallelArm, ...]:
        return (self.plain, *self.trees)

    @property
    def batches(self) -> BatchResult:
        """The result without the ranks' communication, from which ratios are computed."""
        return BatchResult(self.size, self.plain.batches, tuple(arm.batches for arm in self.trees))

    def ratio(self, arm: ParallelArm) -> Spread:
        """Return the arm's speed divided by that of plain decoding in the same setting, for each pair of runs."""
        return self.batches.speedup_of(arm.batches)

    def partings(self, whole: "ParallelResult") -> list[int]:
        """Return the length of the common prefix with plain decoding in one process, for each output that differs."""
        return [
            first_difference(expected, tokens)
            for arm in self.arms
            for alone, run in zip(whole.plain.runs, arm.runs, strict=True)
            for expected, tokens in zip(alone.batch.outputs, run.batch.outputs, strict=True)
            if expected != tokens
        ]

    @property
    def num_outputs(self) -> int:
        """Number of outputs of all arms."""
        return sum(len(run.batch.outputs) for arm in self.arms for run in arm.runs)

    def as_dict(self) -> dict[str, object]:
        numbers = self.batches.as_dict()
        arms: dict[str, object] = {}
        for arm in self.arms:
            ratios: object = numbers["arms"][arm.name]  # type: ignore[index]
            assert isinstance(ratios, dict)
            arms[arm.name] = ratios | arm.as_dict()
        setting = {
            "tensor_parallel": self.setting.tensor,
            "pipeline_parallel": self.setting.pipeline,
            "link_latency": self.setting.latency,
        }
        return numbers | setting | {"temperature": self.temperature, "arms": arms}


@dataclass(frozen=True, slots=True)
class ParallelReport:
    """A result for each setting, batch size and temperature.

    Attributes:
        cable: How the hosts were connected, or "none" without hosts.
        memory: Memory of each rank, by split; "1x1" is the whole target in one process.
        costs: Seconds of passes by rows, on which the predictions are based.
    """

    results: tuple[ParallelResult, ...]
    cable: str
    memory: Mapping[str, tuple[RankMemory, ...]]
    costs: Mapping[str, object]
    options: Mapping[str, object]
    environment: Environment

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arms. The first is plain decoding."""
        return tuple(arm.name for arm in self.results[0].arms)

    @property
    def split_results(self) -> list[ParallelResult]:
        return [result for result in self.results if result.setting != WHOLE]

    def whole(self, result: ParallelResult) -> ParallelResult:
        """Return the result for the same batch size and temperature in one process."""
        situation = (result.size, result.temperature)
        return next(one for one in self.results if one.setting == WHOLE and (one.size, one.temperature) == situation)

    @property
    def errors(self) -> list[float]:
        """Relative errors of all predictions."""
        return [arm.error for result in self.results for arm in result.arms if arm.error is not None]

    def as_dict(self) -> dict[str, object]:
        """Return the report in a form ready for JSON."""
        whole = self.memory[WHOLE.split][0]
        return {
            "results": [
                result.as_dict() | {"tokens_before_parting": result.partings(self.whole(result))}
                for result in self.results
            ],
            "cable": self.cable,
            "memory": {
                split: [
                    {"peak": rank.peak, "now": rank.now, "peak_of_whole": rank.peak / whole.peak,
                     "now_of_whole": rank.now / whole.now}
                    for rank in ranks
                ]
                for split, ranks in self.memory.items()
            },
            "costs": dict(self.costs),
            "options": dict(self.options),
            "environment": self.environment.as_dict(),
        }  # fmt: skip
