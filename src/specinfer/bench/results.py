"""Measured runs and arms, and the numbers derived from them. Nothing here is timed or drawn.

An arm is one way to decode. All arms of a comparison ran the same batches of prompts in turns, so runs at the same
index form a pair, and a ratio of two arms is the median over pairs.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specinfer.bench.stages import Stages, StageSample, stages_of
from specinfer.core.outputs import RequestOutput
from specinfer.core.step_record import StepRecord
from specinfer.reporting.spread import Spread

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
    def from_output(cls, output: RequestOutput) -> "Answer":
        metrics = output.metrics
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        counters: Any = metrics.speculative_decoding
        num_passes = counters["num_target_passes"] - len(output.outputs)
        num_tokens = sum(len(each.token_ids) - 1 for each in output.outputs)
        return cls(num_tokens, num_passes, metrics.finished_time - metrics.first_token_time)


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of prompts decoded once by one arm. A batch of one is a request by itself.

    Attributes:
        prompts: Numbers of the prompts.
        prompt_time: Seconds until every request has generated its first token.
        time: Seconds from then to the last token.
        total_time: Seconds from the call to the outputs.
        outputs: Output tokens of each prompt; if it has several outputs, one after the other.
        steps: Steps within `time`; none of another engine.
        num_first: Number of tokens that arrived first, together; more than 1 if others arrived with the first.
        times_verification: Whether `verify_time` of a step measures verification alone. False on a GPU, where it
            includes the wait for the pass.
        samples: Steps within `time` that were timed on the device.
        answers: Numbers of each request.
        counters: Further measurements of the run by name.
        origins: Number of tokens by the drafter that proposed them, or None for those that the target emitted.
    """

    repeat: int
    prompts: tuple[int, ...]
    prompt_time: float
    time: float
    total_time: float
    outputs: tuple[tuple[int, ...], ...]
    steps: tuple[StepRecord, ...] = ()
    num_first: int = 1
    times_verification: bool = True
    samples: tuple[StageSample, ...] = ()
    answers: tuple[Answer, ...] = ()
    counters: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str | None, int] = field(default_factory=dict)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Output of the only prompt."""
        (tokens,) = self.outputs
        return tokens

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def num_decoded(self) -> int:
        """Number of tokens generated within `time`."""
        return sum(step.num_generated for step in self.steps) if self.steps else self.num_tokens - self.num_first

    @property
    def tokens_per_second(self) -> float:
        return self.num_decoded / self.time

    @property
    def total_tokens_per_second(self) -> float:
        return self.num_tokens / self.total_time

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part of `time`."""
        draft, target, verify = (
            sum(getattr(step, f"{name}_time") for step in self.steps) for name in ("draft", "target", "verify")
        )
        verify = verify if self.times_verification else 0.0
        return dict(zip(PARTS, (draft, target - verify, verify, self.time - draft - target), strict=True))

    def as_dict(self) -> dict[str, object]:
        """Return the numbers of a batch, ready for JSON."""
        return {
            "repeat": self.repeat,
            "prompts": list(self.prompts),
            "read_ms": 1000 * self.prompt_time,
            "decode_ms": 1000 * self.time,
            "total_ms": 1000 * self.total_time,
            "num_tokens": self.num_tokens,
            "num_decoded": self.num_decoded,
            "num_passes": len(self.steps),
        }

    def as_request(self) -> dict[str, object]:
        """Return the numbers of a request by itself, ready for JSON."""
        return {
            "prompt": self.prompts[0],
            "repeat": self.repeat,
            "prompt_ms": 1000 * self.prompt_time,
            "decode_ms": 1000 * self.time,
            "num_tokens": self.num_decoded,
            "num_passes": len(self.steps),
        }


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode, with its runs in the order they were made.

    Attributes:
        details: What is known of the arm besides its runs, ready for JSON.
    """

    name: str
    runs: tuple[Run, ...]
    details: Mapping[str, Any] = field(default_factory=dict)

    def of(self, prompts: Collection[int]) -> "Arm":
        """Return an arm with only the runs on these prompts."""
        return replace(self, runs=tuple(run for run in self.runs if set(run.prompts) <= set(prompts)))

    def spread(self, value: Callable[[Run], float]) -> Spread:
        """Return the spread of a value over the runs."""
        return Spread.from_values(map(value, self.runs))

    def total(self, value: Callable[[StepRecord], float]) -> float:
        """Return the sum of a value over all steps."""
        return sum(value(step) for run in self.runs for step in run.steps)

    def counted(self, name: str) -> Any:
        """Return the sum of a counter over all runs."""
        return sum(run.counters[name] for run in self.runs)

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated after the first ones."""
        return sum(run.num_decoded for run in self.runs)

    @property
    def num_passes(self) -> int:
        return sum(len(run.steps) for run in self.runs)

    @property
    def num_requests(self) -> float:
        """Number of requests in all passes together."""
        return self.total(lambda step: step.num_requests)

    @property
    def tokens_per_second(self) -> Spread:
        return self.spread(lambda run: run.tokens_per_second)

    @property
    def total_tokens_per_second(self) -> Spread:
        return self.spread(lambda run: run.total_tokens_per_second)

    @property
    def ms_per_token(self) -> Spread:
        return self.spread(lambda run: 1000 * run.time / run.num_decoded)

    @property
    def ms_per_pass(self) -> float:
        return 1000 * sum(run.time for run in self.runs) / self.num_passes

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens that a request generates in a pass."""
        return self.num_tokens / self.num_requests

    @property
    def accepted_per_pass(self) -> dict[str, float]:
        """Mean number of draft tokens of each drafter that a request accepts in a pass, most first."""
        counts = sum((Counter(run.origins) for run in self.runs), Counter[str | None]())
        return {name: count / self.num_requests for name, count in counts.most_common() if name is not None}

    @property
    def nodes(self) -> float:
        """Mean number of draft tokens of a request in a pass."""
        return self.total(lambda step: step.num_guessed) / self.num_requests

    @property
    def requests_per_pass(self) -> float:
        """Mean number of requests in a pass, which is below the batch size because requests end at different times."""
        return self.num_requests / self.num_passes

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in the decoding time."""
        total = sum(run.time for run in self.runs)
        return {part: sum(run.seconds[part] for run in self.runs) / total for part in PARTS}

    @property
    def split(self) -> dict[str, float]:
        """Mean milliseconds of a step by part; verification is part of the target's."""
        draft, target, verify, host = (self.ms_per_pass * self.shares[part] for part in PARTS)
        return {"draft": draft, "target": target + verify, "rest": host}

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of passes that accepted a path of at least depth 1, 2, ..., among the passes that drafted as deep."""
        steps = [step for run in self.runs for step in run.steps]
        shares = []
        for depth in range(1, max(step.num_levels for step in steps) + 1):
            deep = [step for step in steps if step.num_levels >= depth]
            shares.append(sum(step.num_generated > depth for step in deep) / len(deep))
        return shares

    @property
    def stages(self) -> Stages:
        """Stages of the steps that were timed on the device."""
        return stages_of(run.samples for run in self.runs)
