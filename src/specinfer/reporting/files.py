"""Files that a measurement writes: checks before the long work begins, JSON, and the options it was run with."""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from specinfer.core.errors import file_error
from specinfer.reporting.plots import check_plot


class UnwrittenError(ValueError):
    """A file of a finished report that cannot be written; the message names it, and `report` is the report."""

    def __init__(self, message: str, report: Any) -> None:
        super().__init__(message)
        self.report = report


def options_of(config: Any) -> dict[str, object]:
    """Return the fields of a config as values that JSON can hold, without those that are not shown, such as keys."""
    shown = {field.name for field in fields(config) if field.repr}
    return {name: json_value(value) for name, value in asdict(config).items() if name in shown}


def json_value(value: object) -> object:
    """Return a value that JSON can hold. Infinity becomes "inf", as in vLLM's files."""
    if isinstance(value, Path) or (isinstance(value, float) and math.isinf(value)):
        return str(value)
    return [json_value(each) for each in value] if isinstance(value, (tuple, list)) else value


def check_files(json: str | Path | None, plot: str | Path | None, markdown: str | Path | None = None) -> None:
    """Check that the requested files can be written.

    Raises:
        ValueError: A file cannot be written. The message names it.
    """
    if plot is not None:
        check_plot(plot)
    for name, file in (("json", json), ("plot", plot), ("markdown", markdown)):
        if file is not None:
            check_file(name, Path(file))


def check_file(option: str, path: Path) -> None:
    """Check that a file can be written.

    Raises:
        ValueError: It cannot. The message names the option.
    """
    with naming(option, path):
        place = path if path.exists() else path.parent
        if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
            raise ValueError(f"{option}: {path} cannot be written; name a file in a folder that exists and is writable")
        if place != path:
            with tempfile.TemporaryFile(dir=place) as probe:
                probe.write(bytes(1 << 12))  # a full disk takes an empty file


@contextlib.contextmanager
def naming(option: str, path: str | Path) -> Iterator[None]:
    """Turn a full disk, and other errors of writing, into a ValueError that names the option and the file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{option}: {path} cannot be written ({file_error(error)}); free some space, or name another place"
        ) from error


class Written(Protocol):
    """A finished measurement, with its numbers and perhaps a plot."""

    def as_dict(self) -> dict[str, Any]: ...
    def draw(self, path: str | Path) -> None: ...
    def as_markdown(self) -> str: ...


def write_files(
    report: Written, json: str | Path | None, plot: str | Path | None, markdown: str | Path | None = None
) -> None:
    """Write the files that were asked for.

    Raises:
        UnwrittenError: A file cannot be written.
    """
    try:
        if json is not None:
            with naming("json", json):
                write_json(json, report.as_dict())
        if plot is not None:
            with naming("plot", plot):
                report.draw(plot)
        if markdown is not None:
            with naming("markdown", markdown):
                Path(markdown).write_text(report.as_markdown(), encoding="utf-8")
    except ValueError as error:
        raise UnwrittenError(str(error), report) from error


def write_json(path: str | Path, numbers: Mapping[str, object]) -> None:
    Path(path).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
