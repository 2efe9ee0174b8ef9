"""The results of a tuning run, and the callback that receives its progress."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specinfer.learning.examples import TrainingExamples
from specinfer.learning.tune.boosting import Predictions


class StageCallback(Protocol):
    """Receives the name of a stage, what of it is done, its total, and details such as the loss; first with 0 done."""

    def __call__(self, name: str, done: int, total: int, details: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class TunedDrafter:
    """One drafter of a run.

    Attributes:
        name: "start-2", "beside-1", "drafter-2" or "control-2".
        held_out: Its predictions on the held-out examples.
        seconds: Seconds of training; 0 if it was not tuned.
        tokens: The number of tokens trained on, including prompts.
    """

    name: str
    folder: Path | None
    held_out: list[Predictions]
    parameters: int
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    loss: float = math.nan


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a run."""

    target: Path
    folder: Path
    drafters: list[TunedDrafter]
    controls: list[TunedDrafter]
    starts: list[TunedDrafter]
    beside: list[TunedDrafter]
    held_out: TrainingExamples
    num_examples: int
    num_tokens: int  # output tokens of the target that are trained on
    num_left: list[int]  # number of examples that each drafter was trained on
    num_cut: int  # number of prompts longer than the context allows
    collecting_seconds: float

    @property
    def all_drafters(self) -> list[TunedDrafter]:
        return [*self.starts, *self.beside, *self.drafters, *self.controls]
