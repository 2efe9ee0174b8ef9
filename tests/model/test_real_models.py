"""Two real models, SmolLM2-135M-Instruct and Gemma 3 270M: what random weights cannot show.

The first is skipped where its package is missing; the second, with a window of 512 tokens and a vocabulary of 262,144,
is behind `-m real`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
STORY = (
    "The harbour lay in fog, and the old lighthouse keeper climbed the stairs one by one. He counted them as he had "
    "counted them for thirty years. At the top he lit the lamp, sat down, and listened to the sea. "
)
# Perplexity over that of float32: what rounding costs at most, with room for another machine's sums. Gemma is small,
# and int4 hurts it.
COSTS = {
    "smollm2": {"float32": 1.001, "bfloat16": 1.02, "float16": 1.02, "int8": 1.03, "int4": 1.2},
    "gemma3": {"float32": 1.001, "bfloat16": 1.03, "float16": 1.03, "int8": 1.05, "int4": 2.0},
}
SAMPLED = {
    "smollm2": SamplingParams(temperature=0.8, top_p=0.9, max_tokens=8, seed=3),
    "gemma3": SamplingParams(
        temperature=0.9, top_p=0.9, top_k=200, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
        max_tokens=16, seed=5,
    ),
}  # fmt: skip
VOCABULARIES = {"smollm2": 49_152, "gemma3": 262_144}
MODELS = ["smollm2", pytest.param("gemma3", marks=pytest.mark.real)]


def chats_of(folder: Path) -> list[list[int]]:
    """Return the questions as SmolLM2's template writes them."""
    tokenizer = load_tokenizer(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def long_prompt(folder: Path, num_tokens: int = 640) -> list[int]:
    """Prose that does not repeat itself, longer than a window."""
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    ids: list[int] = load_tokenizer(folder).encode(text[: 8 * num_tokens])
    assert len(ids) >= num_tokens
    return ids[:num_tokens]


class Opened(NamedTuple):
    """A model that is loaded in a precision."""

    name: str
    precision: str
    llm: LLM
    folder: Path
    reference: Any
    layers: str | None  # a drafter

    @property
    def num_tokens(self) -> int:
        """Number of tokens that a test generates."""
        return SAMPLED[self.name].max_tokens or 0

    def prompts(self) -> list[list[int]]:
        if self.name == "smollm2":
            return chats_of(self.folder)
        tokenizer = load_tokenizer(self.folder)
        return [tokenizer.encode(text) for text in ("The capital of France is", STORY)]


QUICK = ("float32", "bfloat16")  # one with weights as numbers, one with the codes of the file
MARKS = {"gemma3": pytest.mark.real} | {
    ("smollm2", precision): pytest.mark.slow for precision in COSTS["smollm2"] if precision not in QUICK
}
PAIRS = [(name, precision) for name, costs in COSTS.items() for precision in costs]
OPENED = [pytest.param(pair, marks=MARKS.get(pair[0]) or MARKS.get(pair) or (), id="-".join(pair)) for pair in PAIRS]


@pytest.fixture(scope="module", params=OPENED)
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    name, precision = request.param
    file, folder, reference = (request.getfixturevalue(f"{name}_{kind}") for kind in ("file", "folder", "reference"))
    layers = str(request.getfixturevalue("smollm2_layers")) if name == "smollm2" else None
    with open_llm(file, precision, [*([layers] if layers else []), "ngram", "suffix"]) as llm:
        yield Opened(name, precision, llm, folder, reference, layers)


def test_guesses_of_all_drafters_and_trees_leave_greedy_text_as_it_is(opened: Opened) -> None:
    """Within the window, and beyond it."""
    llm, prompts = opened.llm, opened.prompts()
    ways: list[tuple[str, ...]] = [(tree,) for tree in TREES]
    if opened.layers is None:
        prompts.append(long_prompt(opened.folder))
    elif opened.precision == "float32":
        # Each tree with all drafters or one: "auto" measures costs for seconds.
        ways = [(TREES[0],), (TREES[1], opened.layers), (TREES[2], "ngram"), (TREES[1], "suffix")]
    else:
        ways = [(TREES[2],)]
    guess(llm, "off")
    plain = greedy(llm, prompts, opened.num_tokens)
    assert all(plain)
    bound = 0.0 if is_exact(llm) else LOSSLESS.get(opened.precision, 0.5 if opened.name == "smollm2" else 1.0)
    for tree, *drafters in ways:
        guess(llm, tree, *drafters)
        assert_same(opened.reference, prompts, greedy(llm, prompts, opened.num_tokens), plain, bound)
    if opened.precision == "float32":
        wanted = reference_greedy(opened.reference, prompts, opened.num_tokens)
        assert_same(opened.reference, prompts, plain, wanted, LOSSLESS[opened.precision])


def test_sampled_text_of_a_seed_is_the_same_with_guesses(opened: Opened) -> None:
    """Also with top-p and penalties over a large vocabulary."""
    prompts: Any = [{"prompt_token_ids": ids} for ids in opened.prompts()]
    texts = []
    for tree, *drafters in (("off",), ("best-first:16",) if opened.layers else ("1,1,1,1", "ngram")):
        guess(opened.llm, tree, *drafters)
        outputs = opened.llm.generate(prompts, SAMPLED[opened.name])
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
    assert all(0 <= token < VOCABULARIES[opened.name] for text in texts[0] for token in text)
    if is_exact(opened.llm):
        assert texts[0] == texts[1]
    else:  # the first token of each comes before any guess
        assert [text[0] for text in texts[0]] == [text[0] for text in texts[1]]


def test_rounding_costs_little_perplexity(opened: Opened) -> None:
    if opened.name == "smollm2":
        texts = [load_tokenizer(opened.folder).encode(TEXT)]
    else:
        texts = [long_prompt(opened.folder, 120), long_prompt(opened.folder)]
    for ids in texts:
        ratio = torch.tensor(surprise_of(opened.llm, ids) - reference_surprise(opened.reference, ids)).exp()
        assert float(ratio) < COSTS[opened.name][opened.precision]


def test_the_chat_template_and_the_end_of_a_turn_are_the_models_own(opened: Opened) -> None:
    if opened.name != "smollm2":
        pytest.skip("a base model has no chat template")
    llm = opened.llm
    guess(llm, "1,1,1,1", "ngram")
    messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
    assert llm.chat_prompt(messages) == chats_of(opened.folder)[0]
    (output,) = llm.chat([messages], SamplingParams(temperature=0.0, max_tokens=24))
    # The best two first tokens are 0.1 apart: rounding of activations decides between them.
    assert opened.precision not in ("float32", "int8") or "Paris" in output.outputs[0].text
    assert "<|im_" not in output.outputs[0].text
    # By its text, <reponame> is an end for llama.cpp, too.
    assert llm.target.loaded.eos_token_ids == (2, 0, 4)


@pytest.mark.real
def test_each_model_drafts_for_the_other(
    gemma3_file: Path, smollm2_file: Path, gemma3_reference: Any, smollm2_reference: Any
) -> None:
    pairs = ((gemma3_file, smollm2_file, gemma3_reference), (smollm2_file, gemma3_file, smollm2_reference))
    for target, drafter, reference in pairs:
        with open_llm(target, "float32", [str(drafter)]) as llm:
            prompts: Any = [llm.tokenizer.encode("The capital of France is the city of")]
            for tree in ("off", "1,1,1,1", "best-first:16"):
                guess(llm, tree)
                assert_same(
                    reference, prompts, greedy(llm, prompts, 16), reference_greedy(reference, prompts, 16), 1e-3
                )
            (output,) = llm.generate({"prompt_token_ids": prompts[0]}, SamplingParams(temperature=0.0, max_tokens=8))
            assert output.metrics.speculative_decoding["num_accepted_draft_tokens"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_llama_cpp(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load_tokenizer(request.getfixturevalue(f"{name}_folder"))
    for text, wanted in llama_cpp_tokens(name):
        assert tokenizer.encode(text) == wanted, text
        assert name != "smollm2" or tokenizer.decode(wanted) == text


@pytest.mark.real  # transformers takes long to read them; test_gguf has the same of small files
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_weights_are_those_that_transformers_reads(name: str, request: pytest.FixtureRequest) -> None:
    file = request.getfixturevalue(f"{name}_file")
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()
    ours = request.getfixturevalue(f"{name}_reference").state_dict()
    assert ours.keys() == theirs.keys()
    assert [key for key, weight in ours.items() if not torch.equal(weight, theirs[key])] == []
