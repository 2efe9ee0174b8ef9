"""Estimate of how long a run takes, from the measured passes of its target."""

from collections.abc import Callable, Sequence

from specinfer.learning.tune.corpus import Prompts
from specinfer.learning.tune.evaluation import NUM_PROMPTS
from specinfer.learning.tune.options import TuneConfig

_BACKWARD = 3  # a training step takes as long as this many passes: forward, and twice that backward
_CHUNK = 512  # tokens of a pass that reads
_ROWS = 7  # of the target's passes for a token of the final measurement, most of them draft tokens in vain
_ARMS, _MODES = 3, 2  # trees that it compares for each set of drafters, and modes


def estimate_seconds(
    pass_seconds: Callable[[int], float],
    prompts: Prompts,
    config: TuneConfig,
    shares: Sequence[float],
    batch_size: int,
    num_processes: int = 1,
) -> float:
    """Return about how many seconds a run takes, within a factor of two or so.

    Training is taken to compute as fast as the target's passes. Outputs are taken to be as long as allowed.

    Args:
        pass_seconds: The seconds of a pass of the target by its number of tokens.
        shares: Parameters of each drafter to tune, as a share of the target's.
        batch_size: Prompts that the target completes at a time.
    """
    asked = [*prompts.training, *prompts.held_out]
    num_generated = len(asked) * config.max_tokens
    num_read = sum(map(len, asked)) + sum(map(len, prompts.texts))
    reading = pass_seconds(_CHUNK) / _CHUNK
    collecting = num_generated * pass_seconds(batch_size) / batch_size + num_read * reading
    num_examples = num_generated + num_read
    num_trained = max(config.epochs * num_examples, config.batch_tokens)
    # The control trains all drafters but the first once more. Later ones learn from predictions on all examples.
    runs = [*shares, *(shares[1:] if config.control else ())]
    training = sum(runs) * num_trained * _BACKWARD + sum(shares[:-1]) * num_examples
    num_measured = min(len(prompts.held_out), NUM_PROMPTS) * config.max_tokens * _ARMS * _MODES
    measuring = (1 + len(runs)) * num_measured * _ROWS * reading
    return (collecting + training * reading) / num_processes + measuring


def as_text(seconds: float) -> str:
    """Return a time with one unit."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 1):.0f} s"
