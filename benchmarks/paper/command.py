"""The command paper: reproduces the paper's tables and figures at the scale of this machine."""

from typing import Annotated

import typer

from specinfer.cli.bench_options import drafter_names
from specinfer.cli.errors import checking
from specinfer.cli.options import DEBUG, DRAFTERS, SEED, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries


def paper(
    model: Annotated[str, typer.Argument(metavar="MODEL")] = "demo-chat",
    *,
    part: Annotated[
        list[str] | None,
        flag(
            "Parts",
            "table1, table2 (with figure 9), table3, boosted, figure7, figure8, figure10 or figure11. May be repeated. "
            "(default: all)",
            metavar="PART",
        ),
    ] = None,
    drafter: DRAFTERS = None,
    boosted: Annotated[
        list[str] | None,
        flag(
            "Model",
            "Boost-tuned drafter, in the order of tuning. May be repeated. (default: three of the code pair)",
            metavar="MODEL",
        ),
    ] = None,
    grow: Annotated[
        str | None, flag("Model", "Grow the target to this size for the figures, such as 1b.", metavar="SIZE")
    ] = None,
    offload_grow: Annotated[
        str, flag("Model", "Size of the target of figure 8, which gets a third of it as memory.", metavar="SIZE")
    ] = "3b",
    batch: Annotated[list[int] | None, flag("Sampling", "Batch size. May be repeated. (default: 1 to 16)")] = None,
    num_prompts: Annotated[int, flag("Sampling", "Number of prompts of each table.")] = 20,
    max_tokens: Annotated[int, flag("Sampling", "Number of tokens to generate for each prompt.")] = 64,
    repeats: Annotated[int, flag("Sampling", "Number of measured runs of each arm.")] = 1,
    seed: SEED = 0,
    out: Annotated[
        str | None, flag("Output", "Folder for paper.json and a plot of each figure.", metavar="DIR")
    ] = None,
    debug: DEBUG = False,
) -> None:
    """Reproduce the SpecInfer paper's tables and figures, next to the paper's numbers."""
    quiet_libraries(debug=debug)
    from benchmarks.paper.numbers import BATCH_SIZES
    from benchmarks.paper.parts import PaperConfig
    from benchmarks.paper.run import run_paper

    screen = Screen()
    with checking():
        config = PaperConfig(
            model=model,
            drafters=drafter_names(drafter),
            parts=tuple(part or ()),
            grow=grow,
            offload_grow=offload_grow,
            boosted=tuple(boosted) if boosted else None,
            batch_sizes=tuple(batch or BATCH_SIZES),
            num_prompts=num_prompts,
            max_tokens=max_tokens,
            repeats=repeats,
            seed=seed,
            out=out,
        )
        run_paper(config, screen.out, screen.err)
