"""Measurements of a throughput run and the numbers derived from them. Nothing here is timed or drawn."""

import math
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from specinfer.bench.ceilings import Ceilings
from specinfer.bench.environment import Environment
from specinfer.bench.report import Spread, first_difference
from specinfer.bench.stages import Stages, StageSample, stages_of
from specinfer.core.outputs import RequestOutput
from specinfer.core.step_record import StepRecord

# Drafting; the target's pass; choosing the target's tokens and verifying the draft tokens; all other time.
PARTS = ("draft", "target", "verify", "host")


@dataclass(frozen=True, slots=True)
class Answer:
    """Numbers of one request of a batch, after its first token.

    Attributes:
        num_tokens: Tokens after the first.
        num_passes: Passes after the first token.
        time: Seconds from the first token to the last, during which the rest of the batch runs too.
    """

    num_tokens: int
    num_passes: int
    time: float

    @classmethod
    def of(cls, output: RequestOutput) -> "Answer":
        metrics = output.metrics
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        counters: Any = metrics.speculative_decoding
        num_passes = counters["num_target_passes"] - 1
        return cls(len(output.outputs[0].token_ids) - 1, num_passes, metrics.finished_time - metrics.first_token_time)


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One batch decoded once by one arm.

    Attributes:
        read_time: Seconds until the prefill of the last prompt, when every request has generated a token.
        decode_time: Seconds from then to the end of the last step.
        total_time: Seconds from the call to the outputs.
        outputs: Output tokens of each prompt.
        steps: Steps within `decode_time`.
        times_verification: Whether `verify_time` of a step measures verification alone. False on a GPU, where it
            includes the wait for the pass.
        samples: Steps within `decode_time` that were timed on the device.
        answers: Numbers of each request.
    """

    repeat: int
    prompts: tuple[int, ...]
    read_time: float
    decode_time: float
    total_time: float
    outputs: tuple[tuple[int, ...], ...]
    steps: tuple[StepRecord, ...]
    times_verification: bool = True
    samples: tuple[StageSample, ...] = ()
    answers: tuple[Answer, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def num_decoded(self) -> int:
        """Number of tokens generated within `decode_time`."""
        return sum(step.num_generated for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return self.num_decoded / self.decode_time

    @property
    def total_tokens_per_second(self) -> float:
        return self.num_tokens / self.total_time

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part of `decode_time`."""
        draft = sum(step.draft_time for step in self.steps)
        target = sum(step.target_time for step in self.steps)
        verify = sum(step.verify_time for step in self.steps) if self.times_verification else 0.0
        host = self.decode_time - draft - target
        return dict(zip(PARTS, (draft, target - verify, verify, host), strict=True))

    def as_dict(self) -> dict[str, object]:
        return {
            "repeat": self.repeat,
            "prompts": list(self.prompts),
            "read_ms": 1000 * self.read_time,
            "decode_ms": 1000 * self.decode_time,
            "total_ms": 1000 * self.total_time,
            "num_tokens": self.num_tokens,
            "num_decoded": self.num_decoded,
            "num_passes": len(self.steps),
        }


@dataclass(frozen=True, slots=True)
class BatchArm:
    """One way to decode batches of one size, with its runs in the order they were made."""

    name: str
    runs: tuple[BatchRun, ...]

    @property
    def tokens_per_second(self) -> Spread:
        return Spread.of(run.tokens_per_second for run in self.runs)

    @property
    def total_tokens_per_second(self) -> Spread:
        return Spread.of(run.total_tokens_per_second for run in self.runs)

    @property
    def num_passes(self) -> int:
        return sum(len(run.steps) for run in self.runs)

    @property
    def requests_per_pass(self) -> float:
        """Mean number of requests in a pass, which is below the batch size because requests end at different times."""
        return self._total("num_requests") / self.num_passes

    @property
    def nodes(self) -> float:
        """Mean number of draft tokens of a request in a pass."""
        return self._total("num_guessed") / self._total("num_requests")

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens that a request generates in a pass."""
        return self._total("num_generated") / self._total("num_requests")

    @property
    def ms_per_pass(self) -> float:
        return 1000 * sum(run.decode_time for run in self.runs) / self.num_passes

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in the decoding time."""
        total = sum(run.decode_time for run in self.runs)
        return {part: sum(run.seconds[part] for run in self.runs) / total for part in PARTS}

    @property
    def stages(self) -> Stages:
        """Stages of the steps that were timed on the device."""
        return stages_of(run.samples for run in self.runs)

    def _total(self, name: str) -> int:
        return sum(getattr(step, name) for run in self.runs for step in run.steps)

    def as_dict(self) -> dict[str, object]:
        return {
            "tokens_per_second": self.tokens_per_second.median,
            "tokens_per_second_spread": self.tokens_per_second.as_dict(),
            "total_tokens_per_second": self.total_tokens_per_second.median,
            "total_tokens_per_second_spread": self.total_tokens_per_second.as_dict(),
            "nodes": self.nodes,
            "tokens_per_pass": self.tokens_per_pass,
            "requests_per_pass": self.requests_per_pass,
            "ms_per_pass": self.ms_per_pass,
            "percent_of_time": {part: 100 * share for part, share in self.shares.items()},
            "stages": self.stages.as_dict(),
            "num_passes": self.num_passes,
            "runs": [run.as_dict() for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Plain decoding and each tree at one batch size. Runs at the same index form a pair."""

    size: int
    plain: BatchArm
    trees: tuple[BatchArm, ...]

    @property
    def arms(self) -> tuple[BatchArm, ...]:
        return (self.plain, *self.trees)

    def speedup_of(self, arm: BatchArm) -> Spread:
        """Return the decoding speed divided by that of plain decoding, for each pair of runs."""
        return self._ratios(arm, lambda run: run.tokens_per_second)

    def total_speedup_of(self, arm: BatchArm) -> Spread:
        """Return the same ratio for the whole time, including prefill."""
        return self._ratios(arm, lambda run: run.total_tokens_per_second)

    def partings(self, arm: BatchArm) -> list[int]:
        """Return the length of the common prefix with plain decoding, for each output that differs from it."""
        return [
            first_difference(expected, tokens)
            for plain, run in zip(self.plain.runs, arm.runs, strict=True)
            for expected, tokens in zip(plain.outputs, run.outputs, strict=True)
            if expected != tokens
        ]

    def kind_of(self, arm: BatchArm, prompts: Collection[int]) -> tuple[float, float]:
        """Return tokens per pass of the requests with these prompts, and their median speed over plain decoding."""
        pairs = [
            (ours, plain)
            for run, other in zip(arm.runs, self.plain.runs, strict=True)
            for prompt, ours, plain in zip(run.prompts, run.answers, other.answers, strict=True)
            if prompt in prompts
        ]
        num_tokens, num_passes = (sum(getattr(one, name) for one, _ in pairs) for name in ("num_tokens", "num_passes"))
        speedup = statistics.median(plain.time / ours.time for ours, plain in pairs) if pairs else math.nan
        return num_tokens / num_passes if pairs else math.nan, speedup

    @property
    def num_outputs(self) -> int:
        """Number of outputs of each arm."""
        return sum(len(run.outputs) for run in self.plain.runs)

    def _ratios(self, arm: BatchArm, rate: Callable[[BatchRun], float]) -> Spread:
        return Spread.of(rate(run) / rate(plain) for plain, run in zip(self.plain.runs, arm.runs, strict=True))

    def as_dict(self) -> dict[str, object]:
        arms = {self.plain.name: self.plain.as_dict()}
        for arm in self.trees:
            speedup, total = self.speedup_of(arm), self.total_speedup_of(arm)
            arms[arm.name] = {
                "speedup": speedup.median,
                "speedup_spread": speedup.as_dict(),
                "total_speedup": total.median,
                "total_speedup_spread": total.as_dict(),
                "tokens_before_parting": self.partings(arm),
                **arm.as_dict(),
            }
        return {"batch_size": self.size, "num_outputs": self.num_outputs, "arms": arms}


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """Results of all batch sizes, in the requested order.

    Attributes:
        ceilings: Measured limits of the device, from which the floors of stages are computed.
        kinds: Kind of each prompt, by its number. Empty if the prompts are texts to continue.
    """

    results: tuple[BatchResult, ...]
    options: Mapping[str, object]
    environment: Environment
    ceilings: Ceilings | None = None
    kinds: tuple[str, ...] = ()

    def by_kind(self, result: BatchResult, arm: BatchArm) -> dict[str, tuple[float, float]]:
        """Return tokens per pass, and speed over plain decoding, of the requests of each kind of prompt."""
        prompts = {kind: {i for i, own in enumerate(self.kinds) if own == kind} for kind in dict.fromkeys(self.kinds)}
        return {kind: result.kind_of(arm, numbers) for kind, numbers in prompts.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arms. The first is plain decoding."""
        return tuple(arm.name for arm in self.results[0].arms)

    def as_dict(self) -> dict[str, object]:
        """Return the report in a form ready for JSON."""
        batches = [result.as_dict() for result in self.results]
        if self.kinds:
            for batch, result in zip(batches, self.results, strict=True):
                batch["by_kind"] = {arm.name: self._kind_dict(result, arm) for arm in result.trees}
        return {
            "batches": batches,
            "options": dict(self.options),
            "environment": self.environment.as_dict(),
            "ceilings": None if self.ceilings is None else self.ceilings.as_dict(),
        }

    def _kind_dict(self, result: BatchResult, arm: BatchArm) -> dict[str, object]:
        """Return the numbers of the kinds with prompts in these batches, ready for JSON."""
        found = self.by_kind(result, arm)
        return {
            kind: {"tokens_per_pass": tokens, "request_speedup": speedup}
            for kind, (tokens, speedup) in found.items()
            if not math.isnan(tokens)
        }
