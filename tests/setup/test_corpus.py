"""Making a corpus of files and folders, and a model that drafts from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.core.errors import ModelError
from specinfer.drafters.lookup import corpus as corpus_file
from specinfer.setup import corpus
from specinfer.setup.corpus import CorpusReport, build_corpus, open_corpus
from specinfer.setup.model_names import named_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture
def model(model_folder: Callable[..., Path]) -> Path:
    return model_folder(tokenizer=True)


def _build(paths: list[Path], model: Path, out: Path, max_tokens: int = 10_000) -> CorpusReport:
    return build_corpus(paths, str(model), out, max_tokens, lambda *_: None)


def test_texts_are_found_and_all_else_is_skipped(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_MAX_BYTES", 100)
    files: dict[str, bytes] = {
        "a.txt": b"the station in the rain", "sub/b.py": b"and the lines end", "sub/copy.py": b"and the lines end",
        "image": b"a\0b", "latin": b"caf\xe9", "empty": b" \n", "large": b"a" * 101, ".git/c": b"the hidden one",
        "node_modules/d.js": b"another one", ".hidden": b"the hidden one",
    }  # fmt: skip
    for name, data in files.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "texts/link").symlink_to(tmp_path / "texts/a.txt")
    report = _build([tmp_path / "texts"], model, tmp_path / "out")
    assert (report.num_files, report.num_skipped, report.num_left) == (2, 5, 0)
    alone = _build([tmp_path / "texts/a.txt"], model, tmp_path / "alone")
    assert (alone.num_files, alone.num_skipped) == (1, 0)
    assert _build([tmp_path / "texts"], model, tmp_path / "out", alone.num_tokens).num_left == 1


def test_lists_of_tokens_are_taken_as_they_are(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tokens").write_text("[1, 2, 3]\n[]\n \n[4, 5]\n\n[6, 7, 8]\n\n")
    (tmp_path / "b.txt").write_text("the station in the rain")
    report = _build([tmp_path / "a.tokens"], model, tmp_path / "out", 6)
    assert (report.num_files, report.num_tokens) == (1, 5), "lists beyond the limit are left out"
    assert _build([tmp_path], model, tmp_path / "out").num_files == 2
    tokenizer = named_tokenizer(str(model))
    found = open_corpus(tmp_path / "out", tokenizer, len(tokenizer))
    assert found is not None
    assert found.num_tokens > 8


@pytest.mark.parametrize("line", ["[1, 2", "[1, -1]", "[1000000]", "[1.0]", "[true]", "{}", "[" * 100_000, '["1"]'])
def test_a_line_that_is_no_list_of_tokens_is_named(line: str, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.tokens"
    file.write_text(f"[1, 2]\n{line}\n")
    with pytest.raises(ValueError, match=r"^path: line 2 of .*a\.tokens is no JSON list of token ids from 0 to \d+"):
        _build([file], model, tmp_path / "out")


def test_paths_without_text_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^path: no text in .*empty; name files or folders"):
        _build([tmp_path / "empty"], model, tmp_path / "out")
    with pytest.raises(ValueError, match=r"^path: there is no file or folder '.*nothing'$"):
        _build([tmp_path / "nothing"], model, tmp_path / "out")
    for name, message in (
        ("~nobody-here/a", "'~nobody-here/a' names the home folder of no user; give the full path"),
        ("a" * 300, "there is no file or folder 'aaa"),
        ("", "an empty name; give a name or a path"),
    ):
        with pytest.raises(ValueError, match=f"^path: {message}"):
            build_corpus([name], str(model), tmp_path / "out", 100, lambda *_: None)
    (tmp_path / "text").write_text("the station in the rain")
    with pytest.raises(ValueError, match=r"^max_tokens: each file has more than 1 tokens; raise it, or name shorter"):
        _build([tmp_path / "text"], model, tmp_path / "out", 1)
    with pytest.raises(ModelError, match=r"^model: .*nothing"):
        _build([tmp_path / "text"], tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(ValueError, match=r"^max_tokens must be from 1 to \d+, not 0$"):
        _build([tmp_path], model, tmp_path / "out", 0)
    assert not (tmp_path / "out").exists()


def _answer(llm: LLM, prompt: list[int]) -> list[int]:
    ((output),) = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_a_corpus_that_has_the_answer_drafts_it_and_changes_no_token(model: Path, tmp_path: Path) -> None:
    prompt = [5, 9, 33, 41, 60]
    options: dict[str, Any] = {"device": "cpu", "tree": "best-first:8"}
    with LLM(model, drafters=[], **(options | {"tree": "off"})) as llm:
        wanted, tokenizer = _answer(llm, prompt), llm.tokenizer
    file = tmp_path / "corpus"
    corpus_file.write_corpus(file, [[*prompt, *wanted]], corpus.fingerprint(tokenizer), "model")
    with LLM(model, drafters=["suffix"], suffix_corpus=file, **options) as llm:
        drafts: dict[str, int] = {}
        (output,) = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == wanted
        for metric in llm.get_metrics():
            drafts[metric.name.rpartition("_num_")[2]] = getattr(metric, "value", 0)
    assert drafts["accepted_tokens"] >= len(wanted) // 2


def test_a_corpus_of_another_tokenizer_or_without_the_drafter_is_refused(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "corpus"
    corpus_file.write_corpus(file, [range(9)], "another", "org/another")
    with pytest.raises(
        ValueError, match=r"^suffix_corpus: .* made with the tokenizer of 'org/another', .*corpus build"
    ):
        LLM(model, device="cpu", drafters=["suffix"], suffix_corpus=file)
    with pytest.raises(ValueError, match=r'^suffix_corpus: only "suffix" searches it; name that in drafters'):
        LLM(model, device="cpu", drafters=["ngram"], suffix_corpus=file)
