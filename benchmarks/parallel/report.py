"""The result of a run on split targets: its numbers, its tables on a terminal, and its plot."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.parallel.plans import WHOLE, Setting
from specinfer.bench.comparisons import Comparison
from specinfer.bench.results import Arm, Run
from specinfer.reporting.environment import Environment
from specinfer.reporting.plots import SERIES_COLOURS, Panel, Series, draw_plot
from specinfer.reporting.spread import partings
from specinfer.reporting.tables import Column, print_models, print_rows

_CLOSE = 0.2  # a prediction with at most this relative error is close


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Resident memory of a rank's process in bytes, at its peak while decoding and at the end."""

    peak: int
    now: int


def setting_of(result: Comparison) -> Setting:
    """Return the setting that a comparison was measured in."""
    setting: Setting = result.situation["setting"]
    return setting


def per_token(arm: Arm, counter: str) -> float:
    """Return a counter of communication for each token generated while decoding."""
    return float(arm.counted(counter)) / arm.num_tokens


def prediction_error(arm: Arm) -> float | None:
    """Return the error of the prediction relative to the measured speed, or None without a prediction."""
    predicted = arm.details["predicted"]
    return None if predicted is None else predicted / arm.tokens_per_second.median - 1


def partings_from(whole: Comparison, result: Comparison) -> list[int]:
    """Return the length of the common prefix with plain decoding in one process, for each output that differs."""
    return partings(
        pair
        for arm in result.arms
        for alone, run in zip(whole.plain.runs, arm.runs, strict=True)
        for pair in zip(alone.outputs, run.outputs, strict=True)
    )


def _run_dict(run: Run) -> dict[str, object]:
    counters = run.counters
    return {
        **run.as_dict(),
        "link_bytes": counters["link_bytes"],
        "link_packets": counters["link_packets"],
        "rank_0_bytes": counters["num_bytes"],
        "rank_0_messages": counters["num_messages"],
    }


def _arm_dict(arm: Arm) -> dict[str, object]:
    return {
        "link_bytes_per_token": per_token(arm, "link_bytes"),
        "rank_0_bytes_per_token": per_token(arm, "num_bytes"),
        "rank_0_messages_per_token": per_token(arm, "num_messages"),
        "predicted_tokens_per_second": arm.details["predicted"],
        "prediction_error": prediction_error(arm),
        "runs": [_run_dict(run) for run in arm.runs],
    }


@dataclass(frozen=True, slots=True)
class ParallelReport:
    """A result for each setting, batch size and temperature.

    Attributes:
        cable: How the hosts were connected, or "none" without hosts.
        memory: Memory of each rank, by split; "1x1" is the whole target in one process.
        costs: Seconds of passes by rows, on which the predictions are based.
    """

    results: tuple[Comparison, ...]
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
    def split_results(self) -> list[Comparison]:
        return [result for result in self.results if setting_of(result) != WHOLE]

    def whole(self, result: Comparison) -> Comparison:
        """Return the result for the same batch size and temperature in one process."""
        situation = (result.size, result.situation["temperature"])
        return next(
            one
            for one in self.results
            if setting_of(one) == WHOLE and (one.size, one.situation["temperature"]) == situation
        )

    @property
    def errors(self) -> list[float]:
        """Relative errors of all predictions."""
        found = [prediction_error(arm) for result in self.results for arm in result.arms]
        return [error for error in found if error is not None]

    def as_dict(self) -> dict[str, Any]:
        """Return the report in a form ready for JSON."""
        whole = self.memory[WHOLE.split][0]
        return {
            "results": [self._result_dict(result) for result in self.results],
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

    def _result_dict(self, result: Comparison) -> dict[str, object]:
        numbers: dict[str, Any] = result.as_dict()
        setting = setting_of(result)
        return numbers | {
            "tensor_parallel": setting.tensor,
            "pipeline_parallel": setting.pipeline,
            "link_latency": setting.latency,
            "temperature": result.situation["temperature"],
            "arms": {arm.name: numbers["arms"][arm.name] | _arm_dict(arm) for arm in result.arms},
            "tokens_before_parting": partings_from(self.whole(result), result),
        }


class _Row(NamedTuple):
    result: Comparison
    arm: Arm

    @property
    def ratio(self) -> str:
        if self.arm is self.result.plain:
            return ""
        ratio = self.result.speedup_of(self.arm)
        return f"{ratio.median:.2f} {ratio.quartiles}"


_LABELS = (
    Column[_Row]("split", lambda row: setting_of(row.result).name, label=True, once=True),
    Column[_Row]("batch", lambda row: f"{row.result.size} T={row.result.situation['temperature']:g}", True, True),
    Column[_Row]("tree", lambda row: row.arm.name, label=True),
)
_RATE = Column[_Row]("tokens/s", lambda row: f"{row.arm.tokens_per_second.median:.4g}")
_SPEEDS = (
    Column[_Row]("nodes", lambda row: f"{row.arm.nodes:.1f}"),
    Column[_Row]("tokens", lambda row: f"{row.arm.tokens_per_pass:.2f}"),
    Column[_Row]("ms", lambda row: f"{row.arm.ms_per_pass:.4g}"),
    _RATE,
    Column[_Row]("ratio", lambda row: row.ratio),
)
_COMMUNICATION = (
    Column[_Row](
        "KB", lambda row: f"{(per_token(row.arm, 'link_bytes') or per_token(row.arm, 'num_bytes')) / 1000:,.1f}"
    ),
    Column[_Row]("messages", lambda row: f"{per_token(row.arm, 'num_messages'):.1f}"),
    _RATE,
    Column[_Row]("predicted", lambda row: f"{row.arm.details['predicted']:.4g}"),
    Column[_Row]("error", lambda row: f"{prediction_error(row.arm):+.0%}"),
)


def print_parallel(report: ParallelReport, console: Console) -> None:
    """Print speeds, communication, memory, predictions, and whether the tokens equal those of one process."""
    print_models(report, console)
    options = report.options
    joined = "all ranks on this machine"
    if options["namespaces"]:
        joined = f"two hosts joined by {report.cable}, {options['link_bandwidth']} each way"
    console.print(f"{joined}; {options['threads']} threads for each process")
    rows = [_Row(result, arm) for result in report.results for arm in result.arms]
    title = f"Split targets, {options['max_tokens']} tokens for each request; medians"
    print_rows(console, title, (*_LABELS, *_SPEEDS), rows)
    console.print(
        "split: tensor ranks x stages, and the link's latency; whole: in one process; batch: requests together, T: "
        "temperature; nodes, tokens: of a request in a pass; ms: of a pass; ratio: over plain decoding split "
        "alike, with quartiles"
    )
    predicted = [row for row in rows if row.arm.details["predicted"] is not None]
    title = "Communication of ranks for a token, and the simulation's prediction"
    print_rows(console, title, (*_LABELS, *_COMMUNICATION), predicted)
    console.print(
        f"KB: {'over the link, headers included' if options['namespaces'] else 'between rank 0 and the others'}, both "
        "ways; messages: between rank 0 and the others; both while decoding"
    )
    _print_memory(report, console)
    console.print()
    errors = [abs(error) for error in report.errors]
    close = sum(error <= _CLOSE for error in errors)
    console.print(f"predicted within {_CLOSE:.0%}: {close} of {len(errors)}, the worst off by {max(errors):.0%}")
    console.print(_fidelity(report))


def _print_memory(report: ParallelReport, console: Console) -> None:
    whole = report.memory[WHOLE.split][0]
    rows = [
        (WHOLE.name if split == WHOLE.split else split, number, rank)
        for split, ranks in report.memory.items()
        for number, rank in enumerate(ranks)
    ]
    columns: tuple[Column[tuple[str, int, RankMemory]], ...] = (
        Column("split", lambda row: row[0], label=True, once=True),
        Column("rank", lambda row: str(row[1])),
        Column("peak MiB", lambda row: f"{row[2].peak / 2**20:,.0f}"),
        Column("of whole", lambda row: f"{row[2].peak / max(whole.peak, 1):.0%}"),
        Column("now MiB", lambda row: f"{row[2].now / 2**20:,.0f}"),
        Column("of whole", lambda row: f"{row[2].now / max(whole.now, 1):.0%}"),
    )
    print_rows(console, "Memory of each rank's process: the peak while decoding, and at the end", columns, rows)


def _fidelity(report: ParallelReport) -> str:
    results = report.split_results
    num_outputs = sum(result.num_outputs * len(result.arms) for result in results)
    parted = [length for result in results for length in partings_from(report.whole(result), result)]
    if not parted:
        return f"split targets: the same tokens as one process in all {num_outputs} outputs"
    return (
        f"split targets: {len(parted)} of {num_outputs} outputs part from one process in "
        f"{report.environment.precision} rounding, the earliest after {min(parted)} tokens"
    )


def plot_parallel(report: ParallelReport, path: str | Path) -> None:
    """Draw ratios, predicted and measured speeds, and memory.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    results, whole = report.split_results, report.memory[WHOLE.split][0]
    colours = [SERIES_COLOURS[place % len(SERIES_COLOURS)] for place in range(len(report.names))]
    ratios, predictions, most = [], [], 0.0
    for place, name in enumerate(report.names):
        arms = [result.arms[place] for result in results]
        measured = [arm.tokens_per_second.median for arm in arms]
        predicted = [arm.details["predicted"] or 0.0 for arm in arms]
        most = max(most, *measured, *predicted)
        predictions.append(Series(name, predicted, x=measured, colour=colours[place], line="none"))
        if place:
            spreads = [result.speedup_of(arm) for result, arm in zip(results, arms, strict=True)]
            notes = [f"{spread.median:.2f}" for spread in spreads]
            ratios.append(Series(name, spreads, colour=colours[place], notes=notes))
    for factor, style in ((1.0, "-"), (1 - _CLOSE, "--"), (1 + _CLOSE, "--")):
        ends = [0.0, 1.1 * most]
        predictions.append(Series("", [factor * end for end in ends], x=ends, colour="black", line=style, marker=""))
    peaks = [
        (WHOLE.name if split == WHOLE.split else f"{split}, rank {number}", 100 * rank.peak / max(whole.peak, 1))
        for split, ranks in report.memory.items()
        for number, rank in enumerate(ranks)
    ]
    memory = Series("peak", [share for _, share in peaks], notes=[f"{share:.0f}" for _, share in peaks])
    panels = [
        Panel("Speed over plain decoding, split alike", ratios, kind="bars", names=list(map(_label, results)),
              label="ratio, median over batches; bars: quartiles", levels=(1.0,), legend="inside"),
        Panel("Simulated; dashed: 20 % off", predictions, label="tokens per second, predicted",
              place_label="tokens per second, measured", legend="inside"),
        Panel("Peak memory, % of one process", [memory], kind="bars", horizontal=True,
              names=[name for name, _ in peaks]),
    ]  # fmt: skip
    title = f"{Path(str(report.options['model'])).name}: {report.environment.description}, split over processes"
    draw_plot(path, title, panels, width=6 + 0.9 * len(results), height=4.8)


def _label(result: Comparison) -> str:
    setting = f"{setting_of(result).split}\n{setting_of(result).latency}".strip()
    return f"{setting}\n{result.size} together\ntemp {result.situation['temperature']:g}"
