"""The demo corpus: a split that never moves, and prompts that training never saw."""

import pytest

from demo_pair import vocabulary
from specinfer.demo import corpus


def test_split_is_disjoint_and_small() -> None:
    training, heldout = set(corpus.training_files()), set(corpus.heldout_files())
    assert not training & heldout
    assert 0.005 < len(heldout) / len(training | heldout) < 0.05


def test_split_depends_on_the_path_alone() -> None:
    # Fixed for ever: a change here would let a trained pair meet its own training text.
    assert corpus.is_held_out("asyncio/selector_events.py")
    assert corpus.is_held_out("operator.py")
    assert not corpus.is_held_out("argparse.py")


def test_corpus_leaves_out_tests_tables_and_packages() -> None:
    root = corpus.stdlib_folder()
    names = [path.relative_to(root).as_posix() for path in corpus.training_files()]
    assert names == sorted(names)
    assert "argparse.py" in names
    skipped = ("test/", "encodings/", "site-packages/", "idlelib/idle_test/")
    assert not [name for name in names if name.startswith(skipped)]


def test_prompts_are_whole_lines_of_heldout_files() -> None:
    texts = [corpus.read_text(path) for path in corpus.heldout_files()]
    prompts = corpus.heldout_prompts(20)
    assert prompts == corpus.heldout_prompts(20)
    assert len(set(prompts)) == 20
    for prompt in prompts:
        assert any(f"\n{prompt}" in text for text in texts)
        assert 100 < len(prompt) <= 600


def test_first_prompts_come_from_different_files() -> None:
    texts = [corpus.read_text(path) for path in corpus.heldout_files()]
    sources = {next(i for i, text in enumerate(texts) if prompt in text) for prompt in corpus.heldout_prompts(5)}
    assert len(sources) == 5


def test_a_prompt_may_have_half_of_the_longest_file() -> None:
    longest = max(len(corpus.read_text(path)) for path in corpus.heldout_files())
    (prompt,) = corpus.heldout_prompts(1, num_chars=longest // 2)
    assert 0.95 < len(prompt) / (longest // 2) <= 1.0


def test_more_prompts_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="ask for fewer"):
        corpus.heldout_prompts(3, num_chars=10_000_000)


def test_tokenizer_round_trip() -> None:
    texts = [corpus.read_text(path) for path in corpus.training_files()[:10]]
    tokenizer = vocabulary.train_tokenizer(texts)
    for text in [*texts, "naïve 漢字 \U0001f600\t\r\n\n\n      x\x00  __init__(a_b)", " ", ""]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_indentation_is_one_token() -> None:
    tokenizer = vocabulary.train_tokenizer([corpus.read_text(path) for path in corpus.training_files()[:10]])
    assert "Ċ" + 8 * "Ġ" in tokenizer.encode("if x:\n        return").tokens
