"""What a run on split targets measured, and the numbers read off it. Values only: nothing here is timed or drawn."""

from collections.abc import Mapping
from dataclasses import dataclass

from specinfer.bench.environment import Environment
from specinfer.bench.parallel_plans import WHOLE, Setting
from specinfer.bench.report import Spread, first_difference
from specinfer.bench.throughput_report import BatchArm, BatchResult, BatchRun


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that a rank's process held at most while it decoded, and at the end, as the operating system counts."""

    peak: int
    now: int


@dataclass(frozen=True, slots=True)
class ParallelRun:
    """One batch decoded once by one arm.

    Attributes:
        link_bytes: That crossed the link between the hosts while it decoded, both ways and headers included;
            `link_packets` alike. 0 without a link of ours.
        num_bytes: Between rank 0 and all others, both ways, while it decoded; `num_messages` alike.
        by_rank: How often the first, second, ... guess was right, as "auto" saw it so far; () for other trees.
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
        predicted: Tokens per second that the simulation foresees; None for one process.
    """

    name: str
    runs: tuple[ParallelRun, ...]
    predicted: float | None = None

    @property
    def batches(self) -> BatchArm:
        """The same without what ranks told each other."""
        return BatchArm(self.name, tuple(run.batch for run in self.runs))

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to what was measured."""
        return None if self.predicted is None else self.predicted / self.batches.tokens_per_second.median - 1

    @property
    def link_bytes_per_token(self) -> float:
        """For each token said while decoding."""
        return self._per_token("link_bytes")

    @property
    def bytes_per_token(self) -> float:
        """Between rank 0 and the others, alike."""
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
    """Plain decoding and each tree in one setting, at one batch size and temperature; runs at the same place are one
    pair.
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
        """The same without what ranks told each other: ratios are its."""
        return BatchResult(self.size, self.plain.batches, tuple(arm.batches for arm in self.trees))

    def ratio(self, arm: ParallelArm) -> Spread:
        """Over plain decoding in the same setting, pair by pair."""
        return self.batches.speedup_of(arm.batches)

    def partings(self, whole: "ParallelResult") -> list[int]:
        """For each output of any arm that is not what one process said plainly, how many tokens they share."""
        return [
            first_difference(expected, tokens)
            for arm in self.arms
            for alone, run in zip(whole.plain.runs, arm.runs, strict=True)
            for expected, tokens in zip(alone.batch.outputs, run.batch.outputs, strict=True)
            if expected != tokens
        ]

    @property
    def num_outputs(self) -> int:
        """Of all arms."""
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
        cable: How the hosts were joined; "none" if there were none.
        memory: Setting's split -> of each rank; "1x1" is the whole target in one process.
        costs: What the predictions rest on: seconds of passes by rows.
    """

    results: tuple[ParallelResult, ...]
    cable: str
    memory: Mapping[str, tuple[RankMemory, ...]]
    costs: Mapping[str, object]
    options: Mapping[str, object]
    environment: Environment

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arms; the first is plain decoding."""
        return tuple(arm.name for arm in self.results[0].arms)

    @property
    def split_results(self) -> list[ParallelResult]:
        return [result for result in self.results if result.setting != WHOLE]

    def whole(self, result: ParallelResult) -> ParallelResult:
        """The same situation in one process."""
        situation = (result.size, result.temperature)
        return next(one for one in self.results if one.setting == WHOLE and (one.size, one.temperature) == situation)

    @property
    def errors(self) -> list[float]:
        """Of all predictions."""
        return [arm.error for result in self.results for arm in result.arms if arm.error is not None]

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
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
