"""The least work of a pass: what every pass of a model has to read and compute."""

from collections.abc import Callable

import pytest

from specinfer.model.pass_work import PassWork
from specinfer.model.runner import ModelRunner

HEADS, DIM, BYTES = 4, 8, 4  # of the tiny models in float32; two heads of keys and values


@pytest.mark.parametrize(
    ("family", "attending"), [("llama", 2), ("qwen3_5_text", 1), ("falcon_h1", 2), ("mamba", 0), ("gemma2", 1)]
)
def test_only_layers_with_attention_to_all_tokens_read_those_before(
    family: str, attending: int, runner_of: Callable[..., ModelRunner]
) -> None:
    work = PassWork.from_loaded(runner_of(family).loaded)
    assert work is not None
    assert work.token_bytes == attending * 2 * 2 * DIM * BYTES
    assert work.pair_flops == attending * 2 * HEADS * 2 * DIM
    assert work.weight_bytes > 0
