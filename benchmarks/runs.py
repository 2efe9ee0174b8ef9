"""Runs that were measured in a process of their own."""

from typing import Any

from specinfer.bench.results import Run
from specinfer.core.step_record import StepRecord


def read_run(fields: dict[str, Any]) -> Run:
    """Return a run from its fields in JSON."""
    steps = tuple(StepRecord(**step) for step in fields["steps"])
    prompts, outputs = tuple(fields["prompts"]), tuple(map(tuple, fields["outputs"]))
    return Run(**fields | {"prompts": prompts, "outputs": outputs, "steps": steps, "answers": (), "samples": ()})
