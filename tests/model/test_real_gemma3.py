"""Gemma 3 270M, a real base model: a window of 512 tokens and a vocabulary of 262,144. Behind `-m real`."""

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from real_models import (
    LOSSLESS,
    TREES,
    assert_same,
    greedy,
    guess,
    is_exact,
    llama_cpp_tokens,
    open_llm,
    reference_greedy,
    reference_surprise,
    surprise_of,
)
from specinfer import LLM, SamplingParams
from specinfer.model.definition import load_tokenizer

pytestmark = pytest.mark.real
STORY = (
    "The harbour lay in fog, and the old lighthouse keeper climbed the stairs one by one. He counted them as he had "
    "counted them for thirty years. At the top he lit the lamp, sat down, and listened to the sea. "
)
# Perplexity over that of float32: what rounding costs at most. The model is small, and int4 hurts it.
COSTS = {"float32": 1.001, "bfloat16": 1.03, "float16": 1.03, "int8": 1.05, "int4": 2.0}
NUM_TOKENS = 16


def prompts_of(folder: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(folder)
    return [tokenizer.encode(text) for text in ("The capital of France is", STORY)]


def long_prompt(folder: Path, num_tokens: int = 640) -> list[int]:
    """Prose that does not repeat itself, longer than a window."""
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    ids: list[int] = load_tokenizer(folder).encode(text[: 8 * num_tokens])
    assert len(ids) >= num_tokens
    return ids[:num_tokens]


@pytest.fixture(scope="module", params=list(COSTS))
def llm(request: pytest.FixtureRequest, gemma3_file: Path) -> Iterator[tuple[str, LLM]]:
    with open_llm(gemma3_file, request.param, ["ngram", "suffix"]) as opened:
        yield request.param, opened


def test_guesses_leave_greedy_text_as_it_is_within_and_beyond_the_window(
    llm: tuple[str, LLM], gemma3_folder: Path, gemma3_reference: Any
) -> None:
    precision, opened = llm
    prompts = [*prompts_of(gemma3_folder), long_prompt(gemma3_folder)]
    guess(opened, "off")
    plain = greedy(opened, prompts, NUM_TOKENS)
    bound = 0.0 if is_exact(opened) else LOSSLESS.get(precision, 1.0)
    for tree in TREES:
        guess(opened, tree)
        assert_same(gemma3_reference, prompts, greedy(opened, prompts, NUM_TOKENS), plain, bound)
    if precision == "float32":
        wanted = reference_greedy(gemma3_reference, prompts, NUM_TOKENS)
        assert_same(gemma3_reference, prompts, plain, wanted, LOSSLESS[precision])


def test_rounding_costs_little_perplexity_beyond_the_window_too(
    llm: tuple[str, LLM], gemma3_folder: Path, gemma3_reference: Any
) -> None:
    precision, opened = llm
    for ids in (long_prompt(gemma3_folder, 120), long_prompt(gemma3_folder)):
        ratio = torch.tensor(surprise_of(opened, ids) - reference_surprise(gemma3_reference, ids)).exp()
        assert float(ratio) < COSTS[precision]


def test_a_large_vocabulary_with_top_p_and_penalties(llm: tuple[str, LLM], gemma3_folder: Path) -> None:
    _, opened = llm
    prompts: Any = [{"prompt_token_ids": ids} for ids in prompts_of(gemma3_folder)]
    params = SamplingParams(
        temperature=0.9, top_p=0.9, top_k=200, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
        max_tokens=NUM_TOKENS, seed=5,
    )  # fmt: skip
    texts = []
    for tree in ("off", "1,1,1,1"):
        guess(opened, tree, "ngram")
        start = perf_counter()
        texts.append([list(output.outputs[0].token_ids) for output in opened.generate(prompts, params)])
        print(f"{tree}: {1000 * (perf_counter() - start) / sum(map(len, texts[-1])):.0f} ms a token")
    assert all(0 <= token < 262_144 for text in texts[0] for token in text)
    if is_exact(opened):
        assert texts[0] == texts[1]
    else:  # the first token of each comes before any guess
        assert [text[0] for text in texts[0]] == [text[0] for text in texts[1]]


def test_each_model_drafts_for_the_other(
    gemma3_file: Path, smollm2_file: Path, gemma3_reference: Any, smollm2_reference: Any
) -> None:
    pairs = ((gemma3_file, smollm2_file, gemma3_reference), (smollm2_file, gemma3_file, smollm2_reference))
    for target, drafter, reference in pairs:
        with open_llm(target, "float32", [str(drafter)]) as opened:
            prompts: Any = [opened.tokenizer.encode("The capital of France is the city of")]
            for tree in ("off", "1,1,1,1", "best-first:16"):
                guess(opened, tree)
                found = greedy(opened, prompts, NUM_TOKENS)
                assert_same(reference, prompts, found, reference_greedy(reference, prompts, NUM_TOKENS), 1e-3)
            (output,) = opened.generate({"prompt_token_ids": prompts[0]}, SamplingParams(temperature=0.0, max_tokens=8))
            assert output.metrics.speculative_decoding["num_accepted_draft_tokens"] > 0


def test_tokens_are_those_of_llama_cpp(gemma3_folder: Path) -> None:
    tokenizer = load_tokenizer(gemma3_folder)
    for text, wanted in llama_cpp_tokens("gemma3"):
        assert tokenizer.encode(text) == wanted, text


def test_weights_are_those_that_transformers_reads(gemma3_file: Path, gemma3_reference: Any) -> None:
    folder, name = gemma3_file.parent, gemma3_file.name
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).state_dict()
    ours = gemma3_reference.state_dict()
    assert ours.keys() == theirs.keys()
    assert [key for key, weight in ours.items() if not torch.equal(weight, theirs[key])] == []
