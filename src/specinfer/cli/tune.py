"""`specinfer tune`: training of drafters for a target, or of a speculation policy."""

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from specinfer.cli.errors import UsageError, checking
from specinfer.cli.options import DEBUG, JSON, PLOT, check_models, flag
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.learning.policy.options import PolicyConfig
from specinfer.learning.tune.options import DEMO_DATA, TuneConfig
from specinfer.reporting.files import check_files, naming, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Options of `specinfer tune`; those that a `TuneConfig` has too have its defaults."""

    drafter: Annotated[
        list[str] | None,
        flag(
            "Drafters",
            "Initial weights of a drafter: a folder, a Hugging Face model ID, demo, layers:N (N layers of the target), "
            "new:N or new:NxHIDDEN (random), new:hybrid or new:hybrid:LAYERSxWIDTH (random, mostly recurrences), "
            "new:eagle3, new:dspark or new:dspark:LAYERSxWIDTH (a head on hidden states). May be "
            "repeated; each drafter learns what the earlier ones do not predict.",
            metavar="START",
        ),
    ] = None
    data: Annotated[
        list[str] | None,
        flag(
            "Data",
            "Text files, JSON lines of prompts or chats, server traces, or folders of these; demo is the training data "
            "of the embedded models. May be repeated.",
            metavar="FILE",
        ),
    ] = None
    held_out: Annotated[
        list[str] | None,
        flag("Data", "Evaluation data, in the same formats. (default: a tenth of --data)", metavar="FILE"),
    ] = None
    out: Annotated[str | None, flag("Output", "Output folder; an existing run is resumed.", metavar="FOLDER")] = None
    beside: Annotated[
        list[str] | None,
        flag("Drafters", "Drafter that is not trained; the others learn what it does not predict.", metavar="NAME"),
    ] = None
    boosting: Annotated[
        str,
        flag(
            "Drafters",
            "What later drafters learn: tokens or prompts (as in the paper) that earlier ones miss, or none.",
        ),
    ] = "tokens"
    control: Annotated[
        bool, flag("Drafters", "Also train the same drafters independently, for comparison.", "--control")
    ] = False
    num_prompts: Annotated[int, flag("Data", "Number of prompts that the target completes.")] = 2048
    num_held_out: Annotated[int, flag("Data", "Number of prompts for evaluation.")] = 128
    prompt_tokens: Annotated[int, flag("Data", "Length of prompts cut from plain text, in tokens.")] = 64
    max_tokens: Annotated[int, flag("Data", "Maximum number of tokens to generate for each prompt.")] = 192
    num_texts: Annotated[int, flag("Data", "Number of passages of plain text to train on in addition.")] = 4096
    temperature: Annotated[
        list[float] | None,
        flag("Data", "Temperature of the completions, for each prompt in turn. May be repeated. (default: 0 and 1)"),
    ] = None
    epochs: Annotated[float, flag("Training", "Number of passes over the training examples.")] = 2.5
    batch_tokens: Annotated[int, flag("Training", "Number of tokens in an optimizer step.")] = 4096
    learning_rate: Annotated[
        float | None, flag("Training", "Peak learning rate. (default: by the size of the drafter)")
    ] = None
    token_map: Annotated[
        int | None,
        flag(
            "Drafters",
            "Restrict the output head to the N most frequent tokens (FR-Spec).",
            "--token-map",
            metavar="N",
        ),
    ] = None
    freeze_embeddings: Annotated[
        bool, flag("Training", "Do not train the embeddings, nor an output head tied to them.", "--freeze-embeddings")
    ] = False
    depth: Annotated[int, flag("Training", "Depth of the chains that the drafters should predict together.")] = 8
    top: Annotated[int, flag("Data", "Number of most probable tokens stored of each distribution of the target.")] = 32
    seed: Annotated[int, flag("Training", "Random seed of the order of the data and of sampled text.")] = 0
    dtype: Annotated[str, flag("Training", "Data type of the target: auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, flag("Training", "Device: auto, cpu, cuda, ...")] = "auto"
    mixed_precision: Annotated[str, flag("Training", "Mixed precision: auto, no or bf16.")] = "auto"
    save_every: Annotated[float, flag("Training", "Time between checkpoints, in seconds.")] = 30.0
    tensorboard: Annotated[bool, flag("Output", "Log curves to FOLDER/tensorboard.")] = True
    policy: Annotated[
        str | None,
        flag(
            "Speculation policy",
            "Train a speculation policy for the given drafters (named as in generate) instead, and write it to this "
            "file.",
            "--policy",
            metavar="FILE",
        ),
    ] = None
    step_log: Annotated[
        list[str] | None,
        flag(
            "Speculation policy", "Train the policy from a log of serve --step-log instead of --data.", metavar="FILE"
        ),
    ] = None
    as_json: JSON = None
    plot: PLOT = None
    debug: DEBUG = False


def tune(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A folder, a GGUF file, a Hugging Face model ID or demo.")
    ],
    options: TuneOptions,
) -> None:
    """Train drafters for a target, one after the other, so that together they predict its output.

    The target completes the prompts; drafters learn its distributions, and each is saved as an
    ordinary Hugging Face folder. A run that was interrupted, even by kill -9, resumes when it is
    started again with the same options.
    """
    quiet_libraries(debug=options.debug)
    with checking():
        needs_tuning()
    if options.policy is None:
        _tune_drafters(target, options, Screen())
    else:
        _train_policy(target, options, options.policy, Screen())


def _train_policy(target: str, options: TuneOptions, out: str, screen: Screen) -> None:
    with checking():
        if unused := [name for name in ("held_out", "beside", "out", "plot") if getattr(options, name)]:
            raise ValueError(f"{', '.join(unused)}: not used with --policy; leave it out")
        check_files(options.as_json, None)
        try:
            config = PolicyConfig(
                target=target, drafters=tuple(options.drafter or ()) or "auto", data=tuple(options.data or ()),
                logs=tuple(options.step_log or ()), out=out, temperatures=tuple(options.temperature or (0.0, 1.0)),
                dtype=options.dtype, device=options.device, seed=options.seed,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(re.sub("^out:", "policy:", str(error))) from error
        check_sources("data", config.data)
        check_sources("step_log", config.logs)
        check_models(target, options.drafter or ())
        from specinfer.learning.policy.report import print_policy
        from specinfer.learning.policy.training import train_policy

        with StageProgress(screen.err) as progress:
            report = train_policy(config, progress)
        print_policy(report, screen.out)
        if options.as_json is not None:
            with naming("json", options.as_json):
                write_json(options.as_json, report.as_dict())


def _tune_drafters(target: str, options: TuneOptions, screen: Screen) -> None:
    with checking():
        if options.step_log:
            raise ValueError("step_log: a speculation policy is trained from it; name its file with --policy")
        if options.out is None:
            raise ValueError("out: name a folder with --out; drafters, examples and checkpoints go there")
        check_files(options.as_json, options.plot)
        # Each process times kernels and takes the fastest; another kernel may round sums differently in the last bit.
        os.environ.setdefault("SPECINFER_NATIVE", "always")
        values: dict[str, Any] = {
            each.name: getattr(options, each.name, None) for each in dataclasses.fields(TuneConfig)
        }
        lists = {
            "drafters": options.drafter, "data": options.data, "held_out": options.held_out, "beside": options.beside,
            "temperatures": options.temperature or (0.0, 1.0),
        }  # fmt: skip
        values |= {name: tuple(value or ()) for name, value in lists.items()} | {"json": options.as_json}
        config = TuneConfig(**values | {"target": target})
        if config.data != (DEMO_DATA,):
            check_sources("data", config.data)
            check_sources("held_out", config.held_out)
        check_models(target, ())
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
            report = measure(config, result, progress)
        except (TrainingError, DamagedError) as error:
            raise UsageError(str(error)) from error
    print_report(report, screen.out)
    with checking():
        for name, file in (("out", run.folder / "report.json"), ("json", options.as_json)):
            if file is not None:
                with naming(name, file):
                    write_json(file, report.as_dict())
        if options.plot is not None:
            with naming("plot", options.plot):
                plot_report(report, options.plot)


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


class StageProgress:
    """A display of the stages of a run: as a bar on a terminal, otherwise as a line now and then."""

    _EVERY = 0.1  # share of a stage between two lines

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[details]}"), console=console,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._task: Any = None
        self._name, self._shown = "", 0.0

    def __enter__(self) -> "StageProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, name: str, done: int, total: int, details: str = "") -> None:
        """Show how much of a stage is done; the first call with another name begins it."""
        if name != self._name:
            self._name, self._shown = name, 0.0
            self._task = self._bar.add_task(name, total=total, details="")
            self._print(f"{name}: {total}")
        self._bar.update(self._task, completed=done, details=details)
        if done >= self._shown + self._EVERY * total or done == total > self._shown:
            self._shown = done
            self._print(f"{name}: {done} of {total}{', ' if details else ''}{details}")

    def _print(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True)
