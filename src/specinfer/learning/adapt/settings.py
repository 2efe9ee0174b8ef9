"""Settings and statistics of drafters that learn while they are served."""

from dataclasses import dataclass

from specinfer.core.errors import check_float, check_int

MODEL_RATE, HEAD_RATE = 1e-4, 2e-5  # usual learning rates: at the first, heads forget more than they learn


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptationConfig:
    """Settings of the training of drafters.

    Attributes:
        max_tokens: The largest number of tokens in the stored examples, including prompts.
        max_tap_bytes: The largest number of bytes of the target's hidden states in them, which heads are trained on.
        learning_rate: The learning rate of AdamW, or None for `MODEL_RATE` or `HEAD_RATE`.
        slice_seconds: The approximate time of one slice of work, if the drafter is small enough.
        window: The number of tokens in a micro-step, or None for what fits into that time.
        num_passes: The largest number of times each example is trained on, so that the engine rests when there is no
            new traffic.
        steps_between: The number of micro-steps from one evaluation to the next.
        eval_tokens: The number of output tokens in the held-out examples that versions are compared on.
        min_eval_tokens: The number of such tokens needed before versions are compared.
        margin: The hits per token by which a version must be better before it replaces another.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    max_tokens: int = 65_536
    max_tap_bytes: int = 2**28
    learning_rate: float | None = None
    slice_seconds: float = 0.075
    window: int | None = None
    num_passes: int = 4
    steps_between: int = 64
    eval_tokens: int = 4096
    min_eval_tokens: int = 256
    margin: float = 0.01

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_tap_bytes", "num_passes", "steps_between", "eval_tokens", "min_eval_tokens"):
            check_int(name, getattr(self, name), 1)
        if self.window is not None:
            check_int("window", self.window, 2)
        if self.learning_rate is not None:
            check_float("learning_rate", self.learning_rate, 0.0, 1e3, low_open=True)
        for name in ("slice_seconds", "margin"):
            check_float(name, getattr(self, name), 0.0, 1e3, low_open=name != "margin")


@dataclass(slots=True)
class AdaptationStats:
    """Statistics of the adaptation so far.

    Attributes:
        num_evaluations: The number of times the copy was compared with the version in use.
        hit_rate: The probability that a drafted token of the version in use is right, on the newest held-out examples;
            NaN if unknown.
        original_hit_rate: The same for the original drafter.
        loss: The loss of the last micro-step, in nats per token.
    """

    num_micro_steps: int = 0
    num_evaluations: int = 0
    num_swaps: int = 0
    num_rollbacks: int = 0
    num_restarts: int = 0
    hit_rate: float = float("nan")
    original_hit_rate: float = float("nan")
    loss: float = float("nan")
