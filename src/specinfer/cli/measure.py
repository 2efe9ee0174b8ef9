"""The commands bench latency, throughput and acceptance."""

from typing import Annotated, Any

import typer

from specinfer.bench.acceptance_options import AcceptanceConfig
from specinfer.bench.options import BATCH_SIZES, LatencyConfig, ThroughputConfig
from specinfer.cli.bench_options import (
    KIND,
    MAX_TOKENS,
    MEASURED,
    PROMPT_CHARS,
    CompareOptions,
    GrowableOptions,
    ModelOptions,
    ReportOptions,
    check_inputs,
    measured,
)
from specinfer.cli.errors import UsageError, checking
from specinfer.cli.options import DEVICE, MODEL, flag
from specinfer.demo.chat_model import CHAT, CHAT_TEMPERATURE
from specinfer.reporting.files import show


def latency(
    argument: MEASURED = None,
    *,
    options: CompareOptions,
    models: GrowableOptions,
    report: ReportOptions,
    prompt_chars: PROMPT_CHARS = 600,
    max_tokens: MAX_TOKENS = 128,
    peer: Annotated[list[str] | None, typer.Option("--peer", hidden=True)] = None,
) -> None:
    """Compare the latency of token trees with that of plain decoding, one request at a time."""
    if peer:
        raise UsageError(f"peer: run python -m benchmarks.latency --peer {peer[0]} in a checkout of the repository")
    screen = report.screen()
    with checking():
        config = LatencyConfig(
            **options.settings(argument),
            **models.settings(),
            **report.settings(),
            prompt_chars=prompt_chars,
            max_tokens=max_tokens,
        )
        check_inputs(config)
        from specinfer.bench.latency import run_latency
        from specinfer.bench.latency_report import print_latency

        show(lambda: run_latency(config, screen.err), lambda report: print_latency(report, screen.out))


def throughput(
    argument: MEASURED = None,
    *,
    options: CompareOptions,
    models: GrowableOptions,
    report: ReportOptions,
    batch: Annotated[
        list[int] | None,
        flag("Sampling", "Batch size. May be repeated. (default: 1, 2, 4, 8, 16 and 32)"),
    ] = None,
    prompt_chars: PROMPT_CHARS = 600,
    max_tokens: MAX_TOKENS = 64,
) -> None:
    """Compare the throughput of token trees with that of plain decoding, by batch size."""
    screen = report.screen()
    with checking():
        sizes = tuple(batch or BATCH_SIZES)
        config = ThroughputConfig(
            **options.settings(argument),
            **models.settings(),
            **report.settings(),
            batch_sizes=sizes,
            prompt_chars=prompt_chars,
            max_tokens=max_tokens,
        )
        check_inputs(config)
        from specinfer.bench.throughput import run_throughput
        from specinfer.bench.throughput_report import print_throughput

        show(lambda: run_throughput(config, screen.err), lambda report: print_throughput(report, screen.out))


# The settings of --quick; options that are given take precedence.
_QUICK: dict[str, Any] = {"num_prompts": 3, "max_tokens": 24, "temperatures": (0.0, 1.0), "nodes": (16,)}


def acceptance(
    argument: MEASURED = None,
    *,
    model: MODEL = None,
    models: ModelOptions,
    device: DEVICE = "auto",
    part: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            "Part to measure: table1, table2, table3, rules, drafters or shift. May be repeated. (default: all but "
            "shift)",
        ),
    ] = None,
    nodes: Annotated[
        list[int] | None, flag("Speculation", "Number of nodes of the trees to compare. May be repeated. (default: 32)")
    ] = None,
    verification: Annotated[
        str | None, flag("Speculation", "Verification rule. (default: multi-step for table2, coupled for drafters)")
    ] = None,
    select: Annotated[
        str | None,
        flag("Speculation", "Selection of drafters that shift compares with all. (default: hedge:1)", "--select"),
    ] = None,
    shift_to: Annotated[
        str | None,
        flag(
            "Sampling",
            "Text of the second domain of shift, after held-out code. (default: the documentation of Python)",
            metavar="FILE",
        ),
    ] = None,
    kind: KIND = None,
    num_prompts: Annotated[
        int | None, flag("Sampling", "Number of held-out texts or chat prompts. (default: 8)")
    ] = None,
    max_tokens: Annotated[
        int | None, flag("Sampling", "Maximum number of tokens to generate for each prompt. (default: 64)")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        flag(
            "Sampling",
            "Temperature for rules and drafters; 0 is greedy. May be repeated. (default: 0, 0.6 and 1; 0 and 0.7 for "
            "demo-chat)",
        ),
    ] = None,
    quick: Annotated[bool, flag("Sampling", "Use few short texts and few trees.", "--quick")] = False,
    report: ReportOptions,
) -> None:
    """Measure tokens per pass: the tables of the paper, and a comparison of rules, trees and drafters."""
    screen = report.screen()
    with checking():
        name = measured(argument, model)
        usual = {"temperatures": (0.0, CHAT_TEMPERATURE)} if name == CHAT else {}
        asked = {
            "parts": tuple(part) if part else None,
            "nodes": tuple(nodes) if nodes else None,
            "temperatures": tuple(temperature) if temperature else None,
            "select": select,
            "shift_to": shift_to,
            "num_prompts": num_prompts,
            "max_tokens": max_tokens,
        }
        given = {field: value for field, value in asked.items() if value is not None}
        config = AcceptanceConfig(
            model=name,
            kinds=tuple(kind) if kind else None,
            verification=verification,
            device=device,
            **models.settings(),
            **report.settings(),
            **(_QUICK if quick else {}) | usual | given,
        )
        check_inputs(config)
        from specinfer.bench.acceptance import run_acceptance
        from specinfer.bench.acceptance_table import print_acceptance

        show(lambda: run_acceptance(config, screen.err), lambda report: print_acceptance(report, screen.out))
