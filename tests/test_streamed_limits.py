"""What a target that is streamed gets by default: larger chunks of prompts, and room for large trees."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer import llm as llm_module
from specinfer.config import EngineConfig, batched_tokens
from specinfer.model.capacity import plan_capacity
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture
def streamed(model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    monkeypatch.setattr(
        llm_module, "settle", lambda _budget, stream, *_: stream.settle(0)
    )  # so small a model would stay
    return lambda **options: LLM(model_folder("llama", num_hidden_layers=5), offload="disk", **options)


def test_known_tokens_of_a_step_by_default() -> None:
    assert batched_tokens(None, None) == 512
    assert batched_tokens(None, "disk") >= 1024
    assert [batched_tokens(7, offload) for offload in (None, "disk", "cpu")] == [7] * 3


@pytest.mark.parametrize(("given", "num_passes"), [(None, 2), (100, 10)])
def test_prompts_of_several_requests_are_read_in_few_passes(
    streamed: Callable[..., LLM], given: int | None, num_passes: int
) -> None:
    """One stream of the weights serves all of them; the second pass says their second tokens."""
    with streamed(drafters=[], max_num_batched_tokens=given) as llm:
        prompts: list[Any] = [{"prompt_token_ids": [i + 1, *([5] * 199)]} for i in range(4)]
        stream = llm.target.loaded.stream
        before = stream.bytes_read
        llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.engine.metrics.num_steps == num_passes
        # The next pass is read ahead already, up to what the ring holds.
        assert num_passes <= (stream.bytes_read - before) / stream.bytes_per_pass < num_passes + 1.01


def test_a_request_alone_has_room_for_a_large_tree(runner_of: Callable[..., ModelRunner]) -> None:
    held: LoadedModel = runner_of("llama").loaded
    for loaded, most in ((held, 64), (replace(held, stream=object()), 512)):
        for num_seqs in (1, 4, 64):
            _, slots = plan_capacity(EngineConfig(100, num_seqs), loaded, [])
            assert slots == num_seqs * 100 + max(most, 64 * num_seqs)


def test_trees_of_256_nodes_fit(streamed: Callable[..., LLM]) -> None:
    with streamed(drafters=["ngram"], tree="best-first:256:32", max_num_seqs=1, max_model_len=200) as llm:
        assert llm.target.cache.num_slots >= 200 + 256
