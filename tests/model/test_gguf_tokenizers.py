"""Tokenizers of GGUF files: how text is cut before merges, and which tokens begin and end an output."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from specinfer.model.definition import load_tokenizer
from specinfer.model.folder import find_folder
from specinfer.model.gguf.header import read_header
from specinfer.model.gguf.split_rules import SPLITS
from specinfer.model.gguf.tokenizer import end_token_ids
from tests.model.gguf_files import tokenizer_metadata, write_model

_FACTS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "support" / "llama_cpp_pieces.jsonl").read_text().splitlines()
]
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1


def cutter(rule: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITS[rule]])


def test_pieces_are_those_of_llama_cpp_by_each_rule() -> None:
    """Facts are missing where llama.cpp approximates tokenizer.json: of letters with marks, of capitals, and of spaces
    that are not ASCII.
    """
    texts, rules = _FACTS[0]["texts"], {row["rule"]: row["lengths"] for row in _FACTS[1:]}
    assert {SPLITS[rule] for rule in rules} == set(SPLITS.values())
    for rule, lengths in rules.items():
        cut = cutter(rule)
        for text, wanted in zip(texts, lengths, strict=True):
            if wanted is not None:
                assert [len(piece) for piece, _ in cut.pre_tokenize_str(text)] == wanted, (rule, text)


@pytest.mark.parametrize("run", [" ", "\n", "1", "a ", "\u00b2", "'", "!", "\t \n"])
def test_long_runs_take_no_more_than_their_length_by_any_rule(run: str) -> None:
    for rule in dict(zip(SPLITS.values(), SPLITS, strict=True)).values():
        cut, start = cutter(rule), time.perf_counter()
        cut.pre_tokenize_str("b" + run * (30_000 // len(run)) + "x")
        assert time.perf_counter() - start < 10, rule  # the square takes a minute


@pytest.mark.parametrize("given", [None, "", "default"])
def test_a_file_without_a_rule_is_cut_by_the_default_one_with_a_warning(
    tmp_path: Path, given: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path / "m.gguf", tokenizer__ggml__pre=given)
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(find_folder(tmp_path / "m.gguf"))
    assert "does not name its pre-tokenizer" in caplog.text
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 12345, b")]
    assert pieces == ["a", "\u0120", "123", "45", ",", "\u0120b"]


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_text_is_cut_by_the_rule_of_the_file_not_by_that_of_the_family(tmp_path: Path, arch: str) -> None:
    write_model(tmp_path / "m.gguf", arch, tokenizer__ggml__pre="gpt-2")
    cut = load_tokenizer(find_folder(tmp_path / "m.gguf")).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in cut.pre_tokenize_str("a 12345")] == ["a", "\u012012345"]


@pytest.mark.parametrize(("rule", "composes"), [("qwen2", True), ("qwen35", True), ("llama-bpe", False)])
def test_letters_and_marks_are_one_character_where_they_are_in_the_models_own_tokenizer(
    tmp_path: Path, rule: str, composes: bool
) -> None:
    write_model(tmp_path / "m.gguf", tokenizer__ggml__pre=rule)
    normalizer = load_tokenizer(find_folder(tmp_path / "m.gguf")).backend_tokenizer.normalizer
    found = "e\u0301" if normalizer is None else normalizer.normalize_str("e\u0301")
    assert found == ("\u00e9" if composes else "e\u0301")


def ends_of(path: Path, tokens: dict[str, int], **changes: Any) -> list[str]:
    """Write a file whose vocabulary ends with these tokens, and return the texts of those that end an output."""
    given = tokenizer_metadata()
    texts = given["tokenizer.ggml.tokens"] + list(tokens)
    types = given["tokenizer.ggml.token_type"] + list(tokens.values())
    names = {"tokens": texts, "token_type": types} | changes
    write_model(path, vocab_size=len(texts), **{f"tokenizer__ggml__{name}": value for name, value in names.items()})
    ids = end_token_ids(read_header(path))
    assert ids[0] == 1  # as the file names it
    return [texts[i] for i in ids[1:]]


# As llama.cpp prints them while it loads such files.
@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"], ["<|endoftext|>", "<|return|>", "<|call|>"]),
        (["<|flush|>", "<|end|>", "<|calls|>"], ["<|flush|>", "<|calls|>"]),
        (["<|endoftext|>", "<|end|>", "<|assistant|>"], ["<|endoftext|>", "<|end|>"]),
        (["<|return|>", "<|end|>"], ["<|return|>", "<|end|>"]),
        (["<eos>", "<turn|>", "<|tool_response>"], ["<eos>", "<turn|>", "<|tool_response>"]),
        (["<|im_end|>", "<|file_sep|>", "<|fim_middle|>"], ["<|im_end|>", "<|file_sep|>"]),
    ],
    ids=lambda value: value[0],
)
def test_ends_are_those_of_llama_cpp(tmp_path: Path, tokens: list[str], wanted: list[str]) -> None:
    assert ends_of(tmp_path / "m.gguf", dict.fromkeys(tokens, CONTROL)) == wanted


def test_an_end_that_the_file_does_not_mark_is_a_control_token_unless_it_may_be_text(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tokens = {"<|im_end|>": NORMAL, "[EOT]": NORMAL, "<end_of_turn>": USER_DEFINED}
    assert ends_of(path, tokens) == ["<|im_end|>", "<end_of_turn>"]
    tokenizer = load_tokenizer(find_folder(path))
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    assert {"<|im_end|>", "<end_of_turn>"} <= added
    assert "[EOT]" not in added


def test_a_file_without_types_of_tokens_has_ends(tmp_path: Path) -> None:
    assert ends_of(tmp_path / "m.gguf", {"<|im_end|>": NORMAL}, token_type=None) == ["<|im_end|>"]


def test_ends_of_pieces_that_are_filled_in_are_named_by_the_file(tmp_path: Path) -> None:
    assert ends_of(tmp_path / "m.gguf", {"<next>": CONTROL, "<pad>": CONTROL}, fim_sep_token_id=96) == ["<next>"]


def test_the_id_of_a_token_that_is_not_there_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path / "m.gguf", tokenizer__ggml__padding_token_id=2**32 - 1, tokenizer__ggml__eos_token_id=96)
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(find_folder(tmp_path / "m.gguf"))
    assert "padding_token_id is 4294967295, which is not a token" in caplog.text
    assert "eos_token_id is 96, which is not a token" in caplog.text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (None, None, 0)
