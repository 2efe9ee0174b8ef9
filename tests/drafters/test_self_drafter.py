"""Copies of the target as its drafter: what is accepted, same text, no slot kept, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

import reference
from adapters import save_adapter
from heads import accepted_share, drafter_of, llm_of, texts_of
from specinfer import LLM, LoRARequest, SamplingParams
from specinfer.core.errors import ModelError
from specinfer.core.request import Request
from specinfer.drafters.merge.scoring import Scoring
from specinfer.drafters.self_drafter import SelfDrafter
from specinfer.policy.curves import Curve
from tiny import random_prompts, save_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = random_prompts([5, 40, 1, 17])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text-shared", "gpt_neox", "lfm2", "qwen3_5_text"])
def test_a_copy_of_8_bits_is_accepted_at_nearly_every_level(family: str, tmp_path: Path) -> None:
    with LLM(save_model(tmp_path, family), drafters="self:int8", dtype="float32", tree="1,1,1,1") as llm:
        texts_of(llm, PROMPTS, GREEDY)
        assert accepted_share(llm) > 0.85


def test_a_streamed_target_drafts_with_a_copy_that_stays_in_memory(target: Path, model: Any, tmp_path: Path) -> None:
    with llm_of(target, "self:int4", tree="2,2,1", offload="disk", offload_folder=tmp_path) as llm:
        assert texts_of(llm, PROMPTS, GREEDY) == [reference.greedy(model, prompt, 24) for prompt in PROMPTS]
        drafter = drafter_of(llm, SelfDrafter)
        stream = drafter.runner.loaded.stream
        assert stream is not None
        assert (stream.num_resident, stream.bytes_per_pass) == (stream.num_layers, 0)
        read = stream.bytes_read
        texts_of(llm, PROMPTS, GREEDY)
        assert stream.bytes_read == read


def test_a_streamed_target_without_a_drafter_gets_a_copy_if_it_fits(target: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"drafters": "auto", "dtype": "float32", "offload": "disk", "tree": "2,1"}
    with LLM(target, offload_folder=tmp_path, **options) as llm:
        assert llm.drafter_choice == "self:int4 and suffix: this copy should gain most within the memory budget"
    with LLM(target, **options) as llm:
        assert llm.drafter_choice is not None
        assert llm.drafter_choice.startswith("ngram: ")


def test_a_copy_drafts_with_the_adapter_of_the_request(target: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", target, 3, r=8, lora_alpha=64)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    shares = []
    for options in ({}, {"lora_request": LoRARequest("a", 1, str(adapter))}):
        with llm_of(target, "self:int8", tree="1,1,1", enable_lora=True) as llm:
            texts = llm.generate(prompts, GREEDY, use_tqdm=False, **options)  # type: ignore[arg-type]
            shares.append((accepted_share(llm), texts[0].outputs[0].token_ids))
    (plain, text), (adapted, other) = shares
    assert text != other
    assert adapted > 0.85 < plain


def test_a_copy_takes_no_memory_of_the_cache(target: Path) -> None:
    sizes = []
    for drafter in ("ngram", "self:int8"):
        with llm_of(target, drafter, kv_cache_memory_bytes=500_000) as llm:
            sizes.append(llm.target.cache.num_slots)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("drafters", [("self:int4",), ("self:sparse", "ngram")])
def test_a_copy_reads_no_prompt_so_a_long_one_costs_it_nothing(drafters: tuple[str, ...], target: Path) -> None:
    with llm_of(target, *drafters, tree="auto") as llm:
        policy: Any = llm.engine.policy
        costs = policy._default.costs
        assert costs.read_token == 0.0
        costs.draft_level = Curve([1], [1e-9])  # so that it drafts, and that takes longer than expected
        llm.generate([{"prompt_token_ids": list(range(1, 60))}] * 2, GREEDY, use_tqdm=False)
        assert any(step.num_guessed for step in llm.engine.metrics.recent)
        assert costs.read_token == 0.0


@pytest.mark.parametrize("name", ["self:sparse", "self:int4"])
def test_a_copy_is_scored_once_on_text_that_it_missed(name: str, target: Path, model: Any) -> None:
    """The target's own weights are right about all of its greedy text."""
    prompt = PROMPTS[1]
    with llm_of(target, name, tree="1") as llm:
        drafter = drafter_of(llm, SelfDrafter)
        drafter._scoring = Scoring("shared-noise", drafter.vocabulary)
        request = Request("one", list(prompt), GREEDY, seed=0)
        llm.engine.add(request)
        drafter.replay([request])
        assert drafter.take_losses("one") == ([], []), "the target has not read the prompt"
        while request.num_output < 9:
            llm.engine.step()
        drafter.forget("one")
        drafter.replay([request])
        losses = drafter.take_losses("one")
        assert [len(losses.prompt), len(losses.output)] == [len(prompt) - 1, request.num_output]
        if name == "self:sparse":
            best = [reference.greedy(model, prompt[:end], 1)[0] for end in range(1, len(prompt))]
            assert losses.prompt == [float(b != token) for b, token in zip(best, prompt[1:], strict=True)]
            assert losses.output == [0.0] * request.num_output
        drafter.replay([request])
        assert drafter.take_losses("one") == ([], [])


def test_copies_are_no_candidates_where_states_cannot_be_put_back(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="select: copies of a target that has layers without attention are not scored"):
        LLM(save_model(tmp_path, "lfm2"), drafters=["self:int4", "self:int8"], select="hedge:1", dtype="float32")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quantization": "int4"}, ModelError, "self:int4 is the target itself, which is int4 too"),
        ({"offload": "disk"}, ValueError, "offload_folder: self:int4 is read from a packed copy"),
        ({"adapt_drafters": True}, ValueError, "adapt_drafters: no drafter is a language model"),
        ({"drafters": ["self:int3"]}, ModelError, "self:int3' must be one of self:int8, self:int4"),
    ],
    ids=repr,
)
def test_what_a_copy_cannot_do_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], message: str, target: Path
) -> None:
    with pytest.raises(error, match=message):
        LLM(target, **({"drafters": ["self:int4"], "dtype": "float32"} | options))
