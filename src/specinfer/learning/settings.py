"""How drafters learn while they are served, and what came of it."""

from dataclasses import dataclass

from specinfer.errors import check_float, check_int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptationConfig:
    """How drafters learn.

    Attributes:
        max_tokens: Of the examples that are kept, prompts included.
        learning_rate: Of AdamW.
        slice_seconds: How long one slice of work takes, about, if the drafter is small enough.
        window: Tokens of a micro-step; None: what can be learned in that time.
        num_passes: How often each example is learned from at most, so that quiet nights are quiet.
        steps_between: Micro-steps from one evaluation to the next.
        exam_tokens: Said by the target in the held-out examples that versions are compared on.
        min_exam_tokens: So many must be there before they are.
        margin: Hits a token that a version must have more before it is used instead of another.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    max_tokens: int = 65_536
    learning_rate: float = 1e-4
    slice_seconds: float = 0.075
    window: int | None = None
    num_passes: int = 4
    steps_between: int = 64
    exam_tokens: int = 4096
    min_exam_tokens: int = 256
    margin: float = 0.01

    def __post_init__(self) -> None:
        for name in ("max_tokens", "num_passes", "steps_between", "exam_tokens", "min_exam_tokens"):
            check_int(name, getattr(self, name), 1)
        if self.window is not None:
            check_int("window", self.window, 2)
        for name in ("learning_rate", "slice_seconds", "margin"):
            check_float(name, getattr(self, name), 0.0, 1e3, low_open=name != "margin")


@dataclass(slots=True)
class AdaptationStats:
    """What came of it so far.

    Attributes:
        num_evaluations: Times that the copy was compared with the version in use.
        hit_rate: Of the version in use on the newest held-out examples: how likely a guess was right; NaN: unknown.
        original_hit_rate: The same of the drafter as it was.
        loss: Of the last micro-step, in nats a token.
    """

    num_micro_steps: int = 0
    num_evaluations: int = 0
    num_swaps: int = 0
    num_rollbacks: int = 0
    num_restarts: int = 0
    hit_rate: float = float("nan")
    original_hit_rate: float = float("nan")
    loss: float = float("nan")
