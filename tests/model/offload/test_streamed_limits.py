"""What a target that is streamed gets by default: larger chunks of prompts, and capacity for large trees."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer import LLM, SamplingParams
from specinfer.core.config import EngineConfig
from specinfer.engine_args import EngineArgs
from specinfer.model import target as target_module
from specinfer.model.capacity import plan_capacity
from specinfer.model.load import LoadedModel
from specinfer.model.offload import budget as budget_module
from specinfer.model.offload.budget import Budget, PassCapacity
from specinfer.model.offload.streamed_layer import LayerStream
from specinfer.model.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture
def streamed(model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def settle(budget: Budget, stream: LayerStream, cache_bytes: int, *counted: Any) -> PassCapacity:
        capacity = budget_module.settle(budget, stream, cache_bytes, *counted)
        stream.settle(0)  # so small a model would stay
        return capacity

    monkeypatch.setattr(target_module, "settle", settle)
    return lambda **options: LLM(model_folder("llama", num_hidden_layers=5), offload="disk", **options)


def test_known_tokens_of_a_step_by_default() -> None:
    def tokens(**options: Any) -> int:
        return EngineArgs("m", **options).engine_config.max_num_batched_tokens

    assert tokens() == 512
    assert tokens(offload="disk") >= 1024
    assert [tokens(max_num_batched_tokens=7, offload=offload) for offload in (None, "disk", "cpu")] == [7] * 3


@pytest.mark.parametrize(("given", "num_passes"), [(None, 2), (100, 10)])
def test_prompts_of_several_requests_are_read_in_few_passes(
    streamed: Callable[..., LLM], given: int | None, num_passes: int
) -> None:
    """One stream of the weights serves all of them; the second pass computes their second tokens."""
    with streamed(drafters=[], max_num_batched_tokens=given) as llm:
        prompts: list[Any] = [{"prompt_token_ids": [i + 1, *([5] * 199)]} for i in range(4)]
        stream = llm.target.loaded.stream
        before = stream.bytes_read
        llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.engine.metrics.num_steps == num_passes
        # The next pass is read ahead already, up to the capacity of the ring.
        assert num_passes <= (stream.bytes_read - before) / stream.bytes_per_pass < num_passes + 1.01


def test_a_request_alone_may_have_a_large_tree(runner_of: Callable[..., ModelRunner]) -> None:
    whole: LoadedModel = runner_of("llama").loaded
    for loaded, most in ((whole, 64), (replace(whole, stream=object()), 512)):
        for num_seqs in (1, 4, 64):
            _, slots = plan_capacity(EngineConfig(100, num_seqs), loaded, [])
            assert slots == num_seqs * 100 + max(most, 64 * num_seqs)


def test_trees_of_256_nodes_fit(streamed: Callable[..., LLM]) -> None:
    with streamed(drafters=["ngram"], tree="best-first:256:32", max_num_seqs=1, max_model_len=200) as llm:
        assert llm.target.cache.num_slots >= 200 + 256


@given(
    st.integers(2**20, 2**38), st.integers(1, 4096), st.integers(1, 64), st.integers(64, 2**17), st.integers(16, 2**18),
    st.integers(0, 8192),
)  # fmt: skip
def test_guesses_keep_to_what_memory_is_counted_for(
    budget: int, num_known: int, num_requests: int, row: int, vocab_size: int, known_now: int
) -> None:
    capacity = PassCapacity.from_budget(budget, num_known, num_requests, row, vocab_size)
    guesses = capacity.max_guesses(known_now)
    assert 0 <= guesses <= capacity.num_guesses
    assert guesses == 0 or known_now + guesses <= capacity.num_rows
    assert capacity.max_guesses(num_requests) == capacity.num_guesses, "all of them where no prompt is read"
    assert min(512, 256 * num_requests) <= capacity.num_guesses <= 256 * num_requests
    assert 4 * (capacity.num_rows * row + capacity.num_guesses * vocab_size) < capacity.num_bytes


def test_where_prompts_are_read_trees_have_what_these_leave(
    streamed: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "GUESS_SHARE", 0.0)
    monkeypatch.setattr(budget_module, "_LEAST_GUESSES", 50)
    options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 250, "max_num_batched_tokens": 100}
    with streamed(drafters=["ngram"], tree="best-first:256:32", **options) as llm:
        prompts: list[Any] = [{"prompt_token_ids": [3, 4, 5, 6] * (4 + 13 * i)} for i in range(4)]
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        steps = llm.engine.metrics.recent
        assert sum(step.num_generated for step in steps) == 160
        assert any(step.num_rows == 100 and step.num_guessed for step in steps)
        assert max(step.num_rows for step in steps) <= 100
        assert 0 < max(step.num_guessed for step in steps) <= 50


def test_logits_of_prompts_keep_to_what_memory_is_counted_for(
    streamed: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "GUESS_SHARE", 0.0)
    monkeypatch.setattr(budget_module, "_LEAST_GUESSES", 20)
    prompts: list[Any] = [{"prompt_token_ids": [3, 4, 5, 6] * (25 + i)} for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
    found, most = [], 0
    for offload in (False, True):
        options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 200, "max_num_batched_tokens": 100}
        with streamed(drafters=["ngram"], tree="best-first:16", **options) as llm:
            if not offload:
                llm.target.capacity, llm._parts.scheduler._max_num_prompt_logprobs = None, 100
            real = llm.target.forward
            rows: list[int] = []

            def forward(pieces: Any, real: Any = real, rows: list[int] = rows) -> Any:
                logits = real(pieces)
                rows.append(len(logits))
                return logits

            monkeypatch.setattr(llm.target, "forward", forward)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append(
                [(out.outputs[0].token_ids, [set(one or ()) for one in out.prompt_logprobs]) for out in outputs]
            )
            most = max(rows)
    assert found[0] == found[1]
    assert most <= 20 + 4
