"""Throughput of batches: plain decoding and token trees, on the same loaded weights.

All prompts of a batch are submitted at once, and the clock of decoding starts after the prefill of the last. Each
request then runs to its end. An output that is easy to predict ends early, so the last passes serve fewer requests.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from specinfer.bench.comparisons import (
    NUM_PASSES,
    PARTINGS,
    QUARTILES,
    STAGES,
    TREE,
    ArmRow,
    Compared,
    Comparison,
    arms_dict,
    tokens_per_second,
)
from specinfer.bench.loop import Prepare, open_session
from specinfer.bench.measurement import measure_batch
from specinfer.bench.options import ThroughputConfig
from specinfer.bench.results import PARTS, Arm
from specinfer.reporting.plots import PART_COLOURS, SERIES_COLOURS, Panel, Series, draw_plot
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported
from specinfer.reporting.spread import Spread
from specinfer.reporting.tables import models_line


@reported
def run_throughput(config: ThroughputConfig, progress: StageBar) -> Report[Compared]:
    """Measure throughput; as `compare_throughput`."""
    return throughput_page(compare_throughput(config, progress))


def compare_throughput(config: ThroughputConfig, progress: StageBar, prepare: Prepare | None = None) -> Compared:
    """Let plain decoding and the trees take turns on each batch.

    Args:
        prepare: Function that changes the models before they are loaded.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was measured.
        RuntimeError: A request failed, or a tree changed a greedy output of a float32 target without quantization.
    """
    with open_session(config, progress, prepare) as session:
        return session.compare(
            lambda turn, name: measure_batch(session.of_arm(name), turn, session.policies[len(turn.prompts), name])
        )


_LABELS = (Value[ArmRow]("batch", lambda row: row.result.size, label=True, once=True), TREE)
_SPEEDS = (
    Value[ArmRow]("nodes", lambda row: row.arm.nodes, "{:.1f}"),
    tokens_per_second("{:.1f}"),
    Value[ArmRow]("speedup", lambda row: row.speedup, "{:.2f}", "ratio", optional=True),
    QUARTILES,
    Value[ArmRow]("total_tokens_per_second", lambda row: row.arm.total_tokens_per_second, "{:.1f}", "in all"),
    Value[ArmRow]("total_speedup", lambda row: row.total_speedup, "{:.2f}", "ratio", optional=True),
)
_PASSES = (
    Value[ArmRow]("tokens_per_pass", lambda row: row.arm.tokens_per_pass, "{:.2f}", "tokens"),
    Value[ArmRow]("ms_per_pass", lambda row: row.arm.ms_per_pass, "{:.1f}", "ms"),
)
_WRITTEN = (
    PARTINGS,
    Value[ArmRow]("requests_per_pass", lambda row: row.arm.requests_per_pass, None),
    Value[ArmRow]("percent_of_time", lambda row: {part: 100 * share for part, share in row.arm.shares.items()}, None),
    STAGES,
    NUM_PASSES,
    Value[ArmRow]("runs", lambda row: [run.as_dict() for run in row.arm.runs], None),
)


def throughput_page(measured: Compared) -> Report[Compared]:
    """Return the report: speeds, the parts of the time, and whether the tokens equal those of plain decoding."""
    rows, environment = measured.rows, measured.environment
    title = f"Requests that run together, {measured.config.max_tokens} tokens each; medians of batches"
    note = (
        "nodes: guesses of a request in a pass; tokens/s: of decoding, after all prompts were read, and in all; "
        "ratio: over plain decoding, batch by batch"
    )
    passes = "Tokens of a request in a pass, its time, and the share of each part"
    tables = [
        Table("", title, (*_LABELS, *_SPEEDS), rows, note),
        Table("", passes, (*_LABELS, *_PASSES, *map(_share_of, PARTS)), rows),
        *([_kinds_table(measured)] if measured.kinds else []),
        measured.stages_table(_LABELS),
    ]
    batches = [_batch_dict(measured, result) for result in measured.results]
    numbers = {"batches": batches, "ceilings": measured.ceilings.as_dict()}
    lines = [models_line(measured.config.model, environment)]
    last = ["", *measured.fidelity()]
    return Report(lines, tables, measured, environment, numbers, last, partial(plot_throughput, measured))


def _share_of(part: str) -> Value[ArmRow]:
    return Value("", lambda row: row.arm.shares[part], "{:.0%}", part)


def _batch_dict(measured: Compared, result: Comparison) -> dict[str, object]:
    arms = arms_dict((*_SPEEDS, *_PASSES, *_WRITTEN), result)
    found: dict[str, object] = {"batch_size": result.size, "num_outputs": result.num_outputs, "arms": arms}
    if measured.kinds:
        found["by_kind"] = {
            row.arm.name: {
                kind: {"tokens_per_pass": tokens, "request_speedup": speedup}
                for kind, (tokens, speedup) in measured.kinds_of(row).items()
                if not math.isnan(tokens)
            }
            for row in result.rows
            if not row.is_plain
        }
    return found


def _kinds_table(measured: Compared) -> Table[ArmRow]:
    def of_kind(kind: str) -> Value[ArmRow]:
        def cell(row: ArmRow) -> str | None:
            tokens, speedup = measured.kinds_of(row)[kind]
            return None if math.isnan(tokens) else f"{tokens:.2f} {speedup:.2f}"

        return Value("", cell, heading=kind)

    title = "By kind of prompt: tokens of a request in a pass, its speed over plain decoding"
    rows = [row for row in measured.rows if not row.is_plain]
    return Table("", title, (*_LABELS, *map(of_kind, dict.fromkeys(measured.kinds))), rows)


def plot_throughput(measured: Compared, path: str | Path) -> None:
    """Draw speed by batch size, ratio to plain decoding, and the parts of the time.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    results, sizes = measured.results, [result.size for result in measured.results]
    first = [f"{result.speedup_of(result.arms[1]).median:.2f}\n{result.arms[1].nodes:.1f} nodes" for result in results]

    def lines(value: Callable[[Comparison, Arm], Spread], names: tuple[str, ...], notes: list[str]) -> list[Series]:
        return [
            Series(name, [value(each, each.arm(name)) for each in results], x=sizes, notes=notes if number == 0 else (),
                   colour=SERIES_COLOURS[measured.names.index(name) % len(SERIES_COLOURS)])
            for number, name in enumerate(names)
        ]  # fmt: skip

    stacks = [(result.arms[side], f"{result.size} {result.arms[side].name}") for result in results for side in (0, 1)]
    parts = [Series(part, [100 * arm.shares[part] for arm, _ in stacks], colour=PART_COLOURS[part]) for part in PARTS]
    together = "requests that run together"
    panels = [
        Panel("Decoding; bars: quartiles", lines(lambda _, arm: arm.tokens_per_second, measured.names, []), counts=True,
              label="tokens per second, all requests", place_label=together, legend="inside", legend_title="tree"),
        Panel("Ratio to plain decoding, and nodes of a request",
              lines(lambda result, arm: result.speedup_of(arm), measured.names[1:], first), counts=True,
              label="ratio, median over batches", place_label=together, levels=(1.0,)),
        Panel("Where the time of decoding went", parts, kind="stacked", horizontal=True, label="percent",
              names=[name for _, name in stacks], place_label="requests together, tree", top=100, legend="below"),
    ]  # fmt: skip
    title = (
        f"{Path(measured.config.model).name}: {measured.environment.description}, {measured.config.max_tokens} tokens "
        f"for each request{measured.floors_text()}"
    )
    draw_plot(path, title, panels)
