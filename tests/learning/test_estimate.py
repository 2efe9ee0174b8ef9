"""The estimate of how long a tuning run takes."""

import pytest

from specinfer.learning.tune.corpus import Prompts
from specinfer.learning.tune.estimate import as_text, estimate_seconds
from specinfer.learning.tune.options import TuneConfig

PROMPTS = Prompts(training=((1,) * 20,) * 56, held_out=((1,) * 20,) * 8, texts=((1,) * 512,))
CONFIG = TuneConfig(
    target="t", drafters=("layers:1",), data=("d",), out="o", max_tokens=100, epochs=2.0, batch_tokens=64
)


def seconds_of_pass(size: int) -> float:
    return {64: 0.5, 512: 2.56}[size]


def test_collecting_takes_passes_over_a_batch_and_over_what_is_read() -> None:
    # 64 prompts fill one batch: 100 passes of 0.5 s. 1,280 tokens of prompts and 512 of texts are read, 5 ms each.
    # At the end the initial weights and the drafter generate 800 tokens with three trees in two modes, 7 rows each.
    seconds = estimate_seconds(seconds_of_pass, PROMPTS, CONFIG, [0.0], 64)
    assert seconds == pytest.approx(50 + 1792 * 0.005 + 2 * 800 * 6 * 7 * 0.005)


def test_training_takes_three_passes_of_each_drafter_over_the_examples() -> None:
    rest = estimate_seconds(seconds_of_pass, PROMPTS, CONFIG, [0.0], 64)
    one = estimate_seconds(seconds_of_pass, PROMPTS, CONFIG, [0.1], 64) - rest
    assert one == pytest.approx(0.1 * 3 * 2 * (6400 + 1792) * 0.005)
    # The second drafter learns from what the first predicts of all examples.
    rest = estimate_seconds(seconds_of_pass, PROMPTS, CONFIG, [0.0, 0.0], 64)
    two = estimate_seconds(seconds_of_pass, PROMPTS, CONFIG, [0.1, 0.1], 64) - rest
    assert two == pytest.approx(2 * one + 0.1 * (6400 + 1792) * 0.005)
    assert estimate_seconds(seconds_of_pass, PROMPTS, CONFIG, [0.1, 0.1], 64, 2) < rest + two


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (59, "59 s"), (119, "119 s"), (150, "2 min"), (7199, "120 min"), (9000, "2 h")]
)
def test_a_time_has_one_unit(seconds: float, text: str) -> None:
    assert as_text(seconds) == text
