"""The commands of bench."""

from typing import Annotated

import typer

from specinfer.cli.commands import checking
from specinfer.cli.options import DEBUG, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.cli.values import parse_drafters


def latency(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "demo",
    *,
    drafter: Annotated[list[str] | None, flag("Model", "As in generate; may be repeated.", metavar="NAME")] = None,
    grow: Annotated[
        str | None, flag("Model", "Grow the target to this size, such as 1b; Llama models only.", metavar="SIZE")
    ] = None,
    dtype: Annotated[str, flag("Model", "auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, flag("Model", "auto, cpu, cuda, ...")] = "auto",
    tree: Annotated[list[str] | None, flag("Speculation", "A tree to measure; may be repeated; else auto.")] = None,
    num_prompts: Annotated[int, flag("Sampling", "Held-out texts to continue.")] = 8,
    max_tokens: Annotated[int, flag("Sampling", "Tokens for each.")] = 128,
    temperature: Annotated[float, flag("Sampling", "0 is greedy.")] = 0.0,
    repeats: Annotated[int, flag("Sampling", "Measured runs of each tree on each prompt.")] = 3,
    seed: Annotated[int, flag("Sampling", "Of sampled text.")] = 0,
    as_json: Annotated[str | None, flag("Output", "Write the numbers here.", "--json", metavar="FILE")] = None,
    plot: Annotated[str | None, flag("Output", "Draw them here: .png, .svg or .pdf.", metavar="FILE")] = None,
    debug: DEBUG = False,
) -> None:
    """Time token trees against plain decoding, one request at a time."""
    quiet_libraries(debug=debug)
    from specinfer.bench.latency import LatencyConfig, run_latency
    from specinfer.bench.table import print_report

    screen = Screen()
    with checking():
        drafters = parse_drafters(drafter or ["auto"])
        config = LatencyConfig(
            model=model,
            drafters=drafters if isinstance(drafters, str) else tuple(drafters),
            trees=tuple(tree or ["auto"]),
            grow=grow,
            dtype=dtype,
            device=device,
            num_prompts=num_prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            repeats=repeats,
            seed=seed,
            json=as_json,
            plot=plot,
        )
        report = run_latency(config, screen.err)
    print_report(report, screen.out)
