"""Prompts of every form of data, bad data by name, and a held-out part that nothing is learned from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.learning.tune.corpus import CorpusError, Prompts, read_prompts
from tiny import VOCAB, make_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
TEXT = "the tree is in the sea and the stone is on the ice. "
TOKENIZER = make_tokenizer(TEMPLATE)


def read(*paths: Path, tokenizer: Any = TOKENIZER, **changes: Any) -> Prompts:
    settings = {"count": 40, "num_held_out": 8, "length": 8, "num_texts": 10, "text_length": 16, "most": 60}
    return read_prompts(paths, tokenizer, vocab_size=VOCAB, **(settings | changes))


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(path: Path, records: Sequence[object]) -> Path:
    return written(path, "".join(json.dumps(record) + "\n" for record in records))


def encoded(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def numbered(i: int) -> str:
    return f"the {'abcdefghijklmnopqrstuvwxyz'[i]} tree"


# -------------------------------------------------------------------------------------------- forms


FORMS = {
    "strings": numbered,
    "prompts": lambda i: {"prompt": numbered(i)},
    "texts": lambda i: {"text": numbered(i), "id": i},
    "ids": lambda i: {"prompt_token_ids": list(encoded(numbered(i)))},
    "prompts of ids": lambda i: {"prompt": list(encoded(numbered(i)))},
    "batch file": lambda i: {
        "custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": numbered(i)},
    },
    "trace": lambda i: {
        "type": "request", "request": str(i), "prompt": None, "prompt_token_ids": list(encoded(numbered(i))),
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_json_line_is_one_prompt(tmp_path: Path, form: str) -> None:
    found = read(lines(tmp_path / "a.jsonl", [FORMS[form](i) for i in range(26)]))
    assert {*found.training, *found.held_out} == {encoded(numbered(i)) for i in range(26)}
    assert len(found.training) + len(found.held_out) == 26
    assert not found.texts
    assert not found.num_cut


def test_chats_are_written_by_the_template(tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": numbered(i)}]} for i in range(20)]
    in_bodies = [{"custom_id": "a", "body": chats[0]}]
    found = read(lines(tmp_path / "a.jsonl", [*chats, *in_bodies]))
    wanted = {tuple(TOKENIZER.apply_chat_template(one["messages"], return_dict=False)) for one in chats}
    assert {*found.training, *found.held_out} == wanted


def test_a_trace_has_prompts_in_its_requests_only(tmp_path: Path) -> None:
    records = [{"type": "trace", "version": 1, "model": "m"}, *(FORMS["trace"](i) for i in range(9))]
    records += [{"type": "step", "request": "1"}, {"type": "end", "request": "1"}, {"type": "left_out", "lines": 3}]
    found = read(lines(tmp_path / "a.jsonl", records))
    assert len(found.training) + len(found.held_out) == 9


def test_texts_are_cut_at_evenly_spread_places(tmp_path: Path) -> None:
    text = " ".join(f"the {one}{other}" for one in "abcdefghijklm" for other in "nopqrstuvwxyz")
    found = read(written(tmp_path / "a.txt", text))
    ids = encoded(text)
    assert len(found.training) == 40
    for prompt in (*found.training, *found.held_out):
        assert len(prompt) == 8
        assert any(ids[i : i + 8] == prompt for i in range(len(ids)))
    assert found.texts
    assert all(len(text) == 16 for text in found.texts)


def test_folders_are_read_whole_and_hidden_files_left_out(tmp_path: Path) -> None:
    lines(tmp_path / "data" / "a.jsonl", [numbered(i) for i in range(6)])
    lines(tmp_path / "data" / "deep.ndjson", [{"text": numbered(i)} for i in range(6, 9)])
    written(tmp_path / "data" / ".hidden", b"\xff\x00")
    found = read(tmp_path / "data")
    assert len(found.training) + len(found.held_out) == 9


def test_a_byte_order_mark_and_unusual_ends_of_lines_are_no_damage(tmp_path: Path) -> None:
    strings = [f"{numbered(i)}\u2028the\u0085end" for i in range(9)]
    content = "\ufeff" + "\r\n".join(json.dumps(one, ensure_ascii=False) for one in strings)
    # The tiny vocabulary lacks these characters.
    found = read(written(tmp_path / "a.jsonl", content))
    assert len(found.training) + len(found.held_out) == 9


def test_prompts_longer_than_the_context_keep_their_end_and_are_counted(tmp_path: Path) -> None:
    long = TEXT * 5
    found = read(lines(tmp_path / "a.jsonl", [long, *(numbered(i) for i in range(9))]), most=20)
    assert found.num_cut == 1
    assert encoded(long)[-20:] in {*found.training, *found.held_out}
    assert max(map(len, (*found.training, *found.held_out))) == 20


# ----------------------------------------------------------------------------------------- held out


@settings(max_examples=40)
@given(st.lists(st.integers(0, 12), min_size=4, max_size=40), st.integers(0, 3))
def test_a_copy_is_never_on_both_sides(tmp_path: Path, numbers: list[int], num_texts: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    lines(folder / "a.jsonl", [numbered(i) for i in numbers])
    for i in range(num_texts):
        written(folder / f"{i}.txt", TEXT * 9)
    try:
        found = read(folder)
    except CorpusError:
        assert len(set(numbers)) + num_texts < 5
        return
    assert found.training
    assert found.held_out
    assert not {*found.training} & {*found.held_out}


def test_texts_that_begin_alike_share_no_prompt_with_what_is_held_out(tmp_path: Path) -> None:
    for i in range(30):
        written(tmp_path / "data" / f"{i}.txt", TEXT + numbered(i % 26) * (i + 1))
    found = read(tmp_path / "data")
    assert not {*found.training} & {*found.held_out}


def test_of_one_long_text_the_end_is_held_out(tmp_path: Path) -> None:
    text = " ".join(numbered(i) for i in range(26)) * 3
    found = read(written(tmp_path / "a.txt", text))
    ids = encoded(text)
    ends = {ids[i : i + 8] for i in range(len(ids) * 9 // 10 - 8, len(ids))}
    assert found.held_out
    assert {*found.held_out} <= ends
    assert not {*found.training} & {*found.held_out}


def test_of_few_documents_the_shortest_is_held_out_with_its_copies(tmp_path: Path) -> None:
    names = ["b" * 9, "a" * 5, "c" * 9, "a" * 5, "d" * 9]
    found = read(lines(tmp_path / "a.jsonl", names))
    if encoded("a" * 5) in found.held_out:
        assert encoded("a" * 5) not in found.training
    assert not {*found.training} & {*found.held_out}


def test_two_copies_of_one_text_are_one_text(tmp_path: Path) -> None:
    text = " ".join(numbered(i) for i in range(26)) * 3
    paths = [written(tmp_path / name, text) for name in ("a.txt", "b.txt")]
    found = read(*paths)
    assert not {*found.training} & {*found.held_out}


def test_files_to_measure_on_are_never_learned_from(tmp_path: Path) -> None:
    data = lines(tmp_path / "a.jsonl", [numbered(i) for i in range(20)])
    apart = lines(tmp_path / "b.jsonl", [numbered(i) for i in range(15, 24)])
    found = read(data, held_out_paths=[apart], num_held_out=20)
    assert {*found.held_out} == {encoded(numbered(i)) for i in range(15, 24)}
    assert {*found.training} == {encoded(numbered(i)) for i in range(15)}


def test_stretches_that_are_read_come_from_what_is_learned_from(tmp_path: Path) -> None:
    files = [written(tmp_path / "data" / f"{i}.txt", f"{numbered(i)} " * 20) for i in range(20)]
    found = read(tmp_path / "data", count=100, num_held_out=100, num_texts=100)
    held = {prompt[:4] for prompt in found.held_out}
    of_files = [encoded(f"{numbered(i)} " * 20) for i in range(len(files))]
    for text in found.texts:
        owners = [ids for ids in of_files if any(ids[i : i + len(text)] == text for i in range(len(ids)))]
        assert owners
        assert not any(
            any(ids[i : i + 4] in held for i in range(len(ids))) and ids[:8] in found.held_out for ids in owners
        )


def test_the_digest_differs_for_other_data(tmp_path: Path) -> None:
    first, same, other = (
        read(lines(tmp_path / f"{i}.jsonl", [numbered(j) for j in range(9 + i // 2)])).digest for i in range(3)
    )
    assert first == same != other


# ----------------------------------------------------------------------------------------- bad data


BAD: dict[str, tuple[str, str | bytes, str]] = {
    "empty": ("a.txt", "", "give 0 prompts"),
    "blank": ("a.txt", " \n\n\t", "give 0 prompts"),
    "one line": ("a.txt", "the tree\n", "give more text"),
    "one prompt": ("a.jsonl", '"the tree"\n', "give more text"),
    "copies only": ("a.jsonl", '"the tree"\n' * 50, "give more text"),
    "an image": ("a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", r"a\.png is not UTF-8 text \(byte 0\)"),
    "zero bytes": ("a.bin", b"the\0tree\0" * 100, r"a\.bin is binary"),
    "latin-1": ("a.txt", "the \u00e9 ".encode("latin-1") * 50, "not UTF-8 text"),
    "utf-16": ("a.txt", "the tree".encode("utf-16"), "not UTF-8 text"),
    "broken JSON": ("a.jsonl", '"fine"\n{"prompt": "the', "line 2 is not valid JSON"),
    "deep JSON": ("a.jsonl", "[" * 100_000, "line 1 is not valid JSON"),
    "a number": ("a.jsonl", "17\n", "neither an object nor text"),
    "an empty object": ("a.jsonl", "{}\n", "has none of prompt"),
    "ids too large": ("a.jsonl", '{"prompt_token_ids": [1, 96]}', "ids below 96"),
    "ids that are none": ("a.jsonl", '{"prompt_token_ids": [true, "a"]}', "ids below 96"),
    "no list": ("a.jsonl", '{"prompt_token_ids": 5}', "must be a list of ids"),
    "bad chat": ("a.jsonl", '{"messages": [{"role": 5}]}', "line 1: "),
    "half a character": ("a.jsonl", '"the \\ud83d tree"', "line 1 holds a character"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_data_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    name, content, message = BAD[kind]
    with pytest.raises(CorpusError, match=message) as caught:
        read(written(tmp_path / name, content))
    assert str(caught.value).startswith("data: ")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_missing_or_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no file .*none"):
        read(tmp_path / "none")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CorpusError, match="folder has no files"):
        read(tmp_path / "folder")
    with pytest.raises(CorpusError, match="cannot be read"):
        read(written(tmp_path / "a.txt", TEXT) / "below")


def test_texts_need_a_tokenizer_and_ids_do_not(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no tokenizer; give JSON lines with prompt_token_ids"):
        read(written(tmp_path / "a.txt", TEXT * 9), tokenizer=None)
    found = read(lines(tmp_path / "a.jsonl", [FORMS["ids"](i) for i in range(9)]), tokenizer=None)
    assert len(found.training) + len(found.held_out) == 9
    with pytest.raises(CorpusError, match=r"line 1: .*template"):
        read(lines(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": "a"}]}]), tokenizer=None)
