"""Figures 7, 8, 10 and 11: latency, with all arms in turns in one run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from rich.console import Console

from benchmarks.offload.plans import OffloadBenchConfig
from benchmarks.offload.run import run_offload
from benchmarks.paper import numbers
from benchmarks.paper.parts import Line, PaperConfig, Part
from benchmarks.paper.sequences import sequence_based
from specinfer.bench.acceptance_plans import expansion, paper_widths
from specinfer.bench.comparisons import Comparison
from specinfer.bench.loop import Turn, check_equal, is_exact, open_session, schedule, take_turns
from specinfer.bench.measurement import measure_batch
from specinfer.bench.options import PLAIN, ThroughputConfig
from specinfer.bench.results import Arm, Run
from specinfer.bench.throughput import run_throughput
from specinfer.bench.throughput_report import ThroughputReport
from specinfer.core.errors import ModelError
from specinfer.reporting.environment import Environment
from specinfer.reporting.files import options_of
from specinfer.reporting.plots import Panel, Series

_CHAIN, _TREE = expansion(paper_widths(1)), expansion(paper_widths(3))
_NAMES = {PLAIN: "plain decoding", _CHAIN: "sequences (width 1)", _TREE: "trees (width 3)", "auto": "trees (auto)"}
_SEQUENCES = "sequences"  # arm that verifies a tree's paths one by one


def figure7(config: PaperConfig, console: Console | None) -> Part:
    """Reproduce Figure 7: latency by batch size, for targets in one process and in several."""
    lines, panels, results = [], [], {}
    for name, report in split_reports(_throughput(config, (_CHAIN, _TREE, "auto")), console):
        results[name] = report.as_dict()
        for tree in (PLAIN, _CHAIN, _TREE, "auto"):
            lines.append(Line(f"{name}: {_NAMES[tree]}", [f"{_latency(one.arm(tree)):.1f}" for one in report.results]))
        for label, base in (("plain decoding", PLAIN), ("sequences", _CHAIN)):
            lines.append(Line(f"  trees over {label}", [f"{_ratio(one, _TREE, base):.2f}" for one in report.results]))
        panels.append(_panel(name, report.results, (PLAIN, _CHAIN, _TREE, "auto")))
    paper = ", ".join(f"{place} {ratio}" for place, ratio in numbers.OVER_PLAIN.items())
    return Part(
        "figure7",
        "Figure 7: milliseconds per token of a request, by batch size",
        [str(size) for size in config.batch_sizes],
        lines,
        f"paper: trees over plain decoding {paper}; trees over sequences {numbers.OVER_SEQUENCES}. Ranks share this "
        "machine's cores, so a split target is not faster here.",
        panels,
        results,
    )


def split_reports(config: ThroughputConfig, console: Console | None) -> Iterator[tuple[str, ThroughputReport]]:
    """Yield the reports of one process, of as few tensor ranks as divide the target, and of two stages."""
    yield "one process", run_throughput(config, console)
    for size in (2, 3, 5):
        try:
            report = run_throughput(replace(config, tensor_parallel_size=size), console)
        except ModelError:  # the heads cannot be split over this many
            continue
        yield f"{size} tensor ranks", report
        break
    yield "2 stages", run_throughput(replace(config, pipeline_parallel_size=2), console)


def figure8(config: PaperConfig, console: Console | None) -> Part:
    """Reproduce Figure 8: a target whose layers are streamed, with trees and without."""
    report = run_offload(
        OffloadBenchConfig(
            model=config.model, drafters=config.drafters, trees=(_TREE, "auto"), grow=config.offload_grow,
            batch_sizes=config.batch_sizes, temperatures=(0.0,), num_prompts=1, max_tokens=config.max_tokens,
            repeats=config.repeats, seed=config.seed,
        ),
        console,
    )  # fmt: skip
    lines = [
        Line(
            f"paper, {name} over FlexGen",
            [_known(dict(zip(numbers.BATCH_SIZES, values, strict=True)), size) for size in config.batch_sizes],
        )
        for name, values in numbers.OVER_FLEXGEN.items()
    ]
    for tree in (_TREE, "auto"):
        lines.append(
            Line(
                f"here, {_NAMES[tree]} over plain",
                [f"{one.speedup_of(one.arm(tree)).median:.2f}" for one in report.results],
            )
        )
    gib = report.memory_budget / 2**30
    return Part(
        "figure8",
        "Figure 8: speed of a streamed target over plain decoding, by batch size",
        [str(size) for size in config.batch_sizes],
        lines,
        f"paper: one A10 and host memory, FlexGen without speculation; here: {report.target_bytes / 2**30:.1f} GiB of "
        f"weights from the disk in {gib:.1f} GiB, plain decoding by the same code",
        [_panel("a streamed target", report.results, (PLAIN, _TREE, "auto"))],
        report.as_dict(),
    )


def figure10(config: PaperConfig, console: Console | None) -> Part:
    """Reproduce Figure 10: latency by the width of the tree and the batch size."""
    trees = tuple(expansion(paper_widths(width)) for width in range(1, 6))
    report = run_throughput(_throughput(config, trees), console)
    lines = [
        Line(f"width {width}", [f"{_latency(one.arm(tree)):.1f}" for one in report.results])
        for width, tree in enumerate(trees, 1)
    ]
    best = [1 + min(range(5), key=lambda i: _latency(one.arm(trees[i]))) for one in report.results]
    lines += [
        Line("best width, here", [str(width) for width in best]),
        Line("best width, paper", [_known(numbers.BEST_WIDTH, size) for size in config.batch_sizes]),
    ]
    return Part(
        "figure10",
        "Figure 10: milliseconds per token of a request, by tree width and batch size",
        [str(size) for size in config.batch_sizes],
        lines,
        "paper: LLaMA-7B on one A10, whose arithmetic leaves room for wider trees than a CPU's",
        [_panel("by width", report.results, trees)],
        report.as_dict(),
    )


def figure11(config: PaperConfig, console: Console | None) -> Part:
    """Reproduce Figure 11: verification of a tree in one pass, and of each of its paths as a sequence."""
    wanted = _throughput(config, (_TREE,))
    with open_session(wanted, console) as session:
        llm, exact = session.llm, is_exact(session.llm.target.loaded)

        def measure(turn: Turn, name: str) -> Run:
            prompts, params = session.batch(turn)
            policy = session.policies[len(turn.prompts), _TREE if name == _SEQUENCES else name]
            with sequence_based(llm) if name == _SEQUENCES else nullcontext():
                return measure_batch(llm, policy, turn.prompts, prompts, params, turn.repeat)

        def check(turn: Turn, made: Mapping[str, Run]) -> None:
            if exact:
                check_equal(turn, made)

        names = (PLAIN, _TREE, _SEQUENCES)
        turns = list(schedule(wanted, len(session.prompts.token_ids), names))
        runs = take_turns(turns, session.progress, measure, check)
        environment = Environment.from_llm(llm, session.models.drafter_parameters)
    results = []
    for size in config.batch_sizes:
        plain, *others = (Arm(name, tuple(runs[size, name])) for name in names)
        results.append(Comparison(plain, tuple(others)))
    lines = [
        Line(f"{label}, ms of a pass", [f"{_target_ms(one.arm(name)):.1f}" for one in results])
        for label, name in (("plain decoding", PLAIN), ("tree", _TREE), ("sequences", _SEQUENCES))
    ]
    over = [_target_ms(one.arm(_SEQUENCES)) / _target_ms(one.arm(_TREE)) for one in results]
    lines += [
        Line("sequences over tree, here", [f"{value:.2f}" for value in over]),
        Line(
            "sequences over tree, paper",
            [_known(numbers.OVER_SEQUENCE_VERIFICATION, size) for size in config.batch_sizes],
        ),
    ]
    return Part(
        "figure11",
        f"Figure 11: verification by tree and by sequences, expansion <{_TREE}>",
        [str(size) for size in config.batch_sizes],
        lines,
        "here the sequences of all requests share one pass; in the paper each has its own kernels",
        [_panel("verification", results, (PLAIN, _TREE, _SEQUENCES))],
        {
            "batches": [one.as_dict() for one in results],
            "options": options_of(wanted),
            "environment": environment.as_dict(),
        },
    )


def _throughput(config: PaperConfig, trees: tuple[str, ...]) -> ThroughputConfig:
    return ThroughputConfig(
        model=config.model, drafters=config.drafters, trees=trees, grow=config.grow, batch_sizes=config.batch_sizes,
        num_prompts=1, max_tokens=config.max_tokens, repeats=config.repeats, seed=config.seed,
    )  # fmt: skip


def _latency(arm: Arm) -> float:
    """Return the milliseconds per token of a request."""
    return arm.spread(lambda run: 1000 * run.time * len(run.prompts) / run.num_decoded).median


def _target_ms(arm: Arm) -> float:
    """Return the milliseconds of the target in a step."""
    return 1000 * arm.total(lambda step: step.target_time) / arm.num_passes


def _ratio(result: Comparison, tree: str, base: str) -> float:
    return result.speedup_of(result.arm(tree)).median / result.speedup_of(result.arm(base)).median


def _panel(title: str, results: Sequence[Comparison], names: Sequence[str]) -> Panel:
    sizes = [one.size for one in results]
    series = [Series(_NAMES.get(name, name), [_latency(one.arm(name)) for one in results], x=sizes) for name in names]
    return Panel(
        title, series, label="ms per token of a request", place_label="batch size", counts=True, legend="inside"
    )


def _known(values: Mapping[int, object], size: int) -> str:
    return str(values.get(size, ""))


FIGURES: Mapping[str, Callable[[PaperConfig, Console | None], Part]] = {
    "figure7": figure7,
    "figure8": figure8,
    "figure10": figure10,
    "figure11": figure11,
}
