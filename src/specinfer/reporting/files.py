"""Files that a measurement writes: checks before the long work begins, JSON, and the options it was run with."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specinfer.reporting.plots import check_plot


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


def write_json(path: str | Path, numbers: Mapping[str, object]) -> None:
    Path(path).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
