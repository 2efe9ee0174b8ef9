"""Text that grammars make predictable: what is forced, the branches where few texts may follow, and whitespace."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer import StructuredOutputsParams
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.grammar.forced import MAX_TEXTS, Continuation, Outlook
from specinfer.core.grammar.limits import MaskTime
from specinfer.core.grammar.state import Grammar
from specinfer.core.grammar.style import Habits, Style
from specinfer.core.grammar.wording import Wording
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
    return Outlook(grammar, style, Wording(b""), said.encode()).continuations(least)


def _texts(found: list[Continuation], tokenizer: Any) -> list[str]:
    """Return texts without the token that ends them."""
    ends = (EOS,) if tokenizer is TOKENIZER else (JSON_END,)
    return [tokenizer.decode([token for token in each.tokens if token not in ends]) for each in found]


def _json(said: str, prompt: str = "") -> list[str]:
    grammar = JSON.compile(StructuredOutputsParams(json=SCHEMA))
    return _texts(_after(grammar, JSON_TOKENIZER, said, prompt.encode()), JSON_TOKENIZER)


def test_forced_text_is_split_as_the_tokenizer_splits_it() -> None:
    grammar = COMPILER.compile(StructuredOutputsParams(choice=["the cat is in the hat"]))
    (found,) = _after(grammar, TOKENIZER, "the")
    assert found.tokens == (*TOKENIZER.encode(" cat is in the hat"), EOS)
    assert all(0.9 < prob < 1 for prob in found.probs)


def test_the_last_token_before_what_is_open_might_be_a_part_of_a_longer_one() -> None:
    (found,) = _after(COMPILER.compile(StructuredOutputsParams(regex="the cat [a-z ]*")), TOKENIZER, "the")
    assert found.probs[-1] < found.probs[0]


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
    (end,) = _after(few, TOKENIZER, "in")
    assert end.tokens == (EOS,), "nothing but the end may follow"


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
    bare = {text.replace("\n", "").replace(" ", "").replace("<|endoftext|>", "") for text in texts}
    assert bare >= {f"<call>{name}()<call>" for name in names}


@pytest.mark.parametrize("indent", [None, 2, 4])
def test_most_of_an_object_is_predicted_and_all_of_it_is_legal(indent: int | None) -> None:
    grammar = JSON.compile(StructuredOutputsParams(json=SCHEMA))
    ids, place, num_passes = JSON_TOKENIZER.encode(json.dumps(VALUE, indent=indent), add_special_tokens=False), 0, 0
    while place < len(ids):
        assert grammar.text is not None
        before = grammar.text.bytes_of(ids[:place])
        style = Style(b"")
        style.read(before)
        found = Outlook(grammar, style, Wording(b""), before).continuations(0.2)
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
    found = Outlook(grammar, Style(b""), Wording(b""), b"").continuations(0.05)
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
    assert Outlook(grammar, Style(b""), Wording(b""), b"").continuations() == []


def test_text_that_is_forced_without_end_is_cut() -> None:
    grammar = COMPILER.compile(StructuredOutputsParams(regex="a{3000}"))
    (found,) = Outlook(grammar, Style(b""), Wording(b""), b"").continuations()
    assert len(found.tokens) <= 160


def test_what_is_legal_on_the_way_of_forced_text_is_not_computed() -> None:
    choices = StructuredOutputsParams(choice=["the cat is in the hat", "the cat is in the end"])
    grammar, path = COMPILER.compile(choices), TOKENIZER.encode("the cat is in the")
    ahead = grammar.bits_ahead(path)
    assert list(grammar._bits) == [tuple(path)]
    assert ahead.any()
    assert (ahead == COMPILER.compile(choices).bits(path)).all()
    assert not grammar.bits_ahead([*TOKENIZER.encode("the"), EOS]).any()


def test_the_end_that_alone_may_follow_is_predicted() -> None:
    grammar = JSON.compile(StructuredOutputsParams(json=SCHEMA))
    (found,) = _after(grammar, JSON_TOKENIZER, json.dumps(VALUE))
    assert found.tokens == (JSON_END,)


def test_no_newline_before_a_colon_is_learned_from_lines_of_a_prompt() -> None:
    lines = '{"a": 1}\n{"a": 2}\n'
    assert _json('{"name": "Bob", "kind', lines)[0].startswith('": "')


def _learned(outputs: list[str]) -> Habits:
    habits = Habits()
    for output in outputs:
        grammar = JSON.compile(StructuredOutputsParams(json=SCHEMA))
        assert grammar.text is not None
        habits.learn(grammar.text, JSON_TOKENIZER.encode(output, add_special_tokens=False), JSON_END)
    return habits


def test_whitespace_is_as_the_outputs_before_had_it() -> None:
    def first(habits: Habits) -> str:
        grammar = JSON.compile(StructuredOutputsParams(json=SCHEMA))
        found = Outlook(grammar, Style(b"", habits), Wording(b""), b"").continuations()
        return str(JSON_TOKENIZER.decode(max(found, key=lambda each: each.probs[0] * each.probs[1]).tokens))

    assert first(_learned([json.dumps(VALUE, indent=2)] * 3)).startswith('{\n  "name"')
    assert first(_learned([json.dumps(VALUE)] * 3)).startswith('{"name"')


def test_what_was_learned_long_ago_weighs_less() -> None:
    habits = _learned([json.dumps(VALUE, indent=2)] * 40 + [json.dumps(VALUE)] * 40)
    ranked = habits.blanks((b"{", b'"'), [(b"", 0.5)])
    assert next(blank for blank, _ in ranked) == b""
    assert sum(prob for _, prob in ranked) <= 1.0


def test_whitespace_behind_special_tokens_is_split_as_it_was_written() -> None:
    tokenizer: Any = load_tokenizer(demo_folders().target)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    call = tokenizer.convert_tokens_to_ids("<call>")
    names = GrammarCompiler(tokenizer, len(tokenizer), (JSON_END,)).compile(StructuredOutputsParams(regex="a")).text
    assert names is not None
    line = names.tokens_of(b"\n")
    habits, joined = Habits(), names.tokens_of(b"\n\n")
    habits.learn(names, [call, *line, *line, *names.tokens_of(b"{")], None)
    assert habits.split(names, (call, *joined), is_behind=False) == (call, *line, *line)
    assert habits.split(names, joined, is_behind=True) == (*line, *line)
    assert habits.split(names, joined, is_behind=False) == joined


def test_values_are_copied_from_the_prompt_and_closed() -> None:
    grammar = JSON.compile(StructuredOutputsParams(json=SCHEMA))
    said = '{"name": "Ad'
    for token in JSON_TOKENIZER.encode(said, add_special_tokens=False):
        grammar.advance(token)
    style = Style(b"")
    style.read(said.encode())
    wording = Wording(b"Write down that Ada Byron, an alpine guide, is ready.")
    (best, *_) = Outlook(grammar, style, wording, said.encode()).continuations()
    assert JSON_TOKENIZER.decode(best.tokens).startswith('a Byron", "kind": "alp')
    assert best.copied[0]
    assert not best.copied[-1], "the rest is the grammar's"
    num_forced = [grammar.num_legal(best.tokens)]
    assert num_forced == [len(best.tokens)]


def test_legal_tokens_of_a_path_are_counted() -> None:
    grammar = COMPILER.compile(StructuredOutputsParams(choice=["the cat is in the hat"]))
    path = TOKENIZER.encode("the cat is in the hat")
    assert grammar.num_legal([*path, EOS]) == len(path) + 1
    assert grammar.num_legal([*path[:2], EOS, *path[2:]]) == 2
    assert grammar.num_legal(path[1:]) == 0
    grammar.advance(path[0])
    assert grammar.num_legal(path[1:]) == len(path) - 1, "after the output"
