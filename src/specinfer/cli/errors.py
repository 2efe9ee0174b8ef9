"""Errors of commands, which name settings as the user wrote them: as a flag, a variable or a key of a file."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from specinfer.core.options import settings_of
from specinfer.engine_args import EngineArgs

KEYS = "specinfer.keys"  # in the metadata of a context: keys of the configuration file, by parameter
_FLAG_NAMES = {each.name: about.name for each, about in settings_of(EngineArgs) if about.name} | {"lora_path": "lora"}
_CONSTRAINTS = re.compile(r"\b(json_object|json|regex|choice|grammar)\b(?=[ ,:]|$)")  # of structured_outputs
_SUBJECT = re.compile(r"[a-z][a-z0-9_]*(?=(\[[^]]*\])?:? )|[a-z_]+(, [a-z_]+)+(?=: )")
_ASSIGNMENT = re.compile(r"\b([a-z][a-z0-9_]*)=(\"([^\"]*)\"|True|N\b)")
_LINE = re.compile(r"[^:]*, (line|entry) \d+: ")  # of a file, where fields have these names
_FIELD = re.compile(r"(?<![\w\"'./{-])[a-z]+(_[a-z0-9]+)+(?![\w\"'./=])")


class UsageError(Exception):
    """The command cannot be run as given; the message names the option and the remedy."""


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """Turn a ValueError into a UsageError, while options are read and models loaded; later it would be a bug."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def as_typed(message: str, context: Any) -> str:
    """Return an error message of the library with the names of settings as they were given to this command."""
    if _LINE.match(message):
        return message
    if message.startswith("structured_outputs: "):
        message = message.removeprefix("structured_outputs: ")
        return _CONSTRAINTS.sub(_constraint_flag, message, count=0 if message.startswith("give ") else 1)  # 0: all
    subject = _SUBJECT.match(message)
    fields = [] if subject is None else subject[0].split(", ")
    names = [name_of(field, context) for field in fields]
    beginning = ""
    if subject is not None and any(names):
        beginning = ", ".join(name or field for name, field in zip(names, fields, strict=True))
        message = message[subject.end() :]
        if fields == ["speculative_config"]:
            return beginning + message  # its keys are no flags

    def assigned(match: re.Match[str]) -> str:
        flag = _flag_of(match[1], context)
        return match[0] if flag is None else flag if match[2] == "True" else f"{flag} {match[3] or match[2]}"

    message = _ASSIGNMENT.sub(assigned, message)
    return beginning + _FIELD.sub(lambda match: _flag_of(match[0], context) or match[0], message)


def _constraint_flag(match: re.Match[str]) -> str:
    return "--json-schema" if match[1] == "json" else f"--{match[1].replace('_', '-')}"


def name_of(field: str, context: Any) -> str | None:
    """Return the name of a field where it was given, or its flag."""
    option = _parameter(field, context)
    if option is None:
        return None
    source = context.get_parameter_source(option.name)
    place = "DEFAULT" if source is None else source.name
    if place == "ENVIRONMENT":
        return str(option.envvar)
    if place == "DEFAULT_MAP":
        return str(context.meta.get(KEYS, {}).get(option.name, option.name))
    if place == "DEFAULT" and field == "model":
        return None  # it was given as the argument MODEL, or not at all
    if place == "DEFAULT" and (config := context.params.get("speculative_config")) is not None:
        if field == "drafters":  # its method and model
            return "--speculative-config"
        if f'"{field}"' in config:
            return f"--speculative-config: {field}"
    return next(_words(option, context.obj), max(option.opts, key=len))


def _parameter(field: str, context: Any) -> Any:
    """Return the option of a field, or None; a list may have an option in the singular, or with another dashed name."""
    options = [each for each in context.command.params if each.param_type_name == "option"]
    for name in (_FLAG_NAMES.get(field, field), field.removesuffix("s"), field.removesuffix("_sizes")):
        for option in options:
            if option.name == name or f"--{name.replace('_', '-')}" in option.opts:
                return option
    return None


def _flag_of(field: str, context: Any) -> str | None:
    option = _parameter(field, context)
    return None if option is None else max(option.opts, key=len)


def _words(option: Any, words: Any) -> Iterator[str]:
    """Yield the option's flag as it stands in the words of the command line."""
    for word in words if isinstance(words, list) else ():
        flag = word.partition("=")[0]
        if flag in option.opts or (flag.startswith("--") and flag.replace("_", "-") in option.opts):
            yield flag
