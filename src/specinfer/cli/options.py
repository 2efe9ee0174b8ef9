"""Options that several commands share, and the objects made from them."""

import inspect
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from specinfer.bench.options import SharedSettings
from specinfer.cli.flags import flag_name, setting_flag
from specinfer.cli.loading import loading_bar
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.cli.values import parse_speculative_config
from specinfer.core.errors import ModelError
from specinfer.core.lookups import quoted_lookups, reserved_names
from specinfer.core.options import setting, settings_of
from specinfer.core.parallel_config import find_place
from specinfer.core.progress import ProgressCallback, begin
from specinfer.demo.chat_model import CHAT, CODE, EMBEDDED, MISSING, default_model, find_chat_model
from specinfer.engine_args import EngineArgs
from specinfer.hub.locate import is_on_hub, locate, locate_tokenizer

if TYPE_CHECKING:
    from specinfer.llm import LLM

_FIELDS = {each.name: (each, about) for each, about in settings_of(EngineArgs)}
_CONFIG = "speculative_config"
_LEARNING = ("adapt_drafters", "adapt_dir")


def flag(panel: str, help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


def flag_of(settings: type, name: str) -> Any:
    """Return the flag of a setting of a class."""
    parameter = next(setting_flag(each, about) for each, about in settings_of(settings) if each.name == name)
    return get_args(parameter.annotation)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Output in addition to the text."""

    stats: bool = setting(
        False, "Output", "Color each token by its drafter, and print speed and acceptance statistics."
    )
    debug: bool = setting(False, "Output", "Show log messages, messages of libraries and tracebacks.")

    def screen(self) -> Screen:
        quiet_libraries(debug=self.debug)
        return Screen(stats=self.stats)


MODEL_HELP = "A folder, a GGUF file, a Hugging Face model ID, demo or demo-chat."
ARGUMENT = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"{MODEL_HELP} (default: demo-chat)",
        show_default=False,
    ),
]
DEBUG = Annotated[bool, flag_of(OutputOptions, "debug")]
JSON = Annotated[str | None, flag_of(SharedSettings, "json")]
PLOT = Annotated[str | None, flag_of(SharedSettings, "plot")]
_SPECULATIVE_CONFIG = Annotated[
    str | None,
    flag(
        "Speculation",
        'As in vLLM: {"method": "draft_model", "model": NAME, "num_speculative_tokens": 4}; '
        f'or "method": {quoted_lookups("or")}, "quantization", "tree", "verification", "draft_sampling", "select", '
        '"drafter_window", "speculation_policy".',
        metavar="JSON",
    ),
]


def one_name(argument: str | None, option: str | None) -> str | None:
    """Return the model named as MODEL or with --model, or None if neither was given.

    Raises:
        ValueError: Both were given.
    """
    if argument is not None and option is not None:
        raise ValueError("model: name one, as MODEL or with --model; leave the other out")
    return option if argument is None else argument


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The flags of `EngineArgs` that were given.

    A command has all of them but those of models that are served, or, with `Annotated[EngineOptions, names]`, those of
    the named fields.

    Attributes:
        given: Values by the names of flags.
    """

    given: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def flags(names: Sequence[str] = ()) -> list[inspect.Parameter]:
        """Return a parameter for each flag: those of the named fields, or of all."""
        chosen = names or [name for name in (*_FIELDS, _CONFIG) if name not in _LEARNING]
        flags = [setting_flag(*_FIELDS[name]) for name in chosen if name in _FIELDS]
        if _CONFIG in chosen:
            config = inspect.Parameter(_CONFIG, inspect.Parameter.KEYWORD_ONLY, default=None)
            flags.append(config.replace(annotation=_SPECULATIVE_CONFIG))
        return flags

    def without_model(self) -> "EngineOptions":
        return EngineOptions({name: value for name, value in self.given.items() if name != "model"})

    def _named(self, argument: str | None) -> str:
        name = one_name(argument, self.given.get("model"))
        if name is None:
            name, missing = default_model()
            if missing is not None:
                print(f"specinfer: {missing}", file=sys.stderr)
        return name

    def args(self, argument: str | None) -> EngineArgs:
        """Return the checked arguments, for the model named as MODEL or with --model or the default model.

        Raises:
            ValueError: A value cannot be used, or two options set the same thing.
        """
        given = {name: value for name, value in self.given.items() if name not in ("model", "drafter", _CONFIG)}
        if drafters := self.given.get("drafter"):
            given["drafters"] = drafters
        config = parse_speculative_config(self.given.get(_CONFIG))
        if both := sorted(given.keys() & config.keys()):
            name = f"--{flag_name(*_FIELDS[both[0]]).replace('_', '-')}"
            raise ValueError(f"speculative_config: it and {name} both choose {both[0]}; leave one out")
        return EngineArgs(self._named(argument), **given, **config)


ServedOptions = Annotated[EngineOptions, (*_FIELDS, _CONFIG)]  # with those of models that learn while they are served


def load(args: EngineArgs, screen: Screen) -> "LLM":
    """Load the model and show its progress on the terminal."""
    follow(args)
    with loading_bar(screen.err, f"loading {args.model} ...") as progress:
        locate_all(args, progress)
        begin(progress, "importing PyTorch")
        from specinfer.llm import LLM

        llm = LLM.from_engine_args(args, progress)
    screen.watch(llm)
    return llm


def locate_all(args: EngineArgs, progress: ProgressCallback | None = None) -> None:
    """Find, and if need be download, the models of an engine before torch is imported, which takes seconds.

    Raises:
        ModelError: A model is missing or cannot be loaded.
        ValueError: A file of the settings is missing.
    """
    check_models(args.model, args.speculative_config.drafters or (), progress)
    if args.tokenizer is not None and str(args.tokenizer) != CODE:
        locate_tokenizer(args.tokenizer)
    policy = args.speculation_policy
    if policy is not None and not Path(policy).is_file():
        raise ValueError(f"speculation_policy: no file {policy}; make one with specinfer tune --policy")


def check_local(args: EngineArgs) -> None:
    """Check the models that are folders and files of this machine, and ask no hub.

    Raises:
        ModelError: One is missing or cannot be loaded.
    """
    named = (args.model, *(args.speculative_config.drafters or ()))
    on_hub = {str(name) for name in named if str(name) != CHAT and is_on_hub(name)}
    check_models(
        CODE if str(args.model) in on_hub else args.model,
        [str(name) for name in named[1:] if str(name) not in on_hub],
    )


def check_models(model: str | Path, drafters: Sequence[str], progress: ProgressCallback | None = None) -> None:
    """Find the models of a target and its drafters, and download those that are on the hub only.

    Raises:
        ModelError: A model is missing or cannot be loaded.
    """
    if str(model) == CHAT and find_chat_model() is None:
        raise ModelError(MISSING)
    if str(model) not in (CODE, CHAT):
        locate(model, progress)
    for name in drafters:
        if name in (*reserved_names(), *EMBEDDED):
            continue
        try:
            locate(name, progress)
        except ModelError as error:
            raise ModelError(f"drafters: {str(error).removeprefix('model: ')}") from error


def follow(args: EngineArgs) -> None:
    """Run this machine's ranks and then exit, if the engine is in another process; otherwise do nothing.

    Raises:
        ValueError: The addresses cannot be used.
    """
    if args.parallel_config.world_size == 1 or find_place(args.parallel_config).rank == 0:
        return
    from specinfer.setup.follower import follow

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ranks wait in native code; Python's handler would not run
    raise typer.Exit(follow(args))
