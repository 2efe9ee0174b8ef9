"""The command kernels."""

from typing import Annotated

import typer

from specinfer.cli.bench_options import drafter_names
from specinfer.cli.errors import checking
from specinfer.cli.options import DEBUG, DEVICE, DRAFTERS, GROW, JSON, PLOT, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries


def kernels(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "demo",
    *,
    drafter: DRAFTERS = None,
    grow: GROW = None,
    dtype: Annotated[
        list[str] | None,
        flag("Model", "Data type: auto, float32, bfloat16 or float16. May be repeated. (default: auto)", "--dtype"),
    ] = None,
    quantization: Annotated[
        list[str] | None, flag("Model", "Also measure int8, int4 or fp8. May be repeated.", "--quantization")
    ] = None,
    device: DEVICE = "auto",
    rows: Annotated[
        list[int] | None,
        flag("Speculation", "Number of nodes of a tree. May be repeated. (default: ten numbers from 1 to 64)"),
    ] = None,
    context: Annotated[int, flag("Speculation", "Number of tokens before the tree.")] = 256,
    repeats: Annotated[int, flag("Sampling", "Number of timed passes of each kind.")] = 11,
    busy: Annotated[int, flag("Sampling", "Number of other processes that keep a core busy.")] = 0,
    seed: Annotated[int, flag("Sampling", "Random seed of the trees.")] = 0,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Measure the time of a pass by its number of rows, with and without native kernels, and the memory bandwidth."""
    quiet_libraries(debug=debug)
    from benchmarks.kernels.report import print_kernels
    from benchmarks.kernels.run import ROWS, KernelsConfig, run_kernels

    screen = Screen()
    with checking():
        config = KernelsConfig(
            model=model,
            drafters=drafter_names(drafter),
            grow=grow,
            dtypes=tuple(dtype or ["auto"]),
            quantizations=tuple(quantization or ()),
            device=device,
            rows=tuple(rows or ROWS),
            context=context,
            repeats=repeats,
            busy=busy,
            seed=seed,
            json=as_json,
            plot=plot,
        )
        report = run_kernels(config, screen.err)
    print_kernels(report, screen.out)
