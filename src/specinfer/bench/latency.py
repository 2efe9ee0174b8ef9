"""Latency of one request at a time: plain decoding and token trees, on the same loaded weights.

Each arm streams the same tokens. The clock starts at the first of them. Other engines, if given, take turns too.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.markup import escape

from specinfer.bench.comparisons import (
    NUM_PASSES,
    PARTINGS,
    QUARTILES,
    SPEEDUP,
    STAGES,
    TOKENS_PER_PASS,
    TREE,
    ArmRow,
    Compared,
    Comparison,
    arms_dict,
    tokens_per_second,
)
from specinfer.bench.loop import Prepare, ReadPrompts, Session, Turn, open_session
from specinfer.bench.measurement import measure_batch, measure_request
from specinfer.bench.options import CompareConfig
from specinfer.bench.prompts import Asked
from specinfer.bench.results import Arm, Run
from specinfer.reporting.plots import PART_COLOURS, Panel, Series, draw_plot
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported
from specinfer.reporting.tables import models_line

_OTHERS_COLOUR = "#D55E00"


class OtherEngines(Protocol):
    """Engines of other projects that are measured in turns with ours."""

    @property
    def names(self) -> list[str]:
        """Names of those that have not failed."""

    def measure(self, name: str, asked: Asked, number: int, repeat: int) -> Run | None:
        """Measure one run, or return None if the engine has failed."""


@reported
def run_latency(config: CompareConfig, progress: StageBar) -> Report[Compared]:
    """Measure latency; as `compare_latency`."""
    return latency_page(compare_latency(config, progress))


def compare_latency(
    config: CompareConfig,
    progress: StageBar,
    others: Callable[[Session], AbstractContextManager[OtherEngines]] | None = None,
    prepare: Prepare | None = None,
    read: ReadPrompts | None = None,
) -> Compared:
    """Let plain decoding and the trees take turns on each prompt.

    Args:
        others: Function that starts other engines, which take turns too. They are not compared.
        prepare: Function that changes the models before they are loaded.
        read: Function that reads the prompts, in place of texts and chat prompts.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was measured.
        RuntimeError: A request failed, or a tree changed a greedy output of a float32 target without quantization.
    """
    with ExitStack() as stack:
        session = stack.enter_context(open_session(config, progress, prepare, read))
        engines = None if others is None else stack.enter_context(others(session))

        def measure(turn: Turn, name: str) -> Run | None:
            (asked,) = session.batch(turn)
            if (policy := session.policies.get((1, name))) is not None:
                measure_run = measure_request if asked.params.n == 1 else measure_batch
                return measure_run(session.of_arm(name), turn, policy)
            assert engines is not None
            return engines.measure(name, asked, turn.prompts[0], turn.repeat)

        return session.compare(measure, others=() if engines is None else engines.names)


_SPEEDS = (
    tokens_per_second("{:.4g}"),
    Value[ArmRow]("ms_per_token", lambda row: row.arm.ms_per_token, "{:.4g}", "ms/token"),
    TOKENS_PER_PASS,
    Value[ArmRow]("guessed_per_pass", lambda row: row.arm.nodes, "{:.1f}", "guessed/pass"),
    Value[ArmRow]("prompt_ms", lambda row: row.arm.spread(lambda run: 1000 * run.prompt_time).median, None),
)
_SAME = Value[ArmRow]("", lambda row: row.same_texts, heading="same texts")
_BY_SOURCE = Value[ArmRow]("accepted_per_pass", lambda row: row.arm.accepted_per_pass, None)
_RATIOS = (
    SPEEDUP,
    QUARTILES,
    Value[ArmRow]("", lambda row: row.speedup and f"{row.speedup.min:.2f}-{row.speedup.max:.2f}", heading="min-max"),
    Value[ArmRow]("request_speedup", lambda row: row.total_speedup, "{:.2f}", "with prompt", optional=True),
)
_WRITTEN = (
    PARTINGS,
    Value[ArmRow]("acceptance_by_depth", lambda row: row.arm.acceptance_by_depth, None),
    _BY_SOURCE,
    Value[ArmRow]("ms_per_pass", lambda row: {**row.arm.split, "total": row.arm.ms_per_pass}, None),
    Value[ArmRow]("percent_of_pass", lambda row: {name: 100 * share for name, share in _shares(row.arm).items()}, None),
    STAGES,
    Value[ArmRow]("num_tokens", lambda row: row.arm.num_tokens, None),
    NUM_PASSES,
    Value[ArmRow]("runs", lambda row: [run.as_request() for run in row.arm.runs], None),
)


def latency_page(measured: Compared) -> Report[Compared]:
    """Return the report: speeds, the parts of a pass, and acceptance. The headline numbers are of the first tree."""
    result, environment = measured.result, measured.environment
    plain, tree, *_ = result.rows
    assert tree.speedup is not None
    tables: list[Table[Any]] = [
        Table("", _title(measured), (TREE, *_SPEEDS), result.rows),
        Table("", "Speedup over plain decoding, run by run", (TREE, *_RATIOS), result.rows),
        *([_kinds_table(measured)] if measured.kinds else []),
        _sources_table(measured),
        Table("", "Mean time of one pass, ms", (TREE, *map(_part, plain.arm.split), _TOTAL), result.rows),
        measured.stages_table((TREE,)),
    ]
    numbers = {
        "speedup": tree.speedup.median,
        "tokens_per_pass": tree.arm.tokens_per_pass,
        "tree": tree.arm.name,
        "num_prompts": measured.num_prompts,
        "num_pairs": len(plain.arm.runs),
        "plain_target_ms_per_pass": plain.arm.split["target"],
        "arms": arms_dict((*_SPEEDS, *_RATIOS, *_WRITTEN), result),
        "ceilings": measured.ceilings.as_dict(),
    }
    if measured.speedups:
        numbers["expected_speedup"] = {name: speedup.expected for name, speedup in measured.speedups.items()}
    if measured.kinds:
        numbers["by_kind"] = latency_numbers_by_kind(measured)
    lines = [models_line(measured.config.model, environment)]
    what = "run" if result.num_outputs == len(plain.arm.runs) else "output"
    last = ["", *_acceptance_lines(result), *measured.expectations(), *measured.fidelity(what)]
    return Report(lines, tables, measured, environment, numbers, last, partial(plot_latency, measured))


def _title(measured: Compared) -> str:
    runs, most = measured.result.plain.runs, measured.config.max_tokens
    num_tokens = f"at most {most}" if measured.kinds else str(runs[0].num_decoded)
    return (
        f"One request at a time: {measured.num_prompts} prompts, {len(runs)} runs of each tree, {num_tokens} tokens "
        "after the first; medians"
    )


def _shares(arm: Arm) -> dict[str, float]:
    return {name: ms / arm.ms_per_pass for name, ms in arm.split.items()}


def _part(name: str) -> Value[ArmRow]:
    return Value("", lambda row: f"{row.arm.split[name]:.2f} ({_shares(row.arm)[name]:.0%})", heading=name)


_TOTAL = Value[ArmRow]("", lambda row: row.arm.ms_per_pass, "{:.2f}", "total")


def _acceptance_lines(result: Comparison) -> list[str]:
    shares = {arm.name: arm.acceptance_by_depth for arm in result.trees}
    return [
        f"tree {name}: guesses kept at depth 1, 2, ...: {', '.join(f'{share:.0%}' for share in found)}"
        for name, found in shares.items()
        if found
    ]


def latency_numbers_by_kind(measured: Compared) -> dict[str, dict[str, Any]]:
    """Return the numbers of each kind of prompt, ready for JSON; those of peers are for others to add."""
    return {
        kind: {
            "num_prompts": part.num_prompts,
            "arms": arms_dict((*_SPEEDS, SPEEDUP, _BY_SOURCE, PARTINGS), part.result),
            "peers": {},
        }
        for kind, part in measured.by_kind().items()
    }


def _kinds_table(measured: Compared) -> Table[tuple[str, ArmRow]]:
    def of_arm(value: Value[ArmRow]) -> Value[tuple[str, ArmRow]]:
        return Value("", lambda row: value.read(row[1]), value.form or "{}", value.title, value.label)

    kind = Value[tuple[str, ArmRow]]("kind", lambda row: row[0], label=True, once=True)
    values = (kind, *map(of_arm, (TREE, _SPEEDS[0], TOKENS_PER_PASS, SPEEDUP, QUARTILES, _SAME)))
    rows = [(name, row) for name, part in measured.by_kind().items() for row in part.result.rows]
    return Table("", "By kind of prompt", values, rows)


def _sources_table(measured: Compared) -> Table[tuple[str, ArmRow]]:
    """Return the draft tokens that a request accepts in a pass, by drafter: of all prompts, and of each kind."""
    parts = {"all": measured, **measured.by_kind()}
    rows = [(name, row) for name, part in parts.items() for row in part.result.rows if not row.is_plain]
    names = dict.fromkeys(name for _, row in rows for name in row.arm.accepted_per_pass)

    def of_drafter(name: str) -> Value[tuple[str, ArmRow]]:
        return Value("", lambda row: row[1].arm.accepted_per_pass.get(name, 0.0), "{:.2f}", escape(name))

    kind = Value[tuple[str, ArmRow]]("kind", lambda row: row[0], label=True, once=True)
    tree = Value[tuple[str, ArmRow]]("", lambda row: row[1].arm.name, heading="tree", label=True)
    return Table("", "Draft tokens accepted in a pass, by drafter", (kind, tree, *map(of_drafter, names)), rows)


def plot_latency(measured: Compared, path: str | Path, others: Sequence[Arm] = ()) -> None:
    """Draw the speed of each run, of other engines too, and the parts of the time of a pass.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    result = measured.result
    splits = [arm.split for arm in result.arms]
    tokens = [f"{arm.tokens_per_pass:.2f} tokens" for arm in result.arms]
    parts = [
        Series(
            name, [split[name] for split in splits], colour=PART_COLOURS[name], notes=tokens if name == "rest" else ()
        )
        for name in splits[0]
    ]
    title = (
        f"{Path(measured.config.model).name}: {measured.environment.description}, {measured.num_prompts} prompts, "
        f"one request at a time{measured.floors_text()}"
    )
    names = [arm.name for arm in (*result.arms, *others)]
    speeds = Panel("Speed of each run; bar: median", [*_dots(result, others)], horizontal=True, names=names,
                   label="tokens per second", place_label="tree, or other engine" if others else "tree")  # fmt: skip
    split = Panel("Mean time of one pass, and tokens it gave", parts, kind="stacked", horizontal=True, names=names,
                  label="milliseconds", legend="below")  # fmt: skip
    draw_plot(path, title, [speeds, split], width=11, height=2.6 + 0.7 * len(names))


def _dots(result: Comparison, others: Sequence[Arm]) -> Sequence[Series]:
    """Return a dot for each run, spread over a band in the order of the runs, and a mark at each median."""
    series = []
    for row, arm in enumerate((*result.arms, *others)):
        colour = _OTHERS_COLOUR if arm in others else "#0072B2"
        speeds = [run.tokens_per_second for run in arm.runs]
        band = [row - 0.18 + 0.36 * (i + 0.5) / len(speeds) for i in range(len(speeds))]
        note = f"  (speedup {result.speedup_of(arm).median:.2f})" if arm in result.trees else ""
        median = arm.tokens_per_second.median
        series.append(Series(arm.name, speeds, x=band, colour=colour, line="none"))
        series.append(Series("", [median], x=[row], colour="#000000", line="none", marker="|",
                             notes=[f"{median:.1f}{note}"]))  # fmt: skip
    return series
