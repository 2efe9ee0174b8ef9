"""The command parallel: measures targets that are split over processes."""

from typing import Annotated

import typer

from specinfer.cli.bench_options import GrowableOptions, ReportOptions
from specinfer.cli.errors import checking
from specinfer.cli.options import (
    SELECT,
    flag,
)

_PANEL = "Ranks"


def parallel(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "demo",
    *,
    models: GrowableOptions,
    tensor_parallel: Annotated[
        list[int] | None,
        flag(_PANEL, "Measure this number of tensor parallel ranks. May be repeated.", "--tensor-parallel"),
    ] = None,
    pipeline_parallel: Annotated[
        list[int] | None,
        flag(_PANEL, "Measure this number of pipeline stages. May be repeated.", "--pipeline-parallel"),
    ] = None,
    split: Annotated[
        list[str] | None,
        flag(_PANEL, "Tensor parallel ranks x pipeline stages, such as 2x2. May be repeated. (default: 2x1 and 1x2)"),
    ] = None,
    namespaces: Annotated[
        bool,
        flag(
            _PANEL,
            "Emulate two hosts by network namespaces (root only).",
        ),
    ] = True,
    link_latency: Annotated[
        list[str] | None,
        flag(_PANEL, "One-way latency between hosts. May be repeated. (default: 1ms and 5ms)", metavar="TIME"),
    ] = None,
    link_bandwidth: Annotated[str, flag(_PANEL, "Bandwidth of each direction.", metavar="RATE")] = "1Gbit",
    threads: Annotated[
        int | None, flag(_PANEL, "Number of threads of each process. (default: number of cores / number of ranks)")
    ] = None,
    select: SELECT = None,
    tree: Annotated[
        list[str] | None, flag("Speculation", "Token tree to measure. May be repeated. (default: auto)")
    ] = None,
    batch: Annotated[
        list[int] | None, flag("Sampling", "Batch size. May be repeated. (default: 1 and 4)", "--batch")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        flag("Sampling", "Temperature; 0 is greedy. May be repeated. (default: 0 and 1)", "--temperature"),
    ] = None,
    num_prompts: Annotated[
        int, flag("Sampling", "Number of held-out texts for each batch size; at least the batch size.")
    ] = 4,
    prompt_chars: Annotated[int, flag("Sampling", "Approximate length of texts, in characters.")] = 400,
    max_tokens: Annotated[int, flag("Sampling", "Number of tokens to generate for each prompt.")] = 48,
    repeats: Annotated[int, flag("Sampling", "Number of measured runs of each arm on each batch.")] = 1,
    report: ReportOptions,
) -> None:
    """Compare a target split over processes and hosts with plain decoding, over links with latency."""
    screen = report.screen()
    from benchmarks.parallel.plans import ParallelBenchConfig
    from benchmarks.parallel.report import print_parallel
    from benchmarks.parallel.run import run_parallel

    with checking():
        splits = [f"{ranks}x1" for ranks in tensor_parallel or ()] + [
            f"1x{stages}" for stages in pipeline_parallel or ()
        ]
        if link_latency and not namespaces:
            raise ValueError("link_latency: without namespaces there is no link to be late; leave one of them out")
        config = ParallelBenchConfig(
            model=model,
            trees=tuple(tree or ["auto"]),
            splits=tuple(splits + list(split or ())) or ("2x1", "1x2"),
            namespaces=namespaces,
            link_latencies=tuple(link_latency or ("1ms", "5ms")),
            link_bandwidth=link_bandwidth,
            **models.settings(),
            select=select or "all",
            threads=threads,
            batch_sizes=tuple(batch or (1, 4)),
            temperatures=tuple(temperature or (0.0, 1.0)),
            num_prompts=num_prompts,
            prompt_chars=prompt_chars,
            max_tokens=max_tokens,
            repeats=repeats,
            **report.settings(),
        )
        result = run_parallel(config, screen.err)
    print_parallel(result, screen.out)
