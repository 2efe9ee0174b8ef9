"""Settings in a YAML file, with flags' names as keys. The command line and the environment take precedence."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from specinfer.cli.errors import KEYS, UsageError

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
