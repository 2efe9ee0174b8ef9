"""The command schedule."""

from typing import Annotated

import typer

from specinfer.cli.bench_options import KIND, MEASURED, GrowableOptions, ReportOptions, measured
from specinfer.cli.errors import checking
from specinfer.cli.options import (
    DEVICE,
    MODEL,
    flag,
)
from specinfer.demo.chat_model import CODE


def schedule(
    policy: Annotated[str, typer.Argument(metavar="FILE", help="Speculation policy made by specinfer tune --policy.")],
    argument: MEASURED = None,
    *,
    model: MODEL = None,
    models: GrowableOptions,
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
    report: ReportOptions,
) -> None:
    """Compare a learned speculation policy with fixed configurations and auto, on code, prose and repetition."""
    screen = report.screen()
    from benchmarks.schedule.plans import FIXED, ScheduleConfig
    from benchmarks.schedule.report import print_schedule
    from benchmarks.schedule.run import run_schedule
    from specinfer.model.device import find_device
    from specinfer.setup.model_names import find_target, usual_drafters

    with checking():
        settings, name = models.settings(), measured(argument, model)
        if isinstance(settings["drafters"], str):
            usual = usual_drafters(name, find_target(name), find_device(device))
            settings["drafters"] = (CODE, "suffix") if name == CODE else usual.names
        config = ScheduleConfig(
            scheduler=policy,
            model=name,
            kinds=tuple(kind) if kind else None,
            fixed=tuple(fixed or FIXED),
            **settings,
            device=device,
            num_prompts=num_prompts,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            repeats=repeats,
            **report.settings(),
        )
        result = run_schedule(config, screen.err)
    print_schedule(result, screen.out)
