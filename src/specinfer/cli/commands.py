"""Declaration of commands, and their exit codes and error messages.

Options that commands share are fields of a dataclass; `add_command` gives a command a flag for each field. `Program`
turns every error of a command into one line and an exit code.
"""

import errno
import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import typer

from specinfer.cli.errors import UsageError, as_typed, checking, name_of
from specinfer.cli.flags import Given, flags_of, old_flags, with_variable
from specinfer.cli.help_text import Command, Group
from specinfer.cli.values import join_dotted
from specinfer.core.errors import ModelError, NativeCodeError, RequestError, file_error
from specinfer.core.vllm_names import without_vllm_flags
from specinfer.core.vllm_tables import ENGINE


class Program(Group):
    """Commands with exit codes: 0 success, 1 failure or refused prompts, 2 usage error, 130 interrupted."""

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
                words = join_dotted("--speculative-config", self._without_vllm_flags(words))
            code = super().main(words, *more, **(kwargs | {"standalone_mode": False, "obj": words})) or 0
            sys.stdout.flush()  # a closed pipe raises here, not at interpreter exit
        except BrokenPipeError:
            code = 1
        except typer.TyperException as error:  # a flag or argument is unknown, missing or malformed
            context = getattr(error, "ctx", None)
            hint = f" (see {context.command_path} --help)" if context else ""
            message = _type_error(error) or _of_vllm(error) or _of_prompt(error) or error.format_message()
            if "SPECINFER_PORT" in message and "://" in os.environ.get("SPECINFER_PORT", ""):
                hint = "; Kubernetes set it for a Service called specinfer: set enableServiceLinks: false in the pod"
            _print_error(message.rstrip(".") + hint)
        except (UsageError, ModelError, RequestError, NativeCodeError) as error:
            _print_error(str(error), debug=debug)
        except Exception as error:
            hint = "" if debug else " (--debug shows where)"
            what = f"{type(error).__name__}: {error}{hint}"
            # What was too long for the buffer is no longer in it: only another line shows that no text can be written.
            if isinstance(error, OSError) and _drop_unwritten("\n" if error.errno == errno.ENOSPC else ""):
                what = f"standard output cannot be written: {file_error(error)}"
            _print_error(what, debug=debug)
            code = 1
        _drop_unwritten()
        sys.exit(code)

    def _without_vllm_flags(self, words: list[str]) -> list[str]:
        """Return the words without flags of vLLM that have no effect, for a command that has vLLM's other flags."""
        command = self.commands.get(words[0]) if words else None
        options = getattr(command, "params", ())
        known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        return without_vllm_flags(words, known) if "--max-model-len" in known else words


def _print_error(message: str, *, debug: bool = False) -> None:
    if debug:
        traceback.print_exc()
    print(f"specinfer: error: {' '.join(message.split())}", file=sys.stderr)


def _of_vllm(error: Any) -> str | None:
    """Return what becomes of an unknown flag that vLLM has, or None for other errors."""
    flag = getattr(error, "option_name", "")
    entry = ENGINE.get(flag.removeprefix("--no-").removeprefix("--").replace("-", "_"))
    return f"{flag} is a flag of vLLM; leave it out: {entry.about}" if entry and flag.startswith("--") else None


def _of_prompt(error: Any) -> str | None:
    """Return which command takes a prompt, if one was given to a command that reads it elsewhere, or None."""
    command = getattr(getattr(error, "ctx", None), "info_name", None)
    alternative = {"chat": "run", "complete": "generate"}.get(command or "")
    if alternative is None or "unexpected extra argument" not in error.format_message():
        return None
    return f"{command} takes no prompt as an argument; use specinfer {alternative} MODEL PROMPT, or --quick PROMPT"


def _type_error(error: Any) -> str | None:
    """Return the message for a value of the wrong type, with its name as it was given, or None for other errors."""
    kinds = {"int_parsing": "an integer", "float_parsing": "a number", "bool_parsing": "true or false"}
    for details in getattr(error.__cause__, "errors", list)():  # of Pydantic, which Typer converts values with
        if (kind := kinds.get(details["type"])) and (name := name_of(error.param.name, error.ctx)):
            return f"{name} must be {kind}, not {details['input']!r:.60}"
    return None


def _drop_unwritten(more: str = "") -> bool:
    """Discard text that cannot be written, with `more` after it, and return whether there was some.

    It would raise again, with a traceback, at interpreter exit.
    """
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def add_command(
    group: typer.Typer, function: Callable[..., None], *, called: str | None = None, environment: bool = False
) -> None:
    """Add a function as the command of its name, with the flags of its options.

    Args:
        called: Name of the command, if it is not that of the function.
        environment: Whether environment variables such as SPECINFER_PORT set flags that are not given.
    """
    parameters: list[inspect.Parameter] = []
    options: dict[str, Any] = {}  # annotations by parameter name
    wanted: list[str] = []  # parameters that get the context
    for parameter in inspect.signature(function).parameters.values():
        flags = flags_of(parameter.annotation)
        if flags is not None:
            options[parameter.name] = parameter.annotation
            parameters += [with_variable(each) if environment else each for each in flags]
        elif parameter.annotation is typer.Context:
            wanted.append(parameter.name)
        else:
            parameters.append(parameter)
    old = old_flags({parameter.name for parameter in parameters})
    parameters += [with_variable(each) if environment else each for each in old]
    parameters.append(
        inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    )  # a flag may be named context

    def run(typer_context: typer.Context, **values: Any) -> None:
        try:
            with checking():
                flags = Given(typer_context, values)
                made = {name: flags.read(kind) for name, kind in options.items()}
            others = flags.others(list(options.values()))
            function(**others, **made, **dict.fromkeys(wanted, typer_context))
        except (UsageError, ModelError, RequestError, NativeCodeError) as error:
            raise UsageError(as_typed(str(error), typer_context)) from error

    run.__doc__ = function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    group.command(called or function.__name__.replace("_", "-"), cls=Command)(run)
