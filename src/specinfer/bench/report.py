"""Measurements of a latency run and the numbers derived from them. Nothing here is timed or drawn."""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specinfer.bench.ceilings import Ceilings
from specinfer.bench.environment import Environment
from specinfer.bench.stages import Stages, StageSample, stages_of

if TYPE_CHECKING:  # that module imports this one
    from specinfer.bench.peers.report import PeerReport

PLAIN = "off"  # name of the arm that decodes without speculation, as in `tree="off"`


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, quartiles and extremes of repeated measurements."""

    median: float
    lower_quartile: float
    upper_quartile: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        values = sorted(values)
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        return cls(quartiles[1], quartiles[0], quartiles[2], values[0], values[-1])

    def as_dict(self) -> dict[str, float]:
        return {
            "lower_quartile": self.lower_quartile,
            "upper_quartile": self.upper_quartile,
            "min": self.min,
            "max": self.max,
        }


@dataclass(frozen=True, slots=True)
class Pass:
    """One step after the first token: its numbers of draft and accepted tokens, and the seconds of its two parts."""

    num_levels: int  # depth of the tree
    num_guessed: int
    num_accepted: int
    draft_time: float
    target_time: float


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt decoded once by one arm.

    Attributes:
        prompt_time: Seconds from the request to its first token.
        time: Seconds from the first token to the last.
        token_ids: The whole output; its first token is not part of `time`.
        num_first: Number of tokens that arrived first, together; more than 1 if others arrived with the first.
        samples: Steps within `time` that were timed on the device.
    """

    prompt: int
    repeat: int
    prompt_time: float
    time: float
    token_ids: tuple[int, ...]
    passes: tuple[Pass, ...]
    num_first: int = 1
    samples: tuple[StageSample, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated within `time`."""
        return len(self.token_ids) - self.num_first

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.time

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "repeat": self.repeat,
            "prompt_ms": 1000 * self.prompt_time,
            "decode_ms": 1000 * self.time,
            "num_tokens": self.num_tokens,
            "num_passes": len(self.passes),
        }


@dataclass(frozen=True, slots=True)
class Split:
    """Mean milliseconds of one step by part. `rest` is all time outside drafting and the target's pass."""

    draft: float
    target: float
    rest: float

    @property
    def total(self) -> float:
        return self.draft + self.target + self.rest

    def as_dict(self) -> dict[str, float]:
        return {"draft": self.draft, "target": self.target, "rest": self.rest}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode, with its runs in the order they were made."""

    name: str
    runs: tuple[Run, ...]

    def of(self, prompts: Collection[int]) -> "Arm":
        """Return an arm with only the runs on these prompts."""
        return replace(self, runs=tuple(run for run in self.runs if run.prompt in prompts))

    @property
    def num_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs)

    @property
    def num_passes(self) -> int:
        return sum(len(run.passes) for run in self.runs)

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / self.num_passes

    @property
    def tokens_per_second(self) -> Spread:
        return Spread.of(run.tokens_per_second for run in self.runs)

    @property
    def ms_per_token(self) -> Spread:
        return Spread.of(1000 * run.time / run.num_tokens for run in self.runs)

    @property
    def prompt_ms(self) -> Spread:
        return Spread.of(1000 * run.prompt_time for run in self.runs)

    @property
    def guessed_per_pass(self) -> float:
        return sum(p.num_guessed for run in self.runs for p in run.passes) / self.num_passes

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of passes that accepted a path of at least depth 1, 2, ..., among the passes that drafted as deep."""
        passes = [p for run in self.runs for p in run.passes]
        shares = []
        for depth in range(1, max(p.num_levels for p in passes) + 1):
            guessed = [p for p in passes if p.num_levels >= depth]
            shares.append(sum(p.num_accepted >= depth for p in guessed) / len(guessed))
        return shares

    @property
    def split(self) -> Split:
        draft = sum(p.draft_time for run in self.runs for p in run.passes)
        target = sum(p.target_time for run in self.runs for p in run.passes)
        total, each = sum(run.time for run in self.runs), 1000 / self.num_passes
        return Split(each * draft, each * target, each * (total - draft - target))

    @property
    def stages(self) -> Stages:
        """Stages of the steps that were timed on the device."""
        return stages_of(run.samples for run in self.runs)

    def as_summary(self) -> dict[str, object]:
        """Return the main numbers in a form ready for JSON."""
        return {
            "tokens_per_second": self.tokens_per_second.median,
            "tokens_per_second_spread": self.tokens_per_second.as_dict(),
            "ms_per_token": self.ms_per_token.median,
            "ms_per_token_spread": self.ms_per_token.as_dict(),
            "prompt_ms": self.prompt_ms.median,
            "tokens_per_pass": self.tokens_per_pass,
            "guessed_per_pass": self.guessed_per_pass,
        }

    def as_dict(self) -> dict[str, object]:
        split = self.split
        return {
            **self.as_summary(),
            "acceptance_by_depth": self.acceptance_by_depth,
            "ms_per_pass": {**split.as_dict(), "total": split.total},
            "percent_of_pass": {name: 100 * ms / split.total for name, ms in split.as_dict().items()},
            "stages": self.stages.as_dict(),
            "num_tokens": self.num_tokens,
            "num_passes": self.num_passes,
            "runs": [run.as_dict() for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """Plain decoding and each tree on the same prompts. Runs at the same index form a pair.

    Attributes:
        trees: Arms in the requested order. The headline numbers are those of the first.
        peers: Other engines measured in the same run, or None if none were requested.
        ceilings: Measured limits of the device, from which the floors of stages are computed.
        kinds: Kind of each prompt, by its number. Empty if the prompts are texts to continue.
    """

    plain: Arm
    trees: tuple[Arm, ...]
    options: Mapping[str, object]
    environment: Environment
    peers: "PeerReport | None" = None
    ceilings: Ceilings | None = None
    kinds: tuple[str, ...] = ()

    def by_kind(self) -> "dict[str, LatencyReport]":
        """Return a report of the prompts of each kind."""
        found = {}
        for kind in dict.fromkeys(self.kinds):
            prompts = {number for number, own in enumerate(self.kinds) if own == kind}
            trees, peers = tuple(arm.of(prompts) for arm in self.trees), self.peers and self.peers.of(prompts)
            found[kind] = replace(self, plain=self.plain.of(prompts), trees=trees, peers=peers, kinds=())
        return found

    @property
    def arms(self) -> tuple[Arm, ...]:
        return (self.plain, *self.trees)

    def arm(self, name: str) -> Arm:
        """Return the arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def num_prompts(self) -> int:
        return len({run.prompt for run in self.plain.runs})

    @property
    def speedup(self) -> float:
        return self.speedup_of(self.trees[0]).median

    @property
    def tokens_per_pass(self) -> float:
        return self.trees[0].tokens_per_pass

    def speedup_of(self, arm: Arm) -> Spread:
        """Return the time per token of plain decoding divided by the arm's, after the first token, for each pair."""
        return Spread.of(self._ratios(arm, lambda run: run.time / run.num_tokens))

    def request_speedup_of(self, arm: Arm) -> Spread:
        """Return the same ratio for whole requests, including prefill."""
        return Spread.of(self._ratios(arm, lambda run: (run.prompt_time + run.time) / len(run.token_ids)))

    def partings(self, arm: Arm) -> list[int]:
        """Return the length of the common prefix with plain decoding, for each run that differs from it."""
        pairs = zip(self.plain.runs, arm.runs, strict=True)
        return [first_difference(plain.token_ids, run.token_ids) for plain, run in pairs
                if plain.token_ids != run.token_ids]  # fmt: skip

    def as_dict(self) -> dict[str, object]:
        """Return the report in a form ready for JSON."""
        arms = {PLAIN: self.plain.as_dict()}
        for arm in self.trees:
            speedup, request_speedup = self.speedup_of(arm), self.request_speedup_of(arm)
            arms[arm.name] = {
                "speedup": speedup.median,
                "speedup_spread": speedup.as_dict(),
                "request_speedup": request_speedup.median,
                "request_speedup_spread": request_speedup.as_dict(),
                "tokens_before_parting": self.partings(arm),
                **arm.as_dict(),
            }
        return {
            "speedup": self.speedup,
            "tokens_per_pass": self.tokens_per_pass,
            "tree": self.trees[0].name,
            "num_prompts": self.num_prompts,
            "num_pairs": len(self.plain.runs),
            "plain_target_ms_per_pass": self.plain.split.target,
            "arms": arms,
            "options": dict(self.options),
            "environment": self.environment.as_dict(),
            "ceilings": None if self.ceilings is None else self.ceilings.as_dict(),
            **({} if self.peers is None else self.peers.as_dict(self)),
            **({"by_kind": {kind: part.as_kind_dict() for kind, part in self.by_kind().items()}} if self.kinds else {}),
        }

    def as_kind_dict(self) -> dict[str, object]:
        """Return the numbers that are reported for each kind of prompt, in a form ready for JSON."""
        arms: dict[str, dict[str, object]] = {arm.name: arm.as_summary() for arm in self.arms}
        for arm in self.trees:
            speedup = self.speedup_of(arm)
            arms[arm.name] |= {"speedup": speedup.median, "speedup_spread": speedup.as_dict()}
        peers = {} if self.peers is None else self.peers.as_ratios(self)
        return {"num_prompts": self.num_prompts, "arms": arms, "peers": peers}

    def _ratios(self, arm: Arm, cost: Callable[[Run], float]) -> list[float]:
        return [cost(plain) / cost(run) for plain, run in zip(self.plain.runs, arm.runs, strict=True)]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two outputs."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
