"""Options of the training of a speculation policy. Nothing here needs torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from specinfer.core.config import DType
from specinfer.core.drafter_forms import parse_drafters
from specinfer.core.errors import check_int
from specinfer.core.sampling import MAX_SEED

ARCHITECTURES: dict[str, tuple[int, ...]] = {"linear": (), "1x16": (16,), "2x32": (32, 32), "3x64": (64, 64, 64)}


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Training data and settings of a speculation policy.

    Attributes:
        target: A local folder, a hub name, or "demo".
        drafters: The drafters, as for `LLM`.
        data: Text files, JSON lines of prompts or chats, or folders of them, that prompts are cut from; or "demo" for
            the embedded pair's training text.
        logs: Step logs of a server, used instead of a collection run.
        out: The file to write.
        num_prompts: The number of prompts to collect steps from.
        num_held_out: The number of prompts to evaluate on.
        max_tokens: The number of tokens generated after each prompt.
        temperatures: The temperatures that prompts take in turn; 0 is greedy.
        num_steps: The number of training steps, for each architecture.
        architectures: The names to compare, from `ARCHITECTURES`; the best is written.
        pass_costs: (rows, seconds) of the target that the choices are evaluated for, or None to measure them. With it,
            `level_seconds` is the cost of a model's draft level.
        keep_log: A file for the steps that were collected.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    target: str = "demo"
    drafters: str | tuple[str, ...] = "auto"
    data: tuple[str | Path, ...] = ()
    logs: tuple[str | Path, ...] = ()
    out: str | Path = "speculation-policy.safetensors"
    num_prompts: int = 192
    num_held_out: int = 32
    max_tokens: int = 96
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_steps: int = 2000
    architectures: tuple[str, ...] = tuple(ARCHITECTURES)
    dtype: DType = "auto"
    device: str = "auto"
    seed: int = 0
    pass_costs: tuple[tuple[int, float], ...] | None = None
    level_seconds: float = 1e-3
    keep_log: str | Path | None = None

    def __post_init__(self) -> None:
        limits = {"num_prompts": 4, "num_held_out": 2, "max_tokens": 8, "num_steps": 1}
        for name, least in limits.items():
            check_int(name, getattr(self, name), least)
        check_int("seed", self.seed, 0, MAX_SEED - 1)
        if bool(self.data) == bool(self.logs):
            raise ValueError("data: give files of text to collect steps from, or logs of a server, and not both")
        if not self.temperatures or not all(0 <= temperature <= 100 for temperature in self.temperatures):
            raise ValueError(f"temperatures: {self.temperatures!r} given; give at least one, such as 0 and 1")
        unknown = set(self.architectures) - set(ARCHITECTURES)
        if unknown or not self.architectures:
            raise ValueError(f"architectures must be some of {', '.join(ARCHITECTURES)}, not {self.architectures!r}")
        parse_drafters(self.drafters)
        if self.pass_costs is not None:
            rows = [size for size, _ in self.pass_costs]
            if not rows or rows != sorted(set(rows)) or any(size < 1 or time <= 0 for size, time in self.pass_costs):
                raise ValueError("pass_costs: give (rows, seconds) with rows from 1 on, ascending, and times above 0")
        out = Path(self.out)
        if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
            raise ValueError(f"out: {out} cannot be written; name a file in a folder that exists and is writable")
