"""Text that was said before: the suffix drafter on a file that is edited twice.

What the target says is given, by a grammar that allows one text only, so the models can be tiny and random.
"""

from pathlib import Path

import pytest

from specinfer import LLM, SamplingParams, StructuredOutputsParams
from specinfer.drafters import GrammarDrafter
from tiny import save_model, save_tokenizer

FILE = """the store of things that are in and out
to enter a thing, say in and its name and the number of it
to take a thing out, say out and its name. the last one in is the first one out.
the store tells what it has, all names in order, and the number of each
it holds no more than a hundred things. when all places are taken, nothing is entered
"""
EDITS = (("a hundred", "ten"), ("say in", "write in"), ("names in order", "names, sorted"))
SECOND_EDITS = (("no more than", "at most"), ("first one out", "first to leave"), ("tells", "shows"))


@pytest.fixture(autouse=True)
def _no_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the grammar propose nothing, since it allows one text only."""
    monkeypatch.setattr(GrammarDrafter, "_continuations", lambda self, request: [])


def edited(text: str, edits: tuple[tuple[str, str], ...]) -> str:
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("drafters", [["suffix"], ["suffix", "ngram"]])
def test_a_file_edited_twice_takes_few_passes(tmp_path: Path, drafters: list[str]) -> None:
    folder = save_tokenizer(save_model(tmp_path, max_position_embeddings=2048))
    first, second = edited(FILE, EDITS), edited(edited(FILE, EDITS), SECOND_EDITS)
    with LLM(folder, drafters=drafters, tree="best-first:24:16") as llm:
        passes = []
        for before, after in ((FILE, first), (first, second)):
            says = SamplingParams(
                temperature=0, max_tokens=None, structured_outputs=StructuredOutputsParams(choice=[after])
            )
            (output,) = llm.generate(before, says, use_tqdm=False)
            assert output.outputs[0].text == after
            passes.append(output.metrics.speculative_decoding["tokens_per_pass"])
    assert min(passes) >= 5, passes


def test_a_salt_keeps_generated_tokens_apart(tmp_path: Path) -> None:
    """Guesses from another salt's text would show that it had been said."""
    folder = save_tokenizer(save_model(tmp_path, max_position_embeddings=2048))
    says = SamplingParams(temperature=0, max_tokens=None, structured_outputs=StructuredOutputsParams(choice=[FILE]))
    with LLM(folder, drafters=["suffix"], tree="best-first:24:16") as llm:
        passes = []
        for salt in ("one", "one", "two"):
            (output,) = llm.generate({"prompt": "?", "cache_salt": salt}, says, use_tqdm=False)
            passes.append(output.metrics.speculative_decoding["tokens_per_pass"])
    assert passes[0] == passes[2], "nothing is known of the other's"
    assert passes[1] > 3 * passes[0]
