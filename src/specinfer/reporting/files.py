"""Files that a measurement writes: checks before the long work begins, JSON, and the options it was run with."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from specinfer.core.errors import file_error
from specinfer.reporting.plots import check_plot

R = TypeVar("R")


class UnwrittenError(ValueError):
    """A file of a finished report that cannot be written; the message names it, and `report` is the report."""

    def __init__(self, message: str, report: Any) -> None:
        super().__init__(message)
        self.report = report


def options_of(config: Any) -> dict[str, object]:
    """Return the fields of a config as values that JSON can hold."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}


def check_files(json: str | Path | None, plot: str | Path | None) -> None:
    """Check that the requested files can be written.

    Raises:
        ValueError: A file cannot be written. The message names it.
    """
    if plot is not None:
        check_plot(plot)
    for name, file in (("json", json), ("plot", plot)):
        if file is None:
            continue
        path = Path(file)
        place = path if path.exists() else path.parent
        if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
            raise ValueError(f"{name}: {path} cannot be written; name a file in a folder that exists and is writable")
        if place != path:
            with naming(name, path), tempfile.TemporaryFile(dir=place) as probe:
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


def write_json(path: str | Path, numbers: Mapping[str, object]) -> None:
    Path(path).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def show(measure: Callable[[], R], print_report: Callable[[R], None]) -> None:
    """Print the report of a measurement, even if a file of it cannot be written."""
    try:
        report = measure()
    except UnwrittenError as error:
        print_report(error.report)
        raise
    print_report(report)
