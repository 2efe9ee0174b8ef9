"""Measurements of a serving run under vLLM's names. Nothing here is timed or drawn."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specinfer.bench.options import PLAIN
from specinfer.bench.serve_options import ServeConfig
from specinfer.bench.serve_runs import RequestRun, Round
from specinfer.reporting.files import json_value
from specinfer.reporting.spread import Spread


@dataclass(frozen=True, slots=True)
class ServeArm:
    """One arm, with its rounds at one rate."""

    name: str
    rounds: tuple[Round, ...]

    @property
    def runs(self) -> list[RequestRun]:
        return [run for each in self.rounds for run in each.runs]

    @property
    def served(self) -> list[RequestRun]:
        return [run for run in self.runs if run.is_served]

    @property
    def duration(self) -> float:
        return sum(each.duration for each in self.rounds)

    def values(self, metric: str) -> list[float]:
        """Return the values of a metric for all served requests, in milliseconds."""
        return [1000 * seconds for run in self.served for seconds in run.seconds_of(metric)]

    def num_good(self, limits: Mapping[str, float]) -> int:
        """Return the number of served requests within these limits in milliseconds, or their own ones."""
        return sum(run.is_good(limits) for run in self.served)

    def share_good(self, limits: Mapping[str, float]) -> float:
        """Return the percentage of all requests that were served within these limits, or their own ones."""
        return 100 * self.num_good(limits) / len(self.runs)

    def by_class(self, limits: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Return the goodput of each class of requests, if there are classes, and how many met their targets."""
        found = {}
        for kind in sorted({run.kind for run in self.runs} - {""}):
            runs = [run for run in self.runs if run.kind == kind]
            num_good = sum(run.is_served and run.is_good(limits) for run in runs)
            found[kind] = {"requests": len(runs), "good": num_good, "request_goodput": num_good / self.duration}
        return found

    @property
    def acceptance(self) -> dict[str, float] | None:
        """Speculation counters over all requests, or None if the server sent none."""
        stats = [run.stats for run in self.served if run.stats]
        if not stats:
            return None
        names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        steps, drafted, accepted = (sum(each.get(name, 0) for each in stats) for name in names)
        return {
            "spec_decode_num_drafts": steps,
            "spec_decode_num_draft_tokens": drafted,
            "spec_decode_num_accepted_tokens": accepted,
            "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else 0.0,
            "spec_decode_acceptance_length": 1 + accepted / steps if steps else 1.0,
        }

    def has_limits(self, limits: Mapping[str, float]) -> bool:
        return bool(limits) or any(run.limits for run in self.runs)

    def numbers(self, config: ServeConfig) -> dict[str, object]:
        """Return the results under vLLM's keys."""
        served, duration, limits = self.served, self.duration, config.goodput
        num_input, num_output = (sum(getattr(run, name) for run in served) for name in ("num_prompt", "num_output"))
        has_limits = self.has_limits(limits)
        found: dict[str, object] = {
            "duration": duration,
            "completed": len(served),
            "failed": len(self.runs) - len(served),
            "refused": sum(run.is_refused for run in self.runs),
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": len(served) / duration,
            "request_goodput": self.num_good(limits) / duration if has_limits else None,
            "met_targets_rate": self.share_good(limits) if has_limits else None,
            "output_throughput": num_output / duration,
            "total_token_throughput": (num_input + num_output) / duration,
            "max_concurrent_requests": max(each.most_at_once for each in self.rounds),
        }
        for metric in config.metrics:
            found |= spread_of(metric, self.values(metric), config.percentiles)
        return found | (self.acceptance or {})

    def as_dict(self, config: ServeConfig) -> dict[str, object]:
        runs = self.runs
        return self.numbers(config) | {
            "goodput_by_class": self.by_class(config.goodput),
            "input_lens": [run.num_prompt for run in runs],
            "output_lens": [run.num_output for run in runs],
            "ttfts": [run.ttft for run in runs],
            "itls": [list(run.gaps) for run in runs],
            "latencies": [run.latency for run in runs],
            "errors": [run.error or "" for run in runs],
        }


def spread_of(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, object]:
    """Return mean, median, standard deviation and percentiles of milliseconds, or 0 if nothing was served."""
    array = np.array(values or [0.0])
    found: dict[str, object] = {
        f"mean_{metric}_ms": float(array.mean()),
        f"median_{metric}_ms": float(np.median(array)),
        f"std_{metric}_ms": float(array.std()),
    }
    return found | {f"p{p:g}_{metric}_ms": float(np.percentile(array, p)) for p in percentiles}


@dataclass(frozen=True, slots=True)
class RateResult:
    """All arms at one rate. Rounds at the same index form a pair, and so do the requests in them."""

    rate: float
    arms: tuple[ServeArm, ...]

    @property
    def plain(self) -> ServeArm | None:
        """The plain decoding arm, with which others are compared, or None if there is none or no other."""
        return next((arm for arm in self.arms if arm.name == PLAIN), None) if len(self.arms) > 1 else None

    def ratios_of(self, arm: ServeArm) -> dict[str, Spread]:
        """Return the speedups over plain decoding: of throughput for each round, of latencies for each request."""
        plain = self.plain
        if plain is None or arm is plain:
            return {}
        rounds = zip(plain.rounds, arm.rounds, strict=True)
        found = {"output_throughput": [b.output_throughput / a.output_throughput for a, b in rounds if b.served
                                       and a.served]}  # fmt: skip
        measures: dict[str, Callable[[RequestRun], float]] = {
            "ttft": lambda run: run.ttft,
            "tpot": lambda run: run.tpot,
            "e2el": lambda run: run.latency,
        }
        pairs = list(self._pairs(arm))
        for name, seconds in measures.items():
            found[name] = [seconds(a) / seconds(b) for a, b in pairs if seconds(a) and seconds(b)]
        return {name: Spread.from_values(values) for name, values in found.items() if values}

    def partings(self, arm: ServeArm) -> tuple[int, int]:
        """Return the number of pairs with different texts, and the number of all pairs."""
        pairs = list(self._pairs(arm))
        return sum(a.text != b.text for a, b in pairs), len(pairs)

    def as_dict(self, config: ServeConfig) -> dict[str, object]:
        """Return the numbers of each arm by its name."""
        arms: dict[str, object] = {}
        for arm in self.arms:
            numbers = arm.as_dict(config)
            if ratios := self.ratios_of(arm):
                numbers["ratios"] = {name: {"median": each.median, **each.as_dict()} for name, each in ratios.items()}
                numbers["num_other_texts"] = self.partings(arm)[0]
            arms[arm.name] = numbers
        return arms

    def _pairs(self, arm: ServeArm) -> Iterator[tuple[RequestRun, RequestRun]]:
        """Yield pairs of served requests of plain decoding and of the arm, with the same prompt in the same round."""
        assert self.plain is not None
        for ours, others in zip(self.plain.rounds, arm.rounds, strict=True):
            for a, b in zip(ours.runs, others.runs, strict=True):
                if a.is_served and b.is_served:
                    yield a, b


@dataclass(frozen=True, slots=True)
class Overhead:
    """Added milliseconds of a stream over HTTP compared with the same stream in one process, one request at a time.

    Attributes:
        token_ms: Added time of a token after the first, for each pair.
        first_ms: Added time to the first token, for each pair.
        local_ms: Time of a token within one process, for comparison.
    """

    token_ms: Spread
    first_ms: Spread
    local_ms: Spread
    num_pairs: int

    def as_dict(self) -> dict[str, object]:
        spreads = {"token_ms": self.token_ms, "first_token_ms": self.first_ms, "in_process_token_ms": self.local_ms}
        return {name: {"median": spread.median, **spread.as_dict()} for name, spread in spreads.items()} | {
            "num_pairs": self.num_pairs
        }

    def __str__(self) -> str:
        token, first = self.token_ms, self.first_ms
        return (
            f"Streaming over HTTP, one request at a time, plain decoding: {token.median:.3f} ms a token "
            f"({token.lower_quartile:.3f} to {token.upper_quartile:.3f}) and {first.median:.2f} ms to the first token "
            f"beyond the same in one process ({self.local_ms.median:.2f} ms a token), {self.num_pairs} pairs"
        )


@dataclass(frozen=True, slots=True)
class Served:
    """Results of all rates, in the requested order.

    Attributes:
        model: Name of the model on the server.
        highest_rates: For each arm, the highest rate at which the wanted share of requests met their targets, or None
            if it missed them at all rates; None if no such rate was wanted.
    """

    results: tuple[RateResult, ...]
    config: ServeConfig
    model: str
    overhead: Overhead | None = None
    highest_rates: Mapping[str, float | None] | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the numbers of the report, ready for JSON."""
        return {
            "rates": [
                {"request_rate": json_value(result.rate), "arms": result.as_dict(self.config)}
                for result in self.results
            ],
            "overhead": None if self.overhead is None else self.overhead.as_dict(),
            "highest_rates": None if self.highest_rates is None else dict(self.highest_rates),
        }
