"""The command load."""

from typing import Annotated

import typer

from specinfer.cli.errors import checking
from specinfer.cli.options import DEBUG, DTYPE, JSON, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries


def load(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...")],
    *,
    dtype: DTYPE = "auto",
    repeats: Annotated[int, flag("Sampling", "Number of loads of each model.")] = 3,
    as_json: JSON = None,
    debug: DEBUG = False,
) -> None:
    """Measure how long quantized folders and GGUF files take to load, in turns with transformers' own load."""
    quiet_libraries(debug=debug)
    from benchmarks.loading import LoadingConfig, print_loading, run_loading

    screen = Screen()
    with checking():
        config = LoadingConfig(tuple(models), repeats=repeats, dtype=dtype, json=as_json)
        report = run_loading(config)
    print_loading(report, screen.out)
