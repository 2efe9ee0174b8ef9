"""Flags of commands, made from the settings of dataclasses (`core/options.py`), and the values that they are given.

The command line takes precedence over the environment, and this over a YAML file.

A parameter of a command whose type is such a dataclass stands for a flag of each setting. The type is made of the
values. A type with a method `flags` names its flags itself, and is made of the values that were given.
"""

import copy
import dataclasses
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from specinfer.cli.errors import KEYS, UsageError
from specinfer.core.options import Flag, kinds_of, settings_of
from specinfer.engine_args import EngineArgs

# Flags by their names, with the names that they had.
_OLD_NAMES = {about.name or each.name: about.old_name for each, about in settings_of(EngineArgs) if about.old_name}


def flag_name(each: "Field[Any]", about: Flag) -> str:
    """Return the name of a setting's flag as a parameter, without dashes."""
    return about.name or each.name


def setting_flag(each: "Field[Any]", about: Flag) -> inspect.Parameter:
    """Return the flag of a setting, as the parameter of a command; sizes, paths and objects are text."""
    name, kinds = flag_name(each, about), kinds_of(each)
    default = None if each.default is MISSING else each.default
    kind: Any = each.type
    many = next((one for one in kinds if get_origin(one) in (tuple, Sequence)), None)
    if about.repeats or (many is not None and about.read is None):
        element = str if about.repeats else get_args(many)[0]
        kind, default = list[element] | None, None  # type: ignore[valid-type]
    elif about.is_negated:
        kind, default = bool, False
    elif about.read is not None or str in kinds:
        kind = str | None if default is None else str
    names = [f"--{name.replace('_', '-')}"]
    if kind is bool and default is True:
        names[0] += f"/--no-{names[0][2:]}"
    names += [about.short] if about.short else []
    option = typer.Option(
        *names, help=about.text, rich_help_panel=about.panel, metavar=about.metavar, envvar=about.variable
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def flags_of(annotation: Any) -> list[inspect.Parameter] | None:
    """Return a parameter for each flag of an annotation, or None if it has no settings."""
    kind, *more = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if hasattr(kind, "flags"):
        flags: list[inspect.Parameter] = kind.flags(*more)
        return flags
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return None
    if settings := list(settings_of(kind)):
        return [setting_flag(each, about) for each, about in settings]
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(kind)
    ]


def old_flags(names: set[str]) -> list[inspect.Parameter]:
    """Return hidden flags for the former names of some flags."""
    hidden = Annotated[str | None, typer.Option(hidden=True)]
    return [
        inspect.Parameter(old, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hidden)
        for new, old in _OLD_NAMES.items()
        if new in names
    ]


def with_variable(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the flag with an environment variable that also sets it."""
    kind, option = get_args(parameter.annotation)
    option = copy.copy(option)
    option.envvar = f"SPECINFER_{parameter.name.upper()}"
    return parameter.replace(annotation=Annotated[kind, option])


def source_of(context: typer.Context, name: str) -> str:
    """Return where a flag was given: COMMANDLINE, ENVIRONMENT, DEFAULT_MAP (a file) or DEFAULT."""
    sources = (context.get_parameter_source(each) for each in (name, _OLD_NAMES.get(name, name)))
    return next((source.name for source in sources if source is not None and source.name != "DEFAULT"), "DEFAULT")


def warn_renamed(old: str, new: str) -> None:
    print(f"specinfer: warning: {old} is now {new}; the old name ends with the next release", file=sys.stderr)


class Given:
    """The values of all flags of a call, under the names of today; a former name is reported.

    Raises:
        ValueError: A flag is given by both names.
    """

    def __init__(self, context: typer.Context, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._given = {name for name in values if source_of(context, name) != "DEFAULT"}
        for new, old in _OLD_NAMES.items():
            value = self._values.pop(old, None)
            if value is not None:
                if context.get_parameter_source(new).name != "DEFAULT":  # type: ignore[union-attr]
                    raise ValueError(f"{old}: it is now {new}; give only that")
                warn_renamed(f"--{old.replace('_', '-')}", f"--{new.replace('_', '-')}")
                self._values[new] = value

    def read(self, annotation: Any) -> Any:
        """Return the dataclass of an annotation with the given values.

        Raises:
            ValueError: A value cannot be used; the message names the setting.
        """
        kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
        if settings := () if hasattr(kind, "flags") else list(settings_of(kind)):
            values = {each.name: (about, self._values[flag_name(each, about)]) for each, about in settings}
            return kind(
                **{name: value_of(about, value) for name, (about, value) in values.items() if value is not None}
            )
        names = [flag.name for flag in flags_of(annotation) or ()]
        if hasattr(kind, "flags"):
            return kind({name: self._values[name] for name in names if name in self._given})
        return kind(**{name: self._values[name] for name in names})

    def others(self, annotations: Sequence[Any]) -> dict[str, Any]:
        """Return the values of flags that are in none of the annotations."""
        taken = {flag.name for annotation in annotations for flag in flags_of(annotation) or ()}
        return {name: value for name, value in self._values.items() if name not in taken}


def value_of(about: Flag, value: Any) -> Any:
    """Return the value of a setting, given that of its flag."""
    if about.is_negated:
        return not value
    if about.read is not None:
        return about.read(value)
    return tuple(value) if isinstance(value, list) else value


_OWN = frozenset({"config", "help", "debug"})  # not settings: a file cannot name another file or ask for help


def read_config(context: typer.Context, path: str | None) -> str | None:
    """Use a file's values in place of the defaults; the callback of an eager option.

    Raises:
        UsageError: The file cannot be read, or has a key that is not a flag.
    """
    if path is not None:
        known = {str(option.name) for option in context.command.params} - _OWN
        values, keys = _values(path, known)
        context.default_map = {**(context.default_map or {}), **values}
        context.meta[KEYS] = {name: f"{path}: {key}" for name, key in keys.items()}
    return path


def _values(path: str, known: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values and the keys as they are written, both by parameter."""
    values, keys = {}, {}
    for key, value in _read(path).items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UsageError(
                f"--config: {path}: {key!r:.60} is not a setting; keys are the names of flags, such as max-num-seqs"
            )
        if name in values:
            raise UsageError(f"--config: {path}: {key} is given twice; leave one out")
        if value is not None:
            keys[name] = str(key)
            values[name] = [_word(each) for each in value] if isinstance(value, list) else _word(value)
    return values, keys


def _read(path: str) -> Mapping[Any, Any]:
    try:
        import yaml
    except ImportError as error:
        raise UsageError("--config: PyYAML is not installed; pip install 'specinfer[serve]'") from error
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--config: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config: {path} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise UsageError(f"--config: {path} must hold names and values, such as port: 8000")
    return content


def _word(value: Any) -> str:
    """Return a value as the text of a flag, so that both are checked in the same way."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, (Mapping, list)) else str(value)
