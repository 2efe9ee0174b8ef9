"""The commands of bench that time batches of requests, and passes."""

from typing import Annotated

import typer

from specinfer.cli.commands import checking
from specinfer.cli.measure import drafter_names
from specinfer.cli.options import DEBUG, DEVICE, DRAFTERS, DTYPE, GROW, JSON, PLOT, SEED, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries


def throughput(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "demo",
    *,
    drafter: DRAFTERS = None,
    grow: GROW = None,
    dtype: DTYPE = "auto",
    device: DEVICE = "auto",
    tree: Annotated[list[str] | None, flag("Speculation", "A tree to measure; may be repeated; else auto.")] = None,
    batch: Annotated[
        list[int] | None,
        flag("Sampling", "Requests that run together; may be repeated; else 1, 2, 4, 8, 16 and 32."),
    ] = None,
    num_prompts: Annotated[
        int, flag("Sampling", "Held-out texts for each batch size; a larger batch has as many as it holds.")
    ] = 8,
    max_tokens: Annotated[int, flag("Sampling", "Tokens for each.")] = 64,
    temperature: Annotated[float, flag("Sampling", "0 is greedy.")] = 0.0,
    repeats: Annotated[int, flag("Sampling", "Measured runs of each tree on each batch.")] = 3,
    seed: SEED = 0,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Time token trees against plain decoding, for several numbers of requests that run together."""
    quiet_libraries(debug=debug)
    from specinfer.bench.throughput import BATCH_SIZES, ThroughputConfig, run_throughput
    from specinfer.bench.throughput_table import print_throughput

    screen = Screen()
    with checking():
        config = ThroughputConfig(
            model=model,
            drafters=drafter_names(drafter),
            trees=tuple(tree or ["auto"]),
            grow=grow,
            dtype=dtype,
            device=device,
            batch_sizes=tuple(batch or BATCH_SIZES),
            num_prompts=num_prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            repeats=repeats,
            seed=seed,
            json=as_json,
            plot=plot,
        )
        report = run_throughput(config, screen.err)
    print_throughput(report, screen.out)
