"""The reproduction as a whole: one part after the other, each printed when it is done."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.paper.parts import TABLES, PaperConfig, Part
from benchmarks.paper.speeds import FIGURES
from specinfer.reporting.plots import check_plot, draw_plot

PARTS = (*TABLES, *FIGURES)


def run_paper(config: PaperConfig, console: Console, progress: Console | None = None) -> list[Part]:
    """Measure and print the parts that are asked for, and write their numbers and plots.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it.
        RuntimeError: A request failed, or a tree changed a greedy output in float32.
    """
    if unknown := [name for name in config.parts if name not in PARTS]:
        raise ValueError(f"part: {unknown[0]!r} is not known; use {', '.join(PARTS)}")
    out = None if config.out is None else Path(config.out)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        check_plot(out / "figure.svg")
    done: list[Part] = []
    for name, measure in {**TABLES, **FIGURES}.items():
        if config.parts and name not in config.parts:
            continue
        found = measure(config, progress)
        for part in (found,) if isinstance(found, Part) else found:
            part.print(console)
            done.append(part)
        if out is not None:  # after each part, because the next may take long
            _write(done, out)
    return done


def _write(parts: list[Part], out: Path) -> None:
    numbers: dict[str, Any] = {part.name: part.as_dict() for part in parts}
    (out / "paper.json").write_text(json.dumps(numbers, indent=2) + "\n")
    if parts[-1].panels:
        draw_plot(out / f"{parts[-1].name}.svg", parts[-1].title, parts[-1].panels)
