"""SmolLM2-135M-Instruct, a real chat model: what random weights cannot show. Skipped where its package is missing."""

from collections.abc import Iterator
from pathlib import Path
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

QUESTIONS = ("What is the capital of France?", "Repeat this list, then add one item: apple, pear, plum.")
TEXT = (
    "The sun rose over the harbour, and the fishermen pushed their boats into the water. Most of them had done so for "
    "forty years. They knew where the current ran, which clouds meant rain, and how long a net could stay out before "
    "the catch was spoiled. In the village the bakery opened at six, and by seven the smell of bread had reached the "
    "last house on the hill. Children walked to school in pairs. Nobody was in a hurry, because nothing was far away."
)
# Perplexity over that of float32: what rounding costs at most, with room for another machine's sums.
COSTS = {"float32": 1.001, "bfloat16": 1.02, "float16": 1.02, "int8": 1.03, "int4": 1.2}
NUM_TOKENS = 8


def prompts_of(folder: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


QUICK = ("float32", "bfloat16")  # one with weights as numbers, one with the codes of the file
PRECISIONS = [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in COSTS]


@pytest.fixture(scope="module", params=PRECISIONS)
def llm(request: pytest.FixtureRequest, smollm2_file: Path, smollm2_layers: Path) -> Iterator[tuple[str, LLM]]:
    with open_llm(smollm2_file, request.param, [str(smollm2_layers), "ngram", "suffix"]) as opened:
        yield request.param, opened


def test_guesses_of_all_drafters_and_trees_leave_greedy_text_as_it_is(
    llm: tuple[str, LLM], smollm2_folder: Path, smollm2_layers: Path, smollm2_reference: Any
) -> None:
    precision, opened = llm
    prompts = prompts_of(smollm2_folder)
    guess(opened, "off")
    plain = greedy(opened, prompts, NUM_TOKENS)
    assert all(plain)
    bound = 0.0 if is_exact(opened) else LOSSLESS.get(precision, 0.5)
    # Each tree with all drafters or one: "auto" measures costs for seconds.
    alone = [(TREES[1], str(smollm2_layers)), (TREES[2], "ngram"), (TREES[1], "suffix")]
    for tree, *drafters in [(TREES[0],), *alone] if precision == "float32" else [(TREES[2],)]:
        guess(opened, tree, *drafters)
        assert_same(smollm2_reference, prompts, greedy(opened, prompts, NUM_TOKENS), plain, bound)
    if precision == "float32":
        wanted = reference_greedy(smollm2_reference, prompts, NUM_TOKENS)
        assert_same(smollm2_reference, prompts, plain, wanted, LOSSLESS[precision])


def test_sampled_text_of_a_seed_is_the_same_with_guesses(llm: tuple[str, LLM], smollm2_folder: Path) -> None:
    _, opened = llm
    prompts: Any = [{"prompt_token_ids": ids} for ids in prompts_of(smollm2_folder)]
    params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=NUM_TOKENS, seed=3)
    texts = []
    for tree in ("off", "best-first:16"):
        guess(opened, tree)
        texts.append([list(output.outputs[0].token_ids) for output in opened.generate(prompts, params)])
    if is_exact(opened):
        assert texts[0] == texts[1]
    else:  # the first token of each comes before any guess
        assert [text[0] for text in texts[0]] == [text[0] for text in texts[1]]


def test_rounding_costs_little_perplexity(llm: tuple[str, LLM], smollm2_folder: Path, smollm2_reference: Any) -> None:
    precision, opened = llm
    ids = load_tokenizer(smollm2_folder).encode(TEXT)
    ratio = torch.tensor(surprise_of(opened, ids) - reference_surprise(smollm2_reference, ids)).exp()
    assert float(ratio) < COSTS[precision]


def test_the_chat_template_and_the_end_of_a_turn_are_the_models_own(llm: tuple[str, LLM], smollm2_folder: Path) -> None:
    precision, opened = llm
    guess(opened, "1,1,1,1", "ngram")
    messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
    assert opened.chat_prompt(messages) == prompts_of(smollm2_folder)[0]
    (output,) = opened.chat([messages], SamplingParams(temperature=0.0, max_tokens=24))
    # The best two first tokens are 0.1 apart: rounding of activations decides between them.
    assert precision not in ("float32", "int8") or "Paris" in output.outputs[0].text
    assert "<|im_" not in output.outputs[0].text
    # By its text, <reponame> is an end for llama.cpp, too.
    assert opened.target.loaded.eos_token_ids == (2, 0, 4)


def test_tokens_are_those_of_llama_cpp(smollm2_folder: Path) -> None:
    tokenizer = load_tokenizer(smollm2_folder)
    for text, wanted in llama_cpp_tokens("smollm2"):
        assert tokenizer.encode(text) == wanted, text
        assert tokenizer.decode(wanted) == text


@pytest.mark.real  # transformers takes long to read it; test_gguf has the same of small files
def test_weights_are_those_that_transformers_reads(smollm2_file: Path, smollm2_reference: Any) -> None:
    folder, name = smollm2_file.parent, smollm2_file.name
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).state_dict()
    ours = smollm2_reference.state_dict()
    assert ours.keys() == theirs.keys()
    assert [key for key, weight in ours.items() if not torch.equal(weight, theirs[key])] == []
