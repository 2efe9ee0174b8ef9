"""Tables and figures as data: a part has a table with the paper's rows and ours, and panels of a plot."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.paper import numbers
from specinfer.bench.acceptance import run_acceptance
from specinfer.bench.acceptance_options import AcceptanceConfig
from specinfer.bench.acceptance_plans import MODES
from specinfer.bench.acceptance_report import AcceptanceReport, HitRates, Row
from specinfer.bench.comparisons import numbers_by_kind
from specinfer.bench.options import check_once, check_whole
from specinfer.reporting.plots import Panel, Series
from specinfer.reporting.tables import Column, print_rows


@dataclass(frozen=True, slots=True)
class PaperConfig:
    """Options of the reproduction.

    Attributes:
        model: Target, as for `specinfer bench`.
        drafters: Its drafters. Tables 1 to 3 and figures use the first.
        parts: Tables and figures to reproduce.
        grow: Size to grow the target to for figures 7, 8, 10 and 11, or None for its own size.
        offload_grow: Size of the target of figure 8, which is larger than memory by a budget of a third of it.
        boosted: Drafters that were boost-tuned one after the other, or None for those of the embedded pair.
        batch_sizes: Numbers of requests that run together.
        num_prompts: Prompts of each table, and of each batch size of figures.
        max_tokens: Tokens generated for each prompt.
        out: Folder for numbers and plots, or None to only print.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    model: str = "demo-chat"
    drafters: str | tuple[str, ...] = "auto"
    parts: tuple[str, ...] = ()
    grow: str | None = None
    offload_grow: str | None = "3b"
    boosted: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] = numbers.BATCH_SIZES
    num_prompts: int = 20
    max_tokens: int = 64
    repeats: int = 1
    seed: int = 0
    out: str | Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("max_tokens", 2), ("repeats", 1)):
            check_whole(name, getattr(self, name), least)
        check_once("batch_sizes", self.batch_sizes)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: a label and the text of each column."""

    label: str
    cells: Sequence[str]


@dataclass(frozen=True, slots=True)
class Part:
    """One table or figure.

    Attributes:
        note: What differs from the paper.
        results: All that was measured, ready for JSON.
    """

    name: str
    title: str
    columns: Sequence[str]
    lines: Sequence[Line]
    note: str
    panels: Sequence[Panel] = ()
    results: Mapping[str, Any] = field(default_factory=dict)

    def print(self, console: Console) -> None:
        """Print the table and its note."""

        def column(place: int, heading: str) -> Column[Line]:
            return Column(heading, lambda line: line.cells[place])

        columns = [Column[Line]("", lambda line: line.label, label=True)]
        print_rows(console, self.title, [*columns, *(column(i, one) for i, one in enumerate(self.columns))], self.lines)
        console.print(self.note, style="dim")

    def as_dict(self) -> dict[str, Any]:
        """Return the part ready for JSON."""
        lines = [{"label": line.label, **dict(zip(self.columns, line.cells, strict=True))} for line in self.lines]
        return {"title": self.title, "table": lines, "note": self.note, "results": dict(self.results)}


def counted(config: PaperConfig, parts: tuple[str, ...], console: Console | None, **changes: Any) -> AcceptanceReport:
    """Count tokens per pass for these parts of `specinfer bench acceptance`."""
    options: dict[str, Any] = {
        "model": config.model,
        "drafters": config.drafters,
        "num_prompts": config.num_prompts,
        "max_tokens": config.max_tokens,
        "seed": config.seed,
    }
    return run_acceptance(AcceptanceConfig(parts=parts, **options | changes), console)


def table1(config: PaperConfig, console: Console | None) -> Part:
    """Reproduce Table 1: how often the target's token is among a drafter's k best."""
    report = counted(config, ("table1",), console)
    first = report.hit_rates[0].drafter
    lines = []
    for mode, temperature in MODES.items():
        (rates,) = (one for one in report.hit_rates if one.drafter == first and one.temperature == temperature)
        paper = [numbers.spread(column, ".0f") for column in zip(*numbers.SUCCESS[mode], strict=True)]
        lines += [Line(f"{mode}, paper", paper), Line(f"{mode}, here", _shares(rates, range(len(rates.ranks))))]
        lines += [Line(f"  {kind}", _shares(rates, prompts)) for kind, prompts in numbers_by_kind(report.kinds).items()]
    return Part(
        "table1",
        "Table 1: the target's token is among the drafter's k best, %",
        [f"k={k}" for k in range(1, 6)],
        lines,
        f"paper: LLaMA-7B and LLaMA-68M, five prompt sets; here: {_models(report)}",
        results=report.as_dict(),
    )


def table2(config: PaperConfig, console: Console | None) -> tuple[Part, Part]:
    """Reproduce Table 2 and Figure 9: tokens per step by the width of the tree's third level."""
    report = counted(config, ("table2",), console)
    lines, panels = [], []
    steps = []
    for mode, row in zip(MODES, report.parts["table2"], strict=True):
        cells = list(row.cells.values())
        paper = [numbers.spread(column, ".2f") for column in zip(*numbers.TOKENS[mode], strict=True)]
        lines += [
            Line(f"{mode}, paper", paper),
            Line(f"{mode}, here", [f"{one.tokens_per_pass.value:.2f}" for one in cells]),
        ]
        for kind in dict.fromkeys(report.kinds):
            rates = [report.by_kind(one)[kind] for one in cells]
            lines.append(Line(f"  {kind}", ["" if rate is None else f"{rate:.2f}" for rate in rates]))
        panels.append(_distribution(mode, row))
        steps += [
            Line(f"{mode}, paper", ["1", "", "", "", numbers.FEWER_STEPS[mode]]),
            Line(f"{mode}, here", [f"{one.over(cells[0]).value:.2f}" for one in cells]),
        ]
    note = f"paper: LLaMA-7B and LLaMA-68M, five prompt sets, the last token of a step counted; here: {_models(report)}"
    title = "Table 2: tokens per step, expansion <1,1,k,1,1,1,1,1>"
    widths = [f"k={k}" for k in range(1, 6)]
    nine = "Figure 9: steps of trees of width 1 over those of width k"
    return (
        Part("table2", title, widths, lines, note, results=report.as_dict()),
        Part("figure9", nine, widths, steps, "the plot shows the distribution over prompts", panels),
    )


def table3(config: PaperConfig, console: Console | None) -> Part:
    """Reproduce Table 3: naive and multi-step speculative sampling."""
    report = counted(config, ("table3",), console)
    rows = list(report.parts["table3"])
    tokens = [row.cells["tokens per pass"] for row in rows]
    naive, multi = tokens[1], tokens[2]
    lines = [
        Line("paper", [numbers.spread(numbers.NAIVE, ".2f"), numbers.spread(numbers.MULTI_STEP, ".2f"), "1.26-1.28"]),
        Line(
            "here", [*(f"{one.tokens_per_pass.value:.2f}" for one in (naive, multi)), f"{multi.over(naive).value:.2f}"]
        ),
    ]
    for kind in dict.fromkeys(report.kinds):
        pair = [report.by_kind(one)[kind] or 0.0 for one in (naive, multi)]
        lines.append(
            Line(f"  {kind}", [*(f"{one:.2f}" for one in pair), f"{pair[1] / pair[0]:.2f}" if pair[0] else ""])
        )
    return Part(
        "table3",
        "Table 3: tokens per step of sampled text, width 5, depth 8",
        ["naive sampling", "multi-step", "ratio"],
        lines,
        f"paper: LLaMA-7B and LLaMA-68M; here: {_models(report)}; drafts are sampled for both",
        results=report.as_dict(),
    )


def boosted(config: PaperConfig, console: Console | None) -> Part:
    """Count tokens per step with one to five boost-tuned drafters, merged into trees of 16 tokens."""
    model, names = (config.model, config.boosted) if config.boosted else ("demo", ("demo", "demo-2", "demo-3"))
    report = counted(config, ("drafters",), console, model=model, drafters=names, nodes=(16,), temperatures=(0.0, 1.0))
    rows = [row for row in report.parts["drafters"] if _is_first(row, report)]
    columns = [str(count) for count in range(1, len(names) + 1)]
    paper = [f"{numbers.BOOSTED[count]}" if count in numbers.BOOSTED else "" for count in range(1, len(names) + 1)]
    lines = [Line("greedy, paper", paper)]
    for label, mode in (("temperature 0", "greedy"), ("temperature 1", "sampled")):
        lines.append(Line(f"{mode}, here", [f"{row.cells[label].tokens_per_pass.value:.2f}" for row in rows]))
    return Part(
        "boosted",
        "Boost-tuned drafters, merged into trees of 16 tokens: tokens per step",
        columns,
        lines,
        f"paper (version 2): LLaMA-7B and five of 160 M, {numbers.BOOSTED[5]} with all five; here: {_models(report)}, "
        "the same number of tokens for any number of drafters",
        results=report.as_dict(),
    )


def _is_first(row: Row, report: AcceptanceReport) -> bool:
    """Return whether a row is of the first drafter, or of the first several."""
    used = next(iter(row.cells.values())).setup.drafters
    return used == tuple(report.drafters)[: len(used)]


def _distribution(mode: str, row: Row) -> Panel:
    """Return the share of prompts with at most this many tokens per step, for each width."""
    series = []
    for name, counts in row.cells.items():
        rates = sorted(counts.rate_of([prompt]) or 0.0 for prompt in range(len(counts.generated)))
        series.append(Series(name, [(i + 1) / len(rates) for i in range(len(rates))], x=rates, marker=""))
    return Panel(mode, series, label="share of prompts", place_label="tokens per step", top=1.0, legend="inside")


def _shares(rates: HitRates, prompts: Iterable[int]) -> list[str]:
    return [f"{100 * rates.share(k, prompts):.0f}" for k in range(1, 6)]


def _models(report: AcceptanceReport) -> str:
    counts = report.environment.drafter_parameters.items()
    drafters = ", ".join(f"{name} {count / 1e6:.1f} M" if count else name for name, count in counts)
    return f"{report.options['model']} ({report.environment.target_parameters / 1e6:.0f} M) and {drafters}"


Counting = Callable[[PaperConfig, Console | None], Part | tuple[Part, ...]]
TABLES: Mapping[str, Counting] = {"table1": table1, "table2": table2, "table3": table3, "boosted": boosted}
