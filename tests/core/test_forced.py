"""Text that grammars make predictable: what is forced, the branches where few texts may follow, and whitespace."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer import StructuredOutputsParams
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.grammar.forced import MAX_TEXTS, Continuation, Style, continuations
from specinfer.core.grammar.limits import MaskTime
from specinfer.core.grammar.state import Grammar
from specinfer.demo.pair import demo_folders
from specinfer.model.definition import load_tokenizer
from tiny import EOS, VOCAB, make_tokenizer

TOKENIZER = make_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, VOCAB, (EOS,))
JSON_TOKENIZER: Any = load_tokenizer(demo_folders().target)
JSON_END = JSON_TOKENIZER.eos_token_id
JSON = GrammarCompiler(JSON_TOKENIZER, len(JSON_TOKENIZER), (JSON_END,))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["alpha", "beta", "alpine"]},
        "ok": {"type": "boolean"},
        "size": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
    "required": ["name", "kind", "ok", "size"],
}
VALUE = {"name": "Bob", "kind": "alpine", "ok": True, "size": {"x": 31}}


def _after(grammar: Grammar, tokenizer: Any, said: str, prompt: bytes = b"", least: float = 0.1) -> list[Continuation]:
    for token in tokenizer.encode(said, add_special_tokens=False):
        grammar.advance(token)
    assert not grammar.is_lost
    style = Style(prompt)
    style.read(said.encode())
    return continuations(grammar, style, said.encode(), least)


def _texts(found: list[Continuation], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(each.tokens) for each in found]


def _json(said: str, prompt: str = "") -> list[str]:
    grammar = JSON.compile(StructuredOutputsParams(json=SCHEMA))
    return _texts(_after(grammar, JSON_TOKENIZER, said, prompt.encode()), JSON_TOKENIZER)


def test_forced_text_is_split_as_the_tokenizer_splits_it() -> None:
    grammar = COMPILER.compile(StructuredOutputsParams(choice=["the cat is in the hat"]))
    (found,) = _after(grammar, TOKENIZER, "the")
    assert found.tokens == tuple(TOKENIZER.encode(" cat is in the hat"))
    assert all(0.9 < prob < 1 for prob in found.probs[:-1])
    assert found.probs[-1] < found.probs[0], "it might be a part of a longer token"


def test_a_token_that_ended_within_another_is_gone_on_with() -> None:
    """The tokenizer has `the` in one token, and the model has taken a part of it."""
    assert len(TOKENIZER.encode("the")) == 1
    grammar = COMPILER.compile(StructuredOutputsParams(choice=["the hat", "the hate"]))
    (first, *_) = _after(grammar, TOKENIZER, "t")
    assert TOKENIZER.decode(first.tokens).startswith("he hat")


def test_few_texts_are_branches_and_many_are_none() -> None:
    few = COMPILER.compile(StructuredOutputsParams(choice=["the cat", "and it", "in"]))
    assert sorted(_texts(_after(few, TOKENIZER, ""), TOKENIZER)) == ["and it", "in", "the cat"]
    many = COMPILER.compile(StructuredOutputsParams(regex="[a-z ]*"))
    assert _after(many, TOKENIZER, "a") == []
    assert _after(few, TOKENIZER, "in") == [], "nothing but the end may follow"


def test_an_unlikely_branch_is_not_followed() -> None:
    few = COMPILER.compile(StructuredOutputsParams(choice=["the cat", "and it", "in"]))
    assert _after(few, TOKENIZER, "", least=0.5) == []


def test_keys_follow_with_the_whitespace_of_the_output() -> None:
    assert _json('{"name": "Bob",') == [' "kind": "beta", "ok":'] or _json('{"name": "Bob",')[0].startswith(
        ' "kind": "'
    )
    assert _json('{\n    "name": "Bob",\n')[0].startswith('    "kind": "')
    assert _json('{"name":"Bob",')[0].startswith('"kind":"')
    assert _json('{\n  "name": "Bob",\n  "kind": "alpine",\n  "ok": true,\n  "size": {')[0].startswith('\n    "x": ')
    assert _json('{"name": "Bob", "kind": "alpine", "ok": true, "size": {"x": 31\n')[0].strip() in ("}", "}}")


def test_keys_follow_with_the_whitespace_of_the_prompt_at_first() -> None:
    starts = _json(""), _json("", 'as in {\n  "a": 1,\n  "b": 2\n}'), _json("", 'as in {"a":1,"b":2}')
    assert {text[:9].replace("\n    ", "\n  ")[:5] for text in starts[0]} >= {'{"nam', '{\n  "'}, "both are tried"
    assert starts[1][0].startswith('{\n  "name"')
    assert starts[2][0].startswith('{"name":"')


def test_special_tokens_are_tokens_of_their_own() -> None:
    tokenizer: Any = load_tokenizer(demo_folders().target)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    call, names = tokenizer.convert_tokens_to_ids("<call>"), ["get_size", "get_name"]
    compiler = GrammarCompiler(tokenizer, len(tokenizer), (JSON_END,))
    asked = f'start: "def" WS? <[{call}]> WS? ("{names[0]}" | "{names[1]}") "()" <[{call}]>\nWS: /[ \\n]/'
    found = _after(compiler.compile(StructuredOutputsParams(grammar=asked)), tokenizer, "def", b"", 0.1)
    texts = [tokenizer.decode(each.tokens, skip_special_tokens=False) for each in found]
    assert {text.replace("\n", "").replace(" ", "") for text in texts} >= {f"<call>{name}()<call>" for name in names}


@pytest.mark.parametrize("indent", [None, 2, 4])
def test_most_of_an_object_is_predicted_and_all_of_it_is_legal(indent: int | None) -> None:
    grammar = JSON.compile(StructuredOutputsParams(json=SCHEMA))
    ids, place, num_passes = JSON_TOKENIZER.encode(json.dumps(VALUE, indent=indent), add_special_tokens=False), 0, 0
    while place < len(ids):
        assert grammar.text is not None
        before = grammar.text.bytes_of(ids[:place])
        style = Style(b"")
        style.read(before)
        found = continuations(grammar, style, before, 0.2)
        hits = [sum(1 for _ in _agreed(each.tokens, ids[place:])) for each in found]
        for token in ids[place : place + max(hits, default=0) + 1]:
            grammar.advance(token)
        place += max(hits, default=0) + 1
        num_passes += 1
    assert not grammar.is_lost
    assert num_passes < 0.6 * len(ids)


def _agreed(some: Any, others: Any) -> Any:
    for one, other in zip(some, others, strict=False):
        if one != other:
            return
        yield one


GRAMMARS: list[dict[str, Any]] = [
    {"regex": "(the|a[n-t]*){2,4}"},
    {"choice": ["the cat", "the", "than it is", "and  so", "€, ok"]},
    {"grammar": 'start: item (", " item)*\nitem: "the" | "a" item | WORD\nWORD: /[o-t]{2,3}/\n'},
]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(GRAMMARS), st.integers(0, 10**6), st.integers(0, 6))
def test_all_that_is_proposed_is_legal(asked: dict[str, Any], seed: int, num_said: int) -> None:
    grammar, source = COMPILER.compile(StructuredOutputsParams(**asked)), random.Random(seed)
    for _ in range(num_said):
        legal = grammar.mask(()).nonzero().flatten().tolist()
        if grammar.is_finished or EOS in legal:
            break
        grammar.advance(source.choice(legal))
    found = continuations(grammar, Style(b""), b"", 0.05)
    assert len(found) <= MAX_TEXTS
    for each in found:
        assert len(each.tokens) == len(each.probs)
        assert all(0 < prob <= 1 for prob in each.probs)
        for length, token in enumerate(each.tokens):
            assert grammar.mask(each.tokens[:length])[token]


def test_an_output_that_has_spent_its_time_gets_nothing() -> None:
    grammar = COMPILER.compile(StructuredOutputsParams(choice=["the cat"]))
    grammar._time = MaskTime(0.0)
    grammar._time.guesses = 1.0
    assert grammar.forced_bytes(()) == b""
    assert continuations(grammar, Style(b""), b"") == []


def test_text_that_is_forced_without_end_is_cut() -> None:
    grammar = COMPILER.compile(StructuredOutputsParams(regex="a{3000}"))
    (found,) = continuations(grammar, Style(b""), b"")
    assert len(found.tokens) <= 160


def test_what_is_legal_on_the_way_of_forced_text_is_not_computed() -> None:
    choices = StructuredOutputsParams(choice=["the cat is in the hat", "the cat is in the end"])
    grammar, path = COMPILER.compile(choices), TOKENIZER.encode("the cat is in the")
    ahead = grammar.bits_ahead(path)
    assert list(grammar._bits) == [tuple(path)]
    assert ahead.any()
    assert (ahead == COMPILER.compile(choices).bits(path)).all()
    assert not grammar.bits_ahead([*TOKENIZER.encode("the"), EOS]).any()
