"""Commands that measure. Their flags are made from the fields of their configurations."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from specinfer.bench.acceptance_options import AcceptanceConfig
from specinfer.bench.options import LatencyConfig, ThroughputConfig
from specinfer.bench.serve_options import ServeConfig
from specinfer.cli.errors import UsageError, checking
from specinfer.cli.flags import flag_name, setting_flag, value_of
from specinfer.cli.options import DEBUG, check_models, flag, one_name
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.core.drafter_forms import parse_drafters
from specinfer.core.options import settings_of
from specinfer.demo.chat_model import CHAT, CHAT_TEMPERATURE, CODE, usual_temperature
from specinfer.reporting.files import UnwrittenError, check_files

_NO_OTHERS: dict[str, Any] = {}
MEASURED = "Target model, as in generate. (default: demo)"


@dataclass(frozen=True, slots=True)
class ConfigFlags:
    """The flags of a configuration that were given.

    A command has those of all settings of a class with `Annotated[ConfigFlags, THE_CLASS]`.

    Attributes:
        given: Values by the names of flags.
    """

    given: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def flags(config: type) -> list[inspect.Parameter]:
        """Return a parameter for each setting of a class."""
        return [setting_flag(each, about) for each, about in settings_of(config)]

    def settings(self, config: type) -> dict[str, Any]:
        """Return the values by fields of the class.

        Raises:
            ValueError: The drafters cannot be used together.
        """
        found = {each.name: (about, flag_name(each, about)) for each, about in settings_of(config)}
        given = {name: value_of(about, self.given[flag]) for name, (about, flag) in found.items() if flag in self.given}
        if "drafters" in given:
            names = parse_drafters(given["drafters"])
            given["drafters"] = "auto" if names is None else names
        return given


@dataclass(frozen=True, slots=True)
class Measurement:
    """A command that measures.

    Attributes:
        run: Function that measures, as "module:function". It is imported after the options are checked, since torch
            takes seconds.
        help: Description of the command.
        model: Help of the argument MODEL; None if there is no such argument.
        default: Model that is measured if none is named.
        is_required: Whether a model must be named.
        usual: Function that returns the fields whose defaults depend on the model.
        quick: Fields that a flag --quick sets, with its help; None if there is no such flag.
        moved: Types of hidden flags, by their names, that only `python -m benchmarks` has, which the error names.
        moved_to: Command there, if it has another name.
    """

    name: str
    config: type
    run: str
    help: str
    model: str | None = MEASURED
    default: str | None = CODE
    is_required: bool = False
    usual: Callable[[str | None], dict[str, Any]] = lambda model: _NO_OTHERS
    quick: tuple[str, Mapping[str, Any]] | None = None
    moved: Mapping[str, Any] = field(default_factory=dict)
    moved_to: str | None = None

    def command(self) -> Callable[..., None]:
        """Return the function of the command."""

        def command(
            argument: str | None = None, *, flags: ConfigFlags, debug: bool, quick: bool = False, **moved: Any
        ) -> None:
            quiet_libraries(debug=debug)
            screen = Screen()
            with checking():
                self._refuse_moved(argument, moved)
                config = self._config(argument, flags, quick=quick)
                check_inputs(config)
                _show(_function(self.run), config, screen)

        kind, argument = inspect.Parameter.KEYWORD_ONLY, typer.Argument(metavar="MODEL", help=self.model)
        parameters = [] if self.model is None else [
            inspect.Parameter(
                "argument",
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if self.is_required else None,
                annotation=Annotated[str if self.is_required else str | None, argument],
            )
        ]  # fmt: skip
        parameters.append(inspect.Parameter("flags", kind, annotation=Annotated[ConfigFlags, self.config]))
        if self.quick is not None:
            quick = flag("Sampling", self.quick[0], "--quick")
            parameters.append(inspect.Parameter("quick", kind, default=False, annotation=Annotated[bool, quick]))
        for name, of_value in self.moved.items():
            hidden = typer.Option(f"--{name}", hidden=True)
            parameters.append(
                inspect.Parameter(
                    name.replace("-", "_"), kind, default=None, annotation=Annotated[of_value | None, hidden]
                )
            )
        parameters.append(inspect.Parameter("debug", kind, default=False, annotation=DEBUG))
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__name__, command.__doc__ = self.name, self.help
        return command

    def _config(self, argument: str | None, flags: ConfigFlags, *, quick: bool) -> Any:
        settings = flags.settings(self.config)
        name = one_name(argument, settings.pop("model", None)) or self.default
        named = {} if self.model is None else {"model": name}
        few = self.quick[1] if self.quick is not None and quick else {}
        return self.config(**{**named, **few, **self.usual(name), **settings})

    def _refuse_moved(self, argument: str | None, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            if value is None:
                continue
            if self.moved_to is None:
                words = f"{self.name} --{name} {value if isinstance(value, str) else value[0]}"
            else:
                words = f"{self.moved_to} {argument}"
            raise UsageError(f"{name}: run python -m benchmarks {words} in a checkout of the repository")


def _show(run: Callable[..., Any], config: Any, screen: Screen) -> None:
    """Measure, and print the report, even if a file of it cannot be written."""
    try:
        report = run(config, screen.err)
    except UnwrittenError as error:
        error.report.print(screen.out)
        raise
    report.print(screen.out)


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def check_inputs(config: Any) -> None:
    """Check the files and models of a measurement before torch is imported, which takes seconds.

    Raises:
        ModelError, ValueError: A file cannot be written, or a model is missing.
    """
    check_files(config.json, getattr(config, "plot", None))
    if getattr(config, "base_url", None) is None and getattr(config, "model", None) is not None:
        drafters = getattr(config, "drafters", ())
        check_models(config.model, () if isinstance(drafters, str) else drafters)


def usual_settings(model: str | None) -> dict[str, Any]:
    """Return the settings of a comparison that depend on the model."""
    return {"temperature": usual_temperature(str(model), 0.0)}


def usual_temperatures(model: str | None) -> dict[str, Any]:
    """Return the settings of the acceptance measurement that depend on the model."""
    return {"temperatures": (0.0, CHAT_TEMPERATURE)} if model == CHAT else {}


LATENCY = Measurement(
    "latency",
    LatencyConfig,
    "specinfer.bench.latency:run_latency",
    "Compare the latency of token trees with that of plain decoding, one request at a time.",
    usual=usual_settings,
    moved={"grow": str, "peer": list[str]},
)
THROUGHPUT = Measurement(
    "throughput",
    ThroughputConfig,
    "specinfer.bench.throughput:run_throughput",
    "Compare the throughput of token trees with that of plain decoding, by batch size.",
    usual=usual_settings,
    moved={"grow": str, "peer": list[str]},
)
SERVE = Measurement(
    "serve",
    ServeConfig,
    "specinfer.bench.serve:run_serve",
    "Benchmark a server under load, with and without token trees in turns.",
    model="Model to serve; with --base-url, the name of the model on the server.",
    default=None,
    moved={"grow": str},
)
ACCEPTANCE = Measurement(
    "acceptance",
    AcceptanceConfig,
    "specinfer.bench.acceptance:run_acceptance",
    "Measure tokens per pass: the tables of the paper, and a comparison of rules, trees and drafters.",
    usual=usual_temperatures,
    quick=(
        "Use few short texts and few trees.",
        {"num_prompts": 3, "max_tokens": 24, "temperatures": (0.0, 1.0), "nodes": (16,)},
    ),
)

_LABORATORY = "run python -m benchmarks {} in a checkout of the repository"
# Former commands of bench, and what measures the same now.
MOVED = {name: _LABORATORY.format(name) for name in ("offload", "schedule", "kernels", "perplexity", "host")}
MOVED["parallel"] = "run bench latency with --tensor-parallel-size or --pipeline-parallel-size"


def add_moved(group: typer.Typer) -> None:
    """Add a hidden command for each former name, which names its successor."""
    takes_all = {"ignore_unknown_options": True, "allow_extra_args": True}
    for name in MOVED:
        group.command(name, hidden=True, add_help_option=False, context_settings=takes_all)(_refuse)


def _refuse(context: typer.Context) -> None:
    raise UsageError(f"bench {context.info_name}: {MOVED[str(context.info_name)]}")
