"""Measured pass times of a model: the statistics computed from them, their tables on a terminal, and their plot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.kernels.attention import AttentionTimes
from specinfer.reporting.environment import Environment
from specinfer.reporting.plots import SERIES_COLOURS, Panel, Series, draw_plot
from specinfer.reporting.spread import Spread
from specinfer.reporting.tables import Column, print_models, print_rows


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to compute the model; dtype is a key of `DTYPES`."""

    dtype: str
    native: bool
    quantization: str | None = None

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.dtype, self.quantization, "native" if self.native else "torch")))


class Pass(NamedTuple):
    """Pass to time: a tree or draft level of `size` nodes, a prompt, or one row after a context, of `size` tokens."""

    kind: str
    size: int


TREE, PROMPT, LEVEL, CONTEXT = "tree", "prompt", "level", "context"


@dataclass(frozen=True, slots=True)
class ArmTimes:
    """Seconds of each pass of one arm in each repeat.

    Attributes:
        weight_bytes: Bytes of the target's weights that a pass reads.
    """

    arm: Arm
    weight_bytes: int
    seconds: Mapping[Pass, tuple[float, ...]]

    def ms(self, timed: Pass) -> Spread:
        return Spread.from_values(1000 * seconds for seconds in self.seconds[timed])

    def sizes(self, kind: str) -> list[int]:
        """Return the measured sizes of one kind, ascending."""
        return sorted(timed.size for timed in self.seconds if timed.kind == kind)

    def ratio(self, timed: Pass, base: Pass) -> Spread:
        """Return the time of one pass divided by that of another, in each repeat."""
        return _ratios(self.seconds[timed], self.seconds[base])

    def relative(self, num_rows: int) -> Spread:
        """Return the time of a tree of `num_rows` nodes divided by that of a single node."""
        return self.ratio(Pass(TREE, num_rows), Pass(TREE, 1))

    def bytes_per_second(self, num_rows: int) -> float:
        """Return the bytes of weights that the median pass reads per second."""
        return 1000 * self.weight_bytes / self.ms(Pass(TREE, num_rows)).median


@dataclass(frozen=True, slots=True)
class KernelsReport:
    """Times of all arms, measured in turns, and the machine's memory bandwidth.

    Attributes:
        bandwidth: Bytes per second of each way to read memory, by round.
        kernels: Description of the available native kernels.
        attention: Times of one layer's attention; empty unless on a GPU.
    """

    arms: tuple[ArmTimes, ...]
    bandwidth: Mapping[str, tuple[float, ...]]
    kernels: str
    options: Mapping[str, object]
    environment: Environment
    attention: tuple[AttentionTimes, ...] = ()

    @property
    def fastest_way(self) -> str:
        """Name of the fastest way to read memory."""
        return max(self.bandwidth, key=lambda name: max(self.bandwidth[name]))

    @property
    def limit(self) -> float:
        """Memory bandwidth in bytes per second: the best of all rounds, since other load can only reduce it."""
        return max(self.bandwidth[self.fastest_way])

    @property
    def rounds(self) -> Spread:
        """Bytes per second of the best way in each round, which shows how steady the machine was."""
        return Spread.from_values(map(max, zip(*self.bandwidth.values(), strict=True)))

    def over_torch(self, times: ArmTimes, timed: Pass) -> Spread | None:
        """Return PyTorch's time in the same dtype divided by this arm's in each repeat, or None for PyTorch itself."""
        own = Arm(times.arm.dtype, native=False)
        for other in self.arms:
            if other.arm == own != times.arm:
                return _ratios(other.seconds[timed], times.seconds[timed])
        return None

    def of_first(self, times: ArmTimes) -> Spread:
        """Return this arm's time of a single row divided by the first arm's, in each repeat."""
        single = Pass(TREE, 1)
        return _ratios(times.seconds[single], self.arms[0].seconds[single])

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return {
            "bandwidth_gb_per_s": self.limit / 1e9,
            "bandwidth_by_way": {name: max(rates) / 1e9 for name, rates in self.bandwidth.items()},
            "bandwidth_rounds": {"median": self.rounds.median / 1e9, "min": self.rounds.min / 1e9},
            "kernels": self.kernels,
            "arms": {times.arm.name: self._arm_as_dict(times) for times in self.arms},
            "attention": [times.as_dict(self.limit) for times in self.attention],
            "options": dict(self.options),
            "environment": self.environment.as_dict(),
        }

    def _arm_as_dict(self, times: ArmTimes) -> dict[str, object]:
        trees = []
        for rows in times.sizes(TREE):
            relative, rate = times.relative(rows), times.bytes_per_second(rows)
            numbers: dict[str, object] = {
                "rows": rows,
                **self._timed_as_dict(times, Pass(TREE, rows)),
                **relative.fields("relative"),
                "gb_per_s": rate / 1e9,
                "percent_of_bandwidth": 100 * rate / self.limit,
            }
            trees.append(numbers)
        prompts = [
            {"tokens": size, **self._timed_as_dict(times, Pass(PROMPT, size)), "tokens_per_second": prompt_rate(times)}
            for size in times.sizes(PROMPT)
        ]
        return {
            "dtype": times.arm.dtype,
            "native": times.arm.native,
            "quantization": times.arm.quantization,
            "weight_bytes": times.weight_bytes,
            "one_row_of_first_arm": self.of_first(times).median,
            "rows": trees,
            "prompt": prompts[0],
            "draft_level": [
                {"nodes": size, **self._timed_as_dict(times, Pass(LEVEL, size))} for size in times.sizes(LEVEL)
            ],
            "context": [
                {"context": size, **self._timed_as_dict(times, Pass(CONTEXT, size))} for size in times.sizes(CONTEXT)
            ],
        }

    def _timed_as_dict(self, times: ArmTimes, timed: Pass) -> dict[str, object]:
        over_torch = self.over_torch(times, timed)
        none = {"speedup_over_torch": None, "speedup_over_torch_spread": None}
        return times.ms(timed).fields("ms") | (none if over_torch is None else over_torch.fields("speedup_over_torch"))


def prompt_rate(times: ArmTimes) -> float:
    """Return the prompt tokens processed per second."""
    (size,) = times.sizes(PROMPT)
    return 1000 * size / times.ms(Pass(PROMPT, size)).median


def _ratios(above: tuple[float, ...], below: tuple[float, ...]) -> Spread:
    return Spread.from_values(a / b for a, b in zip(above, below, strict=True))


def print_kernels(report: KernelsReport, console: Console) -> None:
    """Print the memory bandwidth, the times of each arm by rows, and the other passes."""
    print_models(report, console)
    console.print(
        f"Native kernels: {report.kernels}. Memory is read at {report.limit / 1e9:.1f} GB/s at best "
        f"({report.fastest_way}, of {len(report.bandwidth)} ways, each once a repeat between the passes), at "
        f"{report.rounds.median / 1e9:.1f} in the median repeat and {report.rounds.min / 1e9:.1f} in the worst"
    )
    if busy := report.options["busy"]:
        console.print(f"With {busy} other busy process{'es' if busy != 1 else ''}")
    for times in report.arms:
        _print_curve(report, times, console)
    _print_others(report, console)
    if report.attention:
        _print_attention(report, console)


def _print_curve(report: KernelsReport, times: ArmTimes, console: Console) -> None:
    def over_torch(rows: int) -> str:
        ratio = report.over_torch(times, Pass(TREE, rows))
        return "" if ratio is None else f"{ratio.median:.2f}"

    columns = (
        Column[int]("rows", str),
        Column[int]("ms", lambda rows: f"{times.ms(Pass(TREE, rows)).median:.2f}"),
        Column[int]("quartiles", lambda rows: times.ms(Pass(TREE, rows)).quartiles),
        Column[int]("of 1 row", lambda rows: f"{times.relative(rows).median:.2f}"),
        Column[int]("GB/s", lambda rows: f"{times.bytes_per_second(rows) / 1e9:.1f}"),
        Column[int]("of memory", lambda rows: f"{times.bytes_per_second(rows) / report.limit:.0%}"),
        Column[int]("over torch", over_torch),
    )
    title = (
        f"{times.arm.name}: a pass over a tree, {report.options['context']} tokens before it; "
        f"{times.weight_bytes / 1e6:,.0f} MB of weights; medians of {report.options['repeats']}"
    )
    print_rows(console, title, columns, times.sizes(TREE))


def _print_others(report: KernelsReport, console: Console) -> None:
    """Print one row for each arm; all have the same passes."""
    first = report.arms[0]
    (prompt,), levels, contexts = (first.sizes(kind) for kind in (PROMPT, LEVEL, CONTEXT))

    def timed(name: str, one: Pass) -> Column[ArmTimes]:
        return Column(name, lambda times: f"{times.ms(one).median:.2f}")

    columns = (
        Column[ArmTimes]("", lambda times: times.arm.name, label=True),
        Column[ArmTimes]("prompt", lambda times: f"{prompt_rate(times):.0f}"),
        Column[ArmTimes]("1 row", lambda times: f"{report.of_first(times).median:.2f}"),
        *(timed(f"level {size}", Pass(LEVEL, size)) for size in levels),
        *(timed(f"after {size}", Pass(CONTEXT, size)) for size in contexts),
    )
    print_rows(console, "Other passes, medians", columns, report.arms)
    words = [f"prompt: tokens/s of reading one of {prompt}; 1 row: time of a pass over one, of the first line's"]
    if levels:
        words.append(f"level: ms of a draft level of {', '.join(map(str, levels))} nodes")
    if contexts:
        words.append(f"after: ms of one row after {', '.join(map(str, contexts))} tokens")
    console.print("; ".join(words))


def _print_attention(report: KernelsReport, console: Console) -> None:
    def us(times: AttentionTimes) -> Spread:
        return Spread.from_values(1e6 * seconds for seconds in times.seconds)

    columns = (
        Column[AttentionTimes]("requests", lambda times: str(times.requests), label=True),
        Column[AttentionTimes]("nodes", lambda times: str(times.nodes)),
        Column[AttentionTimes]("us", lambda times: f"{us(times).median:.1f}"),
        Column[AttentionTimes](
            "quartiles", lambda times: f"{us(times).lower_quartile:.1f}-{us(times).upper_quartile:.1f}"
        ),
        Column[AttentionTimes]("torch", lambda times: f"{1e6 * Spread.from_values(times.torch_seconds).median:.1f}"),
        Column[AttentionTimes]("over torch", lambda times: f"{times.over_torch.median:.2f}"),
        Column[AttentionTimes]("of memory", lambda times: f"{times.of_floor(report.limit):.0%}"),
    )
    context = report.attention[0].context
    title = f"Attention of one layer, {context} tokens before each tree; medians"
    print_rows(console, title, columns, report.attention)


def plot_kernels(report: KernelsReport, path: str | Path) -> None:
    """Draw pass times by rows: absolute, relative to one row, and as weight bandwidth against the memory limit.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """

    def lines(values: Callable[[ArmTimes], Sequence[float | Spread]]) -> list[Series]:
        return [
            Series(times.arm.name, values(times), x=times.sizes(TREE), colour=colour)
            for times, colour in zip(report.arms, 9 * SERIES_COLOURS[1:], strict=False)
        ]

    nodes = "rows: nodes of the tree"
    panels = [
        Panel("Time of a pass; bars: quartiles",
              lines(lambda times: [times.ms(Pass(TREE, n)) for n in times.sizes(TREE)]),
              counts=True, label="milliseconds", place_label=nodes, legend="inside"),
        Panel("Time of a pass over that of one row", lines(lambda times: list(map(times.relative, times.sizes(TREE)))),
              counts=True, label="ratio, median of pairs", place_label=nodes, levels=(1.0,)),
        Panel("Weights read; dashed: the memory's bandwidth",
              lines(lambda times: [times.bytes_per_second(n) / 1e9 for n in times.sizes(TREE)]),
              counts=True, label="GB per second", place_label=nodes, levels=(report.limit / 1e9,)),
    ]  # fmt: skip
    title = (
        f"{Path(str(report.options['model'])).name}: {report.environment.description}, "
        f"{report.environment.num_threads} threads; a pass over a tree after {report.options['context']} tokens"
    )
    draw_plot(path, title, panels)
