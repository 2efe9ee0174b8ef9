"""The command schedule."""

from typing import Annotated

import typer

from specinfer.cli.commands import checking
from specinfer.cli.measure import KIND, MEASURED, drafter_names, measured
from specinfer.cli.options import (
    DEBUG,
    DEVICE,
    DRAFTER_QUANTIZATION,
    DRAFTERS,
    DTYPE,
    GROW,
    JSON,
    MODEL,
    PLOT,
    QUANTIZATION,
    SEED,
    flag,
)
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.demo.chat_model import CODE


def schedule(
    policy: Annotated[str, typer.Argument(metavar="FILE", help="Speculation policy made by specinfer tune --policy.")],
    argument: MEASURED = None,
    *,
    model: MODEL = None,
    drafter: DRAFTERS = None,
    grow: GROW = None,
    dtype: DTYPE = "auto",
    quantization: QUANTIZATION = None,
    drafter_quantization: DRAFTER_QUANTIZATION = None,
    device: DEVICE = "auto",
    fixed: Annotated[
        list[str] | None,
        flag(
            "Speculation",
            "Fixed configuration to compare with: a tree, optionally with @models or @lookups for these drafters only. "
            "May be repeated. (default: twelve configurations)",
            metavar="TREE",
        ),
    ] = None,
    kind: KIND = None,
    num_prompts: Annotated[
        int,
        flag("Sampling", "Number of prompts of each part: code, prose and repetition, or each kind of chat prompt."),
    ] = 6,
    prompt_tokens: Annotated[int, flag("Sampling", "Maximum length of each prompt.")] = 128,
    max_tokens: Annotated[int, flag("Sampling", "Number of tokens to generate for each prompt.")] = 96,
    repeats: Annotated[int, flag("Sampling", "Number of measured runs of each arm on each prompt.")] = 1,
    seed: SEED = 0,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Compare a learned speculation policy with fixed configurations and auto, on code, prose and repetition."""
    quiet_libraries(debug=debug)
    from benchmarks.schedule.plans import FIXED, ScheduleConfig
    from benchmarks.schedule.report import print_schedule
    from benchmarks.schedule.run import run_schedule
    from specinfer.setup.model_names import usual_drafters

    screen = Screen()
    with checking():
        names, name = drafter_names(drafter), measured(argument, model)
        usual = (CODE, "suffix") if name == CODE else usual_drafters(name)
        config = ScheduleConfig(
            scheduler=policy,
            model=name,
            kinds=tuple(kind) if kind else None,
            drafters=usual if isinstance(names, str) else names,
            fixed=tuple(fixed or FIXED),
            grow=grow,
            dtype=dtype,
            quantization=quantization,
            drafter_quantization=drafter_quantization,
            device=device,
            num_prompts=num_prompts,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            repeats=repeats,
            seed=seed,
            json=as_json,
            plot=plot,
        )
        report = run_schedule(config, screen.err)
    print_schedule(report, screen.out)
