"""Figures 7, 10 and 11 of the paper (SpecInfer, ASPLOS 2024, arXiv 2305.09781v4, section 6) with the models here.

Its tables are parts of `specinfer bench acceptance`.

The paper measured LLaMA-7B with LLaMA-68M on A10 GPUs. Its figures show bars without numbers; of them, only what the
text states is known.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.growth.models import growing
from benchmarks.options import SPECULATION, LabSettings
from benchmarks.sequences import sequence_based
from specinfer.bench.acceptance_plans import expansion, paper_widths
from specinfer.bench.loop import Turn, open_session, take_turns
from specinfer.bench.measurement import measure_batch
from specinfer.bench.options import PLAIN, SharedSettings, ThroughputConfig, check_distinct, check_once
from specinfer.bench.results import Arm, Run
from specinfer.bench.throughput import compare_throughput
from specinfer.cli.measure import Measurement
from specinfer.core.options import check_settings, setting, setting_of
from specinfer.demo.chat_model import CHAT
from specinfer.engine_args import EngineArgs
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported

_WIDTHS = tuple(range(1, 6))
_TREES = {f"width {width}": expansion(paper_widths(width)) for width in _WIDTHS}


@dataclass(frozen=True, slots=True)
class PaperConfig:
    """Options of the reproduction.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    model: str = setting_of(EngineArgs, "model", default=CHAT)
    drafters: str | tuple[str, ...] = setting_of(EngineArgs, "drafters")
    parts: tuple[str, ...] = setting(
        ("figure7", "figure10", "figure11"),
        SPECULATION,
        "Part: figure7, figure10 or figure11. May be repeated. (default: all)",
        name="part",
    )
    grow: str | None = setting_of(LabSettings, "grow")
    batch_sizes: tuple[int, ...] = setting(
        (1, 2, 4, 8, 16),
        SPECULATION,
        "Batch size of figures. May be repeated. (default: 1, 2, 4, 8 and 16)",
        name="batch",
    )
    max_tokens: int = setting_of(SharedSettings, "max_tokens", default=64)
    repeats: int = setting_of(LabSettings, "repeats", default=1)
    seed: int = setting_of(SharedSettings, "seed")
    json: str | Path | None = setting_of(SharedSettings, "json")

    def __post_init__(self) -> None:
        check_settings(self)
        check_once("part", self.parts)
        check_distinct("batch", self.batch_sizes, 64)
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, not {unknown[0]!r}")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table or figure: the paper's, or ours.

    Attributes:
        cells: Values by the headings of columns.
    """

    label: str
    cells: Mapping[str, str] = field(default_factory=dict)


def _table(name: str, title: str, headings: Sequence[str], lines: Sequence[Line]) -> Table[Line]:
    def value(heading: str) -> Value[Line]:
        return Value(heading, lambda line: line.cells.get(heading))

    return Table(name, title, (Value[Line]("label", lambda line: line.label, heading=""), *map(value, headings)), lines)


def _throughput(config: PaperConfig, trees: Iterable[str]) -> ThroughputConfig:
    return ThroughputConfig(
        config.model, config.drafters, tuple(trees), batch_sizes=config.batch_sizes, num_prompts=1,
        max_tokens=config.max_tokens, repeats=config.repeats, seed=config.seed, temperature=0.0,
    )  # fmt: skip


def _ms(arm: Arm, size: int) -> str:
    """Return the milliseconds per token of a request."""
    return f"{1000 * size / arm.tokens_per_second.median:.1f}"


def _latencies(name: str, title: str, config: PaperConfig, trees: Mapping[str, str], paper: Sequence[Line],
               progress: StageBar) -> Table[Line]:  # fmt: skip
    measured = compare_throughput(_throughput(config, trees.values()), progress, growing(config.grow))
    labels = {tree: label for label, tree in trees.items()} | {PLAIN: "plain decoding"}
    lines = [
        Line(labels[arm], {str(result.size): _ms(result.arm(arm), result.size) for result in measured.results})
        for arm in measured.names
    ]
    return _table(name, title, [*map(str, config.batch_sizes), "paper"], [*lines, *paper])


def figure7(config: PaperConfig, progress: StageBar) -> Table[Line]:
    """Reproduce Figure 7 on one machine: latency of plain decoding, sequences and trees."""
    paper = [
        Line("paper: plain decoding over trees", {"paper": "1.5-2.5"}),
        Line("paper: sequences over trees", {"paper": "1.2-1.5"}),
    ]
    trees = {"sequences (width 1)": _TREES["width 1"], "trees of width 3": _TREES["width 3"], "auto": "auto"}
    return _latencies("figure7", "Figure 7: ms per token of a request, by batch size", config, trees, paper, progress)


def figure10(config: PaperConfig, progress: StageBar) -> Table[Line]:
    """Reproduce Figure 10: latency by the width of trees."""
    paper = [
        Line("paper: best width", {size: "5" if size in "12" else "2 or 3" for size in ("1", "2", "4", "8", "16")})
    ]
    return _latencies(
        "figure10", "Figure 10: ms per token of a request, by batch size", config, _TREES, paper, progress
    )


def figure11(config: PaperConfig, progress: StageBar) -> Table[Line]:
    """Reproduce Figure 11: verification of a tree in one pass, and of its paths as sequences."""
    tree = _TREES["width 3"]
    options, arms = _throughput(config, [tree]), ("tree", "sequences")
    with open_session(options, progress, growing(config.grow)) as session:

        def measure(turn: Turn, name: str) -> Run:
            policy = session.policies[len(turn.prompts), tree]
            with sequence_based(session.llm) if name == "sequences" else nullcontext():
                return measure_batch(session, turn, policy, samples=False)

        runs = take_turns(session.turns(arms), session.progress, measure)
    found = {(size, name): Arm(name, tuple(runs[size, name])) for size in config.batch_sizes for name in arms}

    def speed(size: int, name: str) -> float:
        return found[size, name].tokens_per_second.median

    lines = [Line(name, {str(size): _ms(found[size, name], size) for size in config.batch_sizes}) for name in arms]
    ratios = {str(size): f"{speed(size, 'tree') / speed(size, 'sequences'):.2f}" for size in config.batch_sizes}
    lines += [Line("sequences over tree", ratios), Line("paper: sequences over tree", {"1": "1.0", "16": "up to 1.8"})]
    title = "Figure 11: ms per token of a request, by batch size"
    return _table("figure11", title, list(map(str, config.batch_sizes)), lines)


PARTS: Mapping[str, Callable[[PaperConfig, StageBar], Table[Line]]] = {
    "figure7": figure7, "figure10": figure10,
    "figure11": figure11,
}  # fmt: skip


@reported
def run_paper(config: PaperConfig, progress: StageBar) -> Report[None]:
    """Reproduce the parts."""
    tables = [PARTS[part](config, progress) for part in config.parts]
    return Report([f"paper: LLaMA-7B and LLaMA-68M; here: {config.model}"], tables)


PAPER = Measurement(
    "paper",
    PaperConfig,
    "benchmarks.paper:run_paper",
    "Reproduce figures of the SpecInfer paper with the models here.",
    model="Target model, as in generate. (default: demo-chat)",
    default=CHAT,
)
