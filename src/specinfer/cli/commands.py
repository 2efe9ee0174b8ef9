"""Declaration of commands, and their exit codes and error messages.

Options that commands share are fields of a dataclass; `add_command` gives a command a flag for each field. `Program`
turns every error of a command into one line and an exit code.
"""

import contextlib
import copy
import dataclasses
import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from specinfer.cli.values import join_dotted
from specinfer.core.errors import ModelError, RequestError


class UsageError(Exception):
    """The command cannot be run as given; the message names the option and the remedy."""


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """Turn a ValueError into a UsageError, while options are read and models loaded; later it would be a bug."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


class Program(TyperGroup):
    """Runs commands and sets the exit code: 0 success, 1 failure or refused prompts, 2 usage error, 130 interrupted."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in words
        code = 2
        if sys.stdout is None:
            _print_error("standard output is closed; open it, or send it to a file")
            sys.exit(code)
        if isinstance(sys.stdout, io.TextIOWrapper):  # output may have characters that the encoding lacks
            sys.stdout.reconfigure(errors="replace")
        try:
            with checking():
                words = join_dotted("--speculative-config", words)
            code = super().main(words, *more, **(kwargs | {"standalone_mode": False, "obj": words})) or 0
            sys.stdout.flush()  # a closed pipe raises here, not at interpreter exit
        except BrokenPipeError:
            code = 1
        except typer.TyperException as error:  # a flag or argument is unknown, missing or malformed
            context = getattr(error, "ctx", None)
            hint = f" (see {context.command_path} --help)" if context else ""
            message = error.format_message()
            if "SPECINFER_PORT" in message and "://" in os.environ.get("SPECINFER_PORT", ""):
                hint = "; Kubernetes set it for a Service called specinfer: set enableServiceLinks: false in the pod"
            if message:  # empty if no command was named and the help was shown
                _print_error(message.rstrip(".") + hint)
        except (UsageError, ModelError, RequestError) as error:
            _print_error(str(error), debug=debug)
        except Exception as error:
            hint = "" if debug else " (--debug shows where)"
            _print_error(f"{type(error).__name__}: {error}{hint}", debug=debug)
            code = 1
        _drop_unwritten()
        sys.exit(code)


def _print_error(message: str, *, debug: bool = False) -> None:
    if debug:
        traceback.print_exc()
    print(f"specinfer: error: {' '.join(message.split())}", file=sys.stderr)


def _drop_unwritten() -> None:
    """Discard text that cannot be written; it would raise again, with a traceback, at interpreter exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def add_command(group: typer.Typer, function: Callable[..., None], *, environment: bool = False) -> None:
    """Add a function as the command of its name, with a flag for each field of its dataclass parameters.

    Args:
        environment: Whether environment variables such as SPECINFER_PORT set flags that are not given.
    """
    parameters: list[inspect.Parameter] = []
    options: dict[str, Any] = {}  # the dataclasses, by parameter name
    for parameter in inspect.signature(function).parameters.values():
        kind = parameter.annotation
        if not dataclasses.is_dataclass(kind):
            parameters.append(parameter)
            continue
        options[parameter.name] = kind
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            hint = _with_variable(field.name, hints[field.name]) if environment else hints[field.name]
            parameters.append(
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hint)
            )

    def run(**values: Any) -> None:
        for name, kind in options.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
        function(**values)

    run.__doc__ = function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    group.command(function.__name__.replace("_", "-"))(run)


def _with_variable(name: str, hint: Any) -> Any:
    """Return the flag with an environment variable that also sets it."""
    kind, option = get_args(hint)
    option = copy.copy(option)
    option.envvar = f"SPECINFER_{name.upper()}"
    return Annotated[kind, option]
