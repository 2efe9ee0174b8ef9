"""Grammars: masks after paths, ends, what is refused, and output that keeps to them with and without guesses."""

import dataclasses
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from specinfer import LLM, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from specinfer.core.grammar import compiler, matcher
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.grammar.lark import MAX_CHARACTERS
from specinfer.core.grammar.limits import MaskCredit, MaskTime
from specinfer.core.grammar.state import Grammar
from specinfer.core.request import FinishReason
from specinfer.core.text import TextBuffer
from specinfer.demo.pair import demo_folders
from specinfer.drafters.remote import request_proxy
from specinfer.inputs.jobs import JobReader
from specinfer.inputs.prompts import PromptReader
from specinfer.model.definition import load_tokenizer
from tiny import EOS, VOCAB, make_request, make_tokenizer, save_model

PADDED = VOCAB + 4
TOKENIZER = make_tokenizer()
THE, A, D = TOKENIZER.encode("the")[0], TOKENIZER.encode("a")[0], TOKENIZER.encode("d")[0]
EVERY = list(range(PADDED))
LARK = 'start: item (", " item)*\nitem: "the" | "a" item | WORD\nWORD: /[o-t]{2,3}/\n'
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "(the)+"},
    {"regex": "(the|a[n-t]*){2,4}"},
    {"regex": ".*"},
    {"regex": "[a-c \u00e9\u20ac]{1,9}"},
    {"choice": ["the cat", "the", "than it is", "\u20ac, ok"]},
    {"grammar": LARK},
    {"grammar": 'start: start "a" | "the"'},
]


def _compile(eos: Sequence[int] = (EOS,), *, ignore_eos: bool = False, **asked: Any) -> Grammar:
    return GrammarCompiler(TOKENIZER, PADDED, eos).compile(StructuredOutputsParams(**asked), ignore_eos=ignore_eos)


def _legal(grammar: Grammar, *path: int) -> list[int]:
    mask = grammar.mask(path)
    assert mask.shape == (PADDED,)
    return mask.nonzero().flatten().tolist()


def _say(grammar: Grammar, text: str) -> Grammar:
    for token in TOKENIZER.encode(text):
        assert token in _legal(grammar), TOKENIZER.decode([token])
        grammar.advance(token)
    return grammar


# ----------------------------------------------------------------------------------------------- masks


def test_masks_by_hand() -> None:
    grammar = _compile(regex="(the){2}")
    assert _legal(grammar) == [THE]
    assert _legal(grammar, THE) == [THE]
    assert _legal(grammar, THE, THE) == [EOS]
    assert _legal(grammar, THE, THE, EOS) == EVERY, "behind the end all is dropped"
    for path in ([A], [THE, EOS], [EOS], [A, THE], [THE, A, THE], [VOCAB + 1], [THE, THE, THE]):
        assert _legal(grammar, *path) == [], path
    assert _legal(grammar) == [THE], "guesses leave no trace"


def test_a_clone_starts_anew_and_goes_its_own_way() -> None:
    first = _say(_compile(regex="the|d"), "the")
    second = first.clone()
    assert (_legal(first), sorted(_legal(second))) == ([EOS], sorted({*_legal(_compile(regex="the|d"))}))
    second.advance(D)
    assert _legal(first) == _legal(second) == [EOS]


@settings(max_examples=25, deadline=None)
@given(
    asked=st.sampled_from(GRAMMARS),
    steps=st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=5), st.integers(0, 30)), max_size=6),
    strays=st.lists(st.integers(0, PADDED - 1), max_size=2),
    eos=st.sampled_from([(), (EOS,), (EOS, D)]),
)
@example(asked=GRAMMARS[1], steps=[([1, 2, 3], 0), ([0, 0], 1)], strays=[A], eos=(EOS,))
def test_masks_of_a_path_are_those_of_an_output(
    asked: dict[str, Any], steps: list[tuple[list[int], int]], strays: list[int], eos: tuple[int, ...]
) -> None:
    """Whatever was looked at before, in whatever order."""
    start = _compile(eos, **asked)
    grammar, said = start.clone(), []

    def fresh(path: Sequence[int]) -> Grammar:
        twin = start.clone()
        for token in (*said, *path):
            twin.advance(token)
        return twin

    for picks, pick in steps:
        if grammar.is_finished:
            break
        path: list[int] = []
        for choice in picks:
            legal = _legal(grammar, *path)
            assert legal == _legal(fresh(path))
            if not legal:
                break
            path.append(legal[choice % len(legal)])
        legal = _legal(grammar)
        for stray in strays:
            if stray not in legal:
                assert _legal(grammar, stray) == _legal(grammar, stray, A) == []
        if not legal:
            break
        said.append(legal[pick % len(legal)])
        grammar.advance(said[-1])
        assert grammar.is_finished == fresh([]).is_finished


# ------------------------------------------------------------------------------------------------ ends


def test_all_end_tokens_are_legal_once_the_text_is_complete() -> None:
    grammar = _compile((EOS, D, 10**6, -1), regex="the(a)?")
    assert not {EOS, D} & {*_legal(grammar)}
    assert {EOS, D} < {*_legal(grammar, THE)}
    grammar.advance(THE)
    assert not grammar.is_finished
    grammar.advance(D)
    assert grammar.is_finished


def test_an_end_token_that_is_plain_text_is_an_end_only() -> None:
    grammar = _compile((D,), regex="d?the")
    assert D not in _legal(grammar)
    assert _legal(grammar, THE) == [D]


@pytest.mark.parametrize(("eos", "ignore_eos"), [((), False), ((EOS,), True)])
def test_without_an_end_token_the_text_ends_where_nothing_can_follow(eos: tuple[int, ...], ignore_eos: bool) -> None:
    grammar = _compile(eos, ignore_eos=ignore_eos, regex="(the){1,2}")
    _say(grammar, "the")
    assert not grammar.is_finished
    assert EOS not in _legal(grammar)
    assert _legal(grammar, THE) == EVERY
    _say(grammar, "the")
    assert grammar.is_finished


def test_after_an_illegal_token_nothing_is_legal() -> None:
    grammar = _compile(regex="(the)+")
    grammar.advance(A)
    assert _legal(grammar) == _legal(grammar, THE) == []
    assert not grammar.is_finished


@pytest.mark.parametrize(
    ("eos", "params", "tokens"),
    [
        ((EOS,), SamplingParams(), [THE, EOS]),
        ((EOS,), SamplingParams(min_tokens=9), [THE, EOS]),  # the grammar leaves nothing else
        ((EOS,), SamplingParams(ignore_eos=True), [THE]),
        ((), SamplingParams(), [THE]),
    ],
)
def test_a_request_ends_with_its_grammar(eos: tuple[int, ...], params: SamplingParams, tokens: list[int]) -> None:
    text = TextBuffer(lambda ids: TOKENIZER.decode(ids, skip_special_tokens=False), ())
    grammar = _compile(eos, ignore_eos=params.ignore_eos, regex="the")
    request = make_request("0", [3], params, eos_token_ids=eos, grammar=grammar, text=text)
    for token in tokens:
        assert not request.is_finished
        request.append(token, None)
    assert request.finish_reason is FinishReason.STOP
    assert text.text == "the"


# --------------------------------------------------------------------------------------------- refusals

# A chain of definitions, each named by the one before: as deep as its text is long.
_CHAINS: dict[str, tuple[str, str, str, str]] = {
    "refs": ("json", '{"$ref":"#/0",', '"%d":{"$ref":"#/%d"},', '"%d":{"type":"string"}}'),
    "items": ("json", '{"$ref":"#/0",', '"%d":{"items":{"$ref":"#/%d"}},', '"%d":{"type":"string"}}'),
    "properties": (
        "json",
        '{"$ref":"#/0",',
        '"%d":{"properties":{"a":{"$ref":"#/%d"}},"required":["a"]},',
        '"%d":{"type":"string"}}',
    ),
    "rules": ("grammar", "start: r0\n", "r%d: r%d\n", 'r%d: "a"'),
    "terminals": ("grammar", "start: R0\n", 'R%d: R%d "b"\n', 'R%d: "a"'),
    "stars": ("grammar", "start: R0\n", 'R%d: (R%d "b")*\n', 'R%d: "a"'),
}


def _chain(name: str) -> dict[str, str]:
    kind, text, link, end = _CHAINS[name]
    number = 0
    while len(text) < MAX_CHARACTERS[kind] - 100:
        text += link % (number, number + 1)
        number += 1
    return {kind: text + end % number}


HARD: list[dict[str, Any]] = [
    {"regex": "("},
    {"regex": "(" * 30000},
    {"regex": "[" * 30000},
    {"regex": "a" * 200_000},
    {"regex": "(?=a)b"},
    {"regex": "((a{1000}){1000}){1000}"},
    {"regex": "[0-9]"},  # the tokenizer has no digits
    {"json": {"type": "nope"}},
    {"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}},
    {"json": {"$ref": "#"}},
    {"json": {"$ref": "http://example.com/schema"}},
    {"json": {"type": "integer", "multipleOf": 1000003}},
    {"json": '{"type":"array","items":' * 300 + "{}" + "}" * 300},
    {"json": {"enum": ["a" * 100] * 2000}},
    {"choice": ["a" * 100] * 2000},
    {"choice": ["0"]},
    {"grammar": "x"},
    {"grammar": "start: nothing"},
    {"grammar": 'start: start "a"'},
    {"grammar": "start: start"},
    {"grammar": "start: " + "(" * 9000},
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("asked", HARD, ids=lambda asked: repr(asked)[:30])
def test_refuses_by_name(asked: dict[str, Any]) -> None:
    (field,) = asked
    with pytest.raises(RequestError, match=f"structured_outputs: {field}: ") as caught:
        _compile(**asked)
    assert len(str(caught.value)) < 500


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "asked",
    [
        *(pytest.param(_chain(name), marks=[pytest.mark.slow] * (name == "stars")) for name in _CHAINS),
        {"grammar": 'start: (("a" "b"){1000} "c"){1000}'},
    ],
    ids=[*_CHAINS, "repetition"],
)
def test_the_deepest_texts_neither_crash_nor_hang(asked: dict[str, str]) -> None:
    try:
        grammar = _compile(**asked)
    except RequestError:
        return
    for _ in range(5):
        if legal := _legal(grammar):
            grammar.advance(legal[-1])


@pytest.mark.parametrize("opening", ['{"items":', '{"anyOf":[', '{"properties":{"a":', '{"properties":{"a":{"items":'])
def test_a_schema_that_is_nested_too_deeply(opening: str) -> None:
    """The message names a depth that can be read."""
    closing = "".join("}" if sign == "{" else "]" for sign in reversed(opening) if sign in "{[")

    def refusal(depth: int) -> str:
        try:
            _compile(json=opening * depth + '{"type":"string"}' + closing * depth)
        except RequestError as error:  # perhaps for the tokens, which have no quotes
            return str(error)
        return ""

    assert "json: nested too deeply; have at most 120 braces and brackets" in refusal(130)
    assert "nested" not in refusal(119 // len(closing))


@pytest.mark.parametrize(
    ("grammar", "option"),
    [
        ('start[temperature=0.0]: "a"', "temperature"),
        ('start: b\n  ?b [ lazy , capture ] : "the"', "capture"),
        ('start: b\nb[capture="x"]: "the"', "capture"),
        ('start: b\nb[stop=/\\/]/, stop_capture="]:"]: /t.*/', "stop_capture"),
        ('start: b "a"\nb[max_tokens=1]: /(the)+/', "max_tokens"),
        ('start: %lark {\n start[temperature=1]: "a"\n}', "temperature"),
        ('start: foo-bar "a"\nfoo-bar[max_tokens=3]: /[a-z ]*/', "max_tokens"),
    ],
)
def test_options_of_a_rule_that_would_not_be_kept_to(grammar: str, option: str) -> None:
    with pytest.raises(
        RequestError, match=f"structured_outputs: grammar: option '{option}' of a rule is ignored or not"
    ):
        _compile(grammar=grammar)


def test_options_of_a_rule_that_are_heeded() -> None:
    assert _legal(_compile(grammar='start: b "a"\nb[lazy]: /(the)+/'), THE) == [A]
    assert THE in _legal(_compile(grammar='start: b "a"\nb: /(the)+/'), THE)
    for text in ('b[suffix="capture"]: /t.*/', 'b: "the" // x[capture]:', 'b: "the" ["[temperature]:"]'):
        assert _legal(_compile(grammar=f"start: b\n{text}"))


@pytest.mark.parametrize("tokens", ["<[*]>", "<[^5]>", f"<[{PADDED - 4}]>", "<[3-400]>", "<[1, *]>", "<[5-]>"])
def test_classes_of_tokens_with_the_end_among_them(tokens: str) -> None:
    """One that was allowed would let the text end before the grammar does."""
    with pytest.raises(RequestError, match=r"grammar: tokens .* may include the end of the text"):
        _compile(grammar=f'start: {tokens} "a"')


def test_classes_of_other_tokens() -> None:
    assert _legal(_compile(grammar=f'start: <[{THE},{A}]> "a"')) == sorted([THE, A])
    assert _legal(_compile(grammar="start: /a|<[*]>/")) == [A], "no such class, but signs of a text"


def test_schemas_that_a_grammar_names() -> None:
    named = {"nothing": {"type": "null"}, "a-1_B": '{"type": "boolean"}'}
    grammar = _compile(grammar='start: "a " (@nothing | @a-1_B)', schemas=named)
    assert _say(grammar.clone(), "a null").is_finished is False
    assert _legal(_say(grammar.clone(), "a true")) == [EOS]
    with pytest.raises(AssertionError):
        _say(grammar.clone(), "a the")


def test_a_grammar_names_constraints_of_any_kind_and_those_name_others() -> None:
    inner = StructuredOutputsParams(grammar='start: "the" @end', schemas={"end": StructuredOutputsParams(regex="a|d")})
    named = {
        "pick": StructuredOutputsParams(choice=["and", "a.d"]),
        "word": StructuredOutputsParams(regex="the/?th?"),
        "end": StructuredOutputsParams(regex="a|d"),
        "rest": inner,
    }
    grammar = _compile(grammar='start: @pick " " @word " " (@rest | @end)', schemas=named)
    for text in ("and thet thea", "and theth d"):
        assert _legal(_say(grammar.clone(), text)) == [EOS]
    for text in ("aad thet a", "and the a", "and thet the"):
        with pytest.raises(AssertionError):
            assert _legal(_say(grammar.clone(), text)) == [EOS]
    asked = StructuredOutputsParams(grammar="start: @rest", schemas=named)
    sent = json.loads(json.dumps(dataclasses.asdict(asked)))
    assert request_proxy._constraint(sent) == asked, "as on a rank without an engine"


def test_two_constraints_of_one_name_are_refused() -> None:
    inner = StructuredOutputsParams(grammar="start: @x", schemas={"x": StructuredOutputsParams(regex="a")})
    with pytest.raises(ValueError, match="schemas has two constraints of the name 'x'"):
        StructuredOutputsParams(grammar="start: @x @y", schemas={"x": {"type": "null"}, "y": inner})


@pytest.mark.parametrize(
    ("grammar", "schemas", "said"),
    [
        ("start: @a @b", {"a": {"type": "null"}, "b": {"type": "nothing"}}, ".b: type: .nothing. is none of"),
        ("start: @a", {"a": {"multipleOf": 99999989}}, ".a: multipleOf: takes too much work: 99999989"),
        ("start: @a", {"a": {"const": "a" * 200_000}}, ".a: 200"),
        ("start: @a", {"b": {}}, ": grammars: cannot be read"),
        (
            "start: @a",
            {"a": StructuredOutputsParams(regex="(", field="tools.a")},
            ".a: cannot be read, mend it: unclosed group",
        ),
        ("start: @a", {"a": StructuredOutputsParams(regex="a" * 200_000, field="tools.a")}, ".a: 200000 characters"),
        (
            "start: @a",
            {"a": StructuredOutputsParams(grammar="start: <[*]>", field="tools.a")},
            ".a: tokens .* may include the end",
        ),
        ("start: @a " + "(" * 30_000, {"a": {"type": "null"}}, ": grammars: cannot be read, .* too deeply nested"),
    ],
)
def test_schemas_that_a_grammar_names_are_refused_by_name(grammar: str, schemas: Any, said: str) -> None:
    with pytest.raises(RequestError, match=f"^tools{said}"):
        _compile(grammar=grammar, schemas=schemas, field="tools")


def test_a_large_multiple_in_a_schema_within_a_grammar() -> None:
    with pytest.raises(RequestError, match="multipleOf 99999989 takes too much work"):
        _compile(grammar='start: %json {"type": "array", "items": {"multipleOf": 99999989}}')
    assert _legal(_compile(grammar='start: "a" | %json {"const": {"a": 1}}')) == [A]


COSTLY = "(.*[aeiou].{6}t)"  # each text that begins otherwise is a state of its own


def _outcome(grammar: Grammar, seed: int, look: Callable[[Grammar, random.Random], None]) -> list[Any]:
    """Tokens said and masks met until nothing is legal, looking ahead before each."""
    source, ahead, met = random.Random(seed), random.Random(seed + 1), list[Any]()
    for _ in range(60):
        look(grammar, ahead)
        legal = _legal(grammar)
        met.append(legal)
        if not legal:
            break
        met.append(source.choice([token for token in legal if token != EOS] or legal))
        grammar.advance(met[-1])
    return met


def _look_ahead(grammar: Grammar, source: random.Random) -> None:
    for _ in range(4):
        path: tuple[int, ...] = ()
        while len(path) < 6 and (legal := [token for token in _legal(grammar, *path) if token != EOS]):
            path = (*path, source.choice(legal))


@pytest.mark.parametrize("max_states", [40, 100, 200, 400])
def test_guesses_and_other_outputs_use_up_no_limit(max_states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a grammar takes too much work for is the same with guesses, after guesses, and after other outputs."""
    monkeypatch.setattr(matcher, "_LIMITS", LLParserLimits(max_lexer_states=max_states, verbose_errors=False))
    shared = GrammarCompiler(TOKENIZER, PADDED, (EOS,))
    try:
        shared.compile(StructuredOutputsParams(regex=COSTLY))
    except RequestError:
        assert max_states < 200
        return
    ends = []
    for seed in range(4):
        alone = _outcome(_compile(regex=COSTLY), seed, lambda *_: None)
        request = shared.compile(StructuredOutputsParams(regex=COSTLY))
        for output in (request.copy(), request.copy(), request):
            assert _outcome(output, seed, _look_ahead) == alone
        ends.append(not alone[-1])
    assert max_states > 200 or any(ends), "some were too much work"


AMBIGUOUS = 'start: s\ns: s s | s s s | "a" | "d" | ""'  # masks take more time with every token


def test_an_output_whose_masks_take_too_long_ends_and_guesses_of_it_end_before() -> None:
    """A grammar that compiles at once must not occupy the engine's thread for seconds."""
    compiler = GrammarCompiler(TOKENIZER, PADDED, (EOS,), has_trials=True)
    try:
        grammar = compiler.compile(StructuredOutputsParams(grammar=AMBIGUOUS))
        begun = time.thread_time()
        while _legal(grammar) and not grammar.is_lost:
            _legal(grammar, *[A] * 8)
            grammar.advance(A)
            assert time.thread_time() - begun < 8
        assert grammar.is_lost
        assert _legal(grammar.clone()), "the next output begins anew"
        simple = _say(compiler.compile(StructuredOutputsParams(regex="(the)+")), "the" * 200)
        assert not simple.is_lost
    finally:
        compiler.close()


def test_outputs_of_one_request_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Mock(side_effect=matcher.make_matcher)
    monkeypatch.setattr(compiler, "make_matcher", make)
    jobs = JobReader(PromptReader(TOKENIZER, PADDED, 64, (EOS,)), None, None, 0)
    params = SamplingParams(n=8, structured_outputs=StructuredOutputsParams(regex="a|the"))
    for _ in range(2):
        requests = jobs.read("a", "a", params, 0).requests
        assert all(request.grammar is not None and THE in _legal(request.grammar) for request in requests)
    assert make.call_count == 3, "once for all requests, and once for each"


def test_all_outputs_of_a_request_share_the_time_of_masks() -> None:
    compiler = GrammarCompiler(TOKENIZER, PADDED, (EOS,), has_trials=True)
    try:
        grammar = compiler.compile(StructuredOutputsParams(grammar=AMBIGUOUS))
        outputs = [grammar.copy() for _ in range(5)]
        begun, num_tokens = time.thread_time(), 0
        while not all(output.is_lost for output in outputs):
            for output in outputs:
                if not output.is_lost:
                    _legal(output)
                    output.advance(A)
                    num_tokens += 1
            assert time.thread_time() - begun < 1.0 + 0.002 * num_tokens
    finally:
        compiler.close()


def test_all_requests_of_a_tenant_share_the_time_that_masks_of_guesses_take() -> None:
    heavy, light = (_compile(regex="(the)+") for _ in range(2))
    heavy.credit = light.credit = MaskCredit()
    assert _legal(light, THE)
    light.advance(THE)
    heavy.credit.add(-10.0)
    assert _legal(light)
    assert not _legal(light, THE), "guesses are illegal, and the output goes on"
    assert heavy.credit.left < -9
    heavy.credit.add(20.0)
    light.advance(THE)
    assert _legal(light, THE)
    assert heavy.credit.left < 1, "nothing is saved up"


def test_first_tokens_are_not_tried_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that fails compiles the grammar twice."""
    made = Mock(side_effect=matcher.make_matcher)
    monkeypatch.setattr(compiler, "make_matcher", made)
    for seconds, num_made in ((60.0, 7), (-1.0, 3)):
        monkeypatch.setattr(compiler, "_PROBE_SECONDS", seconds)
        with pytest.raises(RequestError, match="takes too much work"):
            _compile(regex="[a-c][0-9]")
        assert made.call_count == num_made
        made.reset_mock()


def test_constraints_of_a_program_may_take_any_time() -> None:
    grammar = _compile(grammar=AMBIGUOUS)
    for _ in range(60):
        assert A in _legal(grammar)
        grammar.advance(A)


def test_text_that_only_an_end_token_could_end() -> None:
    assert _legal(_compile(grammar='start: ""')) == [EOS]
    with pytest.raises(RequestError, match="only the empty text"):
        _compile((), grammar='start: ""')


def test_many_choices() -> None:
    letters = "abcdefghij"
    words = [a + b + c + d for a in letters for b in letters for c in letters for d in letters]
    assert _legal(_say(_compile(choice=words), "jade")) == [EOS]


def test_choices_are_no_regular_expressions() -> None:
    grammar = _compile(choice=["a.?", "!\n"])
    assert _legal(_say(grammar, "a.?")) == [EOS]
    assert _legal(_compile(choice=["a.?", "!\n"]), A, A) == []


def test_a_tokenizer_without_a_backend_is_refused() -> None:
    with pytest.raises(RequestError, match="structured_outputs: this model has no fast tokenizer"):
        GrammarCompiler(object(), VOCAB, ())


# ---------------------------------------------------------------------------------------------- outputs


def _pair(plain: LLM, guessing: LLM, prompts: Sequence[str], params: SamplingParams) -> list[RequestOutput]:
    """Outputs with and without guesses, once they are the same."""
    outputs, wanted = guessing.generate(prompts, params), plain.generate(prompts, params)
    for output, twin in zip(outputs, wanted, strict=True):
        assert output.error is None
        for said, expected in zip(output.outputs, twin.outputs, strict=True):
            assert (said.token_ids, said.finish_reason) == (expected.token_ids, expected.finish_reason)
    return outputs


@pytest.fixture(scope="module")
def pair(model_folder: Callable[..., Path]) -> tuple[LLM, LLM]:
    target = model_folder("llama", tokenizer=True, eos_token_id=EOS)
    drafter = model_folder("llama", 0, 0.15, tokenizer=True, eos_token_id=EOS)
    options: dict[str, Any] = {"device": "cpu", "drafters": [str(drafter)]}
    return LLM(target, tree="off", **options), LLM(target, tree="1,1,3,1", **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("asked", GRAMMARS, ids=lambda asked: repr(asked)[:20])
def test_output_keeps_to_its_grammar(pair: tuple[LLM, LLM], asked: dict[str, Any], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24, n=2, seed=3, structured_outputs=asked)
    for output in _pair(*pair, ["the cat", "in it"], params):
        for said in output.outputs:
            grammar = _compile(**asked)
            for token in said.token_ids:
                assert token in _legal(grammar)
                grammar.advance(token)
            if said.finish_reason == "stop" and "regex" in asked:
                assert re.fullmatch(asked["regex"], said.text)
            if said.finish_reason == "stop" and "choice" in asked:
                assert said.text in asked["choice"]


def test_a_tenant_whose_grammars_took_too_long_rests_and_others_do_not(pair: tuple[LLM, LLM]) -> None:
    llm = pair[1]
    params = SamplingParams(temperature=0.0, max_tokens=12, structured_outputs={"regex": "[a-t ]*"})
    alone = _pair(*pair, ["the cat"], params)[0].outputs[0].token_ids
    requests = [llm.jobs.read(name, "the cat", params, 0).requests[0] for name in ("first", "second", "quick")]
    for request, tenant in zip(requests, ("slow", "slow", "quick"), strict=True):
        request.grammar._time = MaskTime(60.0)
        request.tenant = tenant
        llm.engine.add(request)
    slow, second, quick = requests
    assert slow.grammar.credit is second.grammar.credit is not quick.grammar.credit
    slow.grammar.credit.add(-1000.0)
    while not quick.is_finished:
        llm.engine.step()
    assert (slow.num_output, second.num_output) == (0, 0)
    assert llm.engine.step() == []
    assert llm.engine.scheduler.grammar_turns.is_resting
    slow.grammar.credit.add(1001.0)
    while llm.engine.has_work:
        llm.engine.step()
    assert [request.output_ids for request in requests] == [alone] * 3


def test_a_grammar_ends_an_output_that_ignores_end_tokens(pair: tuple[LLM, LLM]) -> None:
    params = SamplingParams(ignore_eos=True, structured_outputs={"choice": ["the cat", "and of it"]}, max_tokens=30)
    for output in _pair(*pair, ["a", "in", "the"], params):
        assert output.outputs[0].text in ("the cat", "and of it")
        assert output.outputs[0].finish_reason == "stop"


def test_with_penalties_bad_words_and_other_requests_of_the_engine(pair: tuple[LLM, LLM]) -> None:
    params = [
        SamplingParams(max_tokens=12, seed=1),
        SamplingParams(max_tokens=12, seed=1, structured_outputs={"regex": "[a-z ]*"}, bad_words=["the", "ab", "e"]),
        SamplingParams(max_tokens=12, seed=1, bad_words=["an", "o", "s t"], frequency_penalty=0.5),
    ]
    plain, guessing = pair
    outputs = guessing.generate(["it is"] * 3, params)
    assert [out.outputs[0].token_ids for out in outputs] == [
        out.outputs[0].token_ids for out in plain.generate(["it is"] * 3, params)
    ]
    assert re.fullmatch("[a-df-z ]*", outputs[1].outputs[0].text)
    assert "ab" not in outputs[1].outputs[0].text


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "sizes": {"type": "array", "items": {"enum": [1, 20]}}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def json_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM]:
    """Random models with the demo pair's tokenizer, which has the signs of JSON."""
    tokenizer = load_tokenizer(demo_folders().target)
    assert tokenizer is not None
    folders = []
    for noise in (0.0, 0.15):
        folder = save_model(
            tmp_path_factory.mktemp("json"), "llama", 0, noise, vocab_size=2056, eos_token_id=tokenizer.eos_token_id
        )
        tokenizer.save_pretrained(folder)
        folders.append(folder)
    options: dict[str, Any] = {"device": "cpu", "drafters": [str(folders[1])]}
    return LLM(folders[0], tree="off", **options), LLM(folders[0], tree="1,1,3,1", **options)


def test_json_that_fits_its_schema(json_pair: tuple[LLM, LLM]) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=200, seed=5, structured_outputs={"json": SCHEMA})
    done = 0
    for output in _pair(*json_pair, ["def", "class a", "x = 1", "import"], params):
        if output.outputs[0].finish_reason == "stop":
            value = json.loads(output.outputs[0].text)
            assert set(value) == {"name", "sizes"}
            assert len(value["name"]) <= 8
            assert set(value["sizes"]) <= {1, 20}
            done += 1
    assert done


def test_any_json_object(json_pair: tuple[LLM, LLM]) -> None:
    asked = StructuredOutputsParams(json_object=True)
    params = SamplingParams(max_tokens=40, seed=5, structured_outputs=asked, logit_bias={})
    for output in _pair(*json_pair, ["def", "class a"], params):
        text = output.outputs[0].text
        assert text.startswith("{")
        if output.outputs[0].finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


def test_refused_without_a_tokenizer(model_folder: Callable[..., Path]) -> None:
    llm = LLM(model_folder("llama"), device="cpu", tree="off")
    for fields in ({"structured_outputs": {"regex": "a"}}, {"bad_words": ["a"]}, {"prediction": "a"}):
        with pytest.raises(RequestError, match=next(iter(fields))):
            llm.generate([[3, 4]], SamplingParams(**fields))
    assert llm.generate([[3, 4]], SamplingParams(prediction=[5, 6], max_tokens=3))[0].error is None


def test_a_refused_grammar_of_a_list_is_named_by_its_index(pair: tuple[LLM, LLM]) -> None:
    fine, bad = SamplingParams(max_tokens=3), SamplingParams(structured_outputs={"regex": "("})
    with pytest.raises(RequestError, match=r"^prompts\[1\]: structured_outputs: regex"):
        pair[1].generate(["the", "the"], [fine, bad])
