"""The command bench parallel: measures targets that are split over processes."""

from typing import Annotated

import typer

from specinfer.cli.commands import checking
from specinfer.cli.measure import drafter_names
from specinfer.cli.options import (
    DEBUG,
    DRAFTER_QUANTIZATION,
    DRAFTERS,
    DTYPE,
    GROW,
    JSON,
    PLOT,
    QUANTIZATION,
    SEED,
    SELECT,
    flag,
)
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries

_PANEL = "Ranks"


def parallel(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "demo",
    *,
    drafter: DRAFTERS = None,
    grow: GROW = None,
    dtype: DTYPE = "auto",
    quantization: QUANTIZATION = None,
    drafter_quantization: DRAFTER_QUANTIZATION = None,
    tensor_parallel: Annotated[
        list[int] | None, flag(_PANEL, "A split over so many tensor ranks; may be repeated.", "--tensor-parallel")
    ] = None,
    pipeline_parallel: Annotated[
        list[int] | None, flag(_PANEL, "A split into so many stages; may be repeated.", "--pipeline-parallel")
    ] = None,
    split: Annotated[
        list[str] | None,
        flag(
            _PANEL, "Tensor ranks x stages, such as 2x2; may be repeated; else, if none is given in any way, 2x1, 1x2."
        ),
    ] = None,
    namespaces: Annotated[
        bool,
        flag(
            _PANEL,
            "Two hosts made of network namespaces (root only); else all ranks on this machine, with no link between.",
        ),
    ] = True,
    link_latency: Annotated[
        list[str] | None,
        flag(_PANEL, "Between the hosts, one way; may be repeated; else 1ms and 5ms.", metavar="TIME"),
    ] = None,
    link_bandwidth: Annotated[str, flag(_PANEL, "Of each direction.", metavar="RATE")] = "1Gbit",
    threads: Annotated[int | None, flag(_PANEL, "Of each process; else the cores over the ranks of a split.")] = None,
    select: SELECT = None,
    tree: Annotated[list[str] | None, flag("Speculation", "A tree to measure; may be repeated; else auto.")] = None,
    batch: Annotated[
        list[int] | None, flag("Sampling", "Requests that run together; may be repeated; else 1 and 4.", "--batch")
    ] = None,
    temperature: Annotated[
        list[float] | None, flag("Sampling", "0 is greedy; may be repeated; else 0 and 1.", "--temperature")
    ] = None,
    num_prompts: Annotated[
        int, flag("Sampling", "Held-out texts for each batch size; a larger batch has as many as it holds.")
    ] = 4,
    prompt_chars: Annotated[int, flag("Sampling", "About how long they are.")] = 400,
    max_tokens: Annotated[int, flag("Sampling", "Tokens for each.")] = 48,
    repeats: Annotated[int, flag("Sampling", "Measured runs of each arm on each batch.")] = 1,
    seed: SEED = 0,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Time a target split over processes and hosts: trees against plain decoding, over links that are late."""
    quiet_libraries(debug=debug)
    from specinfer.bench.parallel import run_parallel
    from specinfer.bench.parallel_plans import ParallelBenchConfig
    from specinfer.bench.parallel_table import print_parallel

    screen = Screen()
    with checking():
        splits = [f"{ranks}x1" for ranks in tensor_parallel or ()] + [
            f"1x{stages}" for stages in pipeline_parallel or ()
        ]
        if link_latency and not namespaces:
            raise ValueError("link_latency: without namespaces there is no link to be late; leave one of them out")
        config = ParallelBenchConfig(
            model=model,
            drafters=drafter_names(drafter),
            trees=tuple(tree or ["auto"]),
            splits=tuple(splits + list(split or ())) or ("2x1", "1x2"),
            namespaces=namespaces,
            link_latencies=tuple(link_latency or ("1ms", "5ms")),
            link_bandwidth=link_bandwidth,
            grow=grow,
            dtype=dtype,
            quantization=quantization,
            drafter_quantization=drafter_quantization,
            select=select or "all",
            threads=threads,
            batch_sizes=tuple(batch or (1, 4)),
            temperatures=tuple(temperature or (0.0, 1.0)),
            num_prompts=num_prompts,
            prompt_chars=prompt_chars,
            max_tokens=max_tokens,
            repeats=repeats,
            seed=seed,
            json=as_json,
            plot=plot,
        )
        report = run_parallel(config, screen.err)
    print_parallel(report, screen.out)
