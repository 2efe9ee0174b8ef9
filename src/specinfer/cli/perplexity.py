"""The command bench perplexity: measures what quantization costs in quality."""

from typing import Annotated

import typer

from specinfer.cli.commands import checking
from specinfer.cli.options import DEBUG, DEVICE, DTYPE, JSON, PLOT, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.config import QUANTIZATIONS


def perplexity(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "demo",
    *,
    quantization: Annotated[
        list[str] | None, flag("Model", "int8, int4 or fp8; may be repeated; else all.", "--quantization")
    ] = None,
    grow: Annotated[
        str | None, flag("Model", "Grow the model to this size, such as 1b; Llama models only.", metavar="SIZE")
    ] = None,
    dtype: DTYPE = "auto",
    device: DEVICE = "auto",
    num_prompts: Annotated[int, flag("Sampling", "Held-out texts to read.")] = 16,
    prompt_chars: Annotated[int, flag("Sampling", "About how long they are.")] = 1200,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Compare how well a model predicts text with its own weights and with rounded ones."""
    quiet_libraries(debug=debug)
    from specinfer.bench.perplexity import PerplexityConfig, run_perplexity
    from specinfer.bench.perplexity_report import print_perplexity

    screen = Screen()
    with checking():
        config = PerplexityConfig(
            model=model,
            quantizations=tuple(quantization or QUANTIZATIONS),
            grow=grow,
            dtype=dtype,
            device=device,
            num_prompts=num_prompts,
            prompt_chars=prompt_chars,
            json=as_json,
            plot=plot,
        )
        report = run_perplexity(config, screen.err)
    print_perplexity(report, screen.out)
