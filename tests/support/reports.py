"""Reports of measurements as they are printed and written."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from specinfer.reporting.report import Report


def shown(report: Report[Any], width: int = 160) -> str:
    """Return what a report prints."""
    text = io.StringIO()
    report.print(Console(file=text, width=width))
    return text.getvalue()


def written(report: Report[Any], file: Path) -> dict[str, Any]:
    """Return the JSON of a report, which is what its file holds."""
    numbers: dict[str, Any] = json.loads(file.read_text())
    assert numbers == json.loads(json.dumps(report.as_dict()))
    return numbers
