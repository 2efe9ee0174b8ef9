"""`specinfer tune`: training of drafters for a target, or of a speculation policy."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from specinfer.cli.errors import UsageError, checking
from specinfer.cli.options import DEBUG, JSON, PLOT, check_models, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.learning.policy.options import PolicyConfig
from specinfer.learning.tune.options import DEMO_DATA, TuneConfig
from specinfer.reporting.files import check_files, naming, write_json
from specinfer.reporting.progress_bar import StageProgress


def tune(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A folder, a GGUF file, a Hugging Face model ID or demo.")
    ],
    options: TuneConfig,
    *,
    policy: Annotated[
        str | None,
        flag(
            "Speculation policy",
            "Train a speculation policy for the given drafters (named as in generate) instead, and write it to this "
            "file.",
            "--policy",
            metavar="FILE",
        ),
    ] = None,
    step_log: Annotated[
        list[str] | None,
        flag(
            "Speculation policy", "Train the policy from a log of serve --step-log instead of --data.", metavar="FILE"
        ),
    ] = None,
    as_json: JSON = None,
    plot: PLOT = None,
    debug: DEBUG = False,
) -> None:
    """Train drafters for a target, one after the other, so that together they predict its output.

    The target completes the prompts; drafters learn its distributions, and each is saved as an
    ordinary Hugging Face folder. A run that was interrupted, even by kill -9, resumes when it is
    started again with the same options.
    """
    quiet_libraries(debug=debug)
    with checking():
        needs_tuning()
        options = replace(options, target=target, json=as_json, plot=plot)
        if policy is None and step_log:
            raise ValueError("step_log: a speculation policy is trained from it; name its file with --policy")
    if policy is None:
        _tune_drafters(options, Screen())
    else:
        _train_policy(options, step_log or [], policy, Screen())


def _train_policy(options: TuneConfig, step_log: Sequence[str], out: str, screen: Screen) -> None:
    with checking():
        if unused := [name for name in ("held_out", "beside", "out", "plot") if getattr(options, name)]:
            raise ValueError(f"{', '.join(unused)}: not used with --policy; leave it out")
        check_files(options.json, None)
        try:
            config = PolicyConfig(
                target=options.target, drafters=options.drafters or "auto", data=options.data, logs=tuple(step_log),
                out=out, temperatures=options.temperatures, dtype=options.dtype, device=options.device,
                seed=options.seed,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(re.sub("^out:", "policy:", str(error))) from error
        check_sources("data", config.data)
        check_sources("step_log", config.logs)
        check_models(config.target, options.drafters)
        from specinfer.learning.policy.report import print_policy
        from specinfer.learning.policy.training import train_policy

        with StageProgress(screen.err) as progress:
            report = train_policy(config, progress)
        print_policy(report, screen.out)
        if options.json is not None:
            with naming("json", options.json):
                write_json(options.json, report.as_dict())


def _tune_drafters(config: TuneConfig, screen: Screen) -> None:
    with checking():
        config.check_complete()
        check_files(config.json, config.plot)
        # Otherwise each process times instructions; others may round sums differently in the last bit.
        os.environ.setdefault("SPECINFER_NATIVE", "always")
        if config.data != (DEMO_DATA,):
            check_sources("data", config.data)
            check_sources("held_out", config.held_out)
        check_models(config.target, ())
        from specinfer.learning.examples import DamagedError
        from specinfer.learning.loop import TrainingError
        from specinfer.learning.tune.report import measure
        from specinfer.learning.tune.report_views import plot_report, print_report
        from specinfer.learning.tune.run import Run

        run = Run(config, progress := StageProgress(screen.err))
    with progress:
        try:
            result = run.run()
            if not run.accelerator.is_main_process:
                return
            with naming("out", run.folder):
                report = measure(config, result, progress)
        except (TrainingError, DamagedError) as error:
            raise UsageError(str(error)) from error
    print_report(report, screen.out)
    with checking():
        if config.json is not None:
            with naming("json", config.json):
                write_json(config.json, report.as_dict())
        if config.plot is not None:
            with naming("plot", config.plot):
                plot_report(report, config.plot)


def needs_tuning() -> None:
    """Check that the packages for tuning are installed.

    Raises:
        ValueError: A package is missing; the message says how to install it.
    """
    for name in ("accelerate", "tensorboard"):
        if find_spec(name) is None:
            raise ValueError(f"tune needs {name}, which is missing; pip install 'specinfer[tune]'")


def check_sources(name: str, files: Sequence[str | Path]) -> None:
    """Check that files or folders exist.

    Raises:
        ValueError: One does not.
    """
    for file in files:
        if str(file) != DEMO_DATA and not Path(file).exists():
            raise ValueError(f"{name}: no file {file}; name text files, JSON lines or folders of them")
