"""Drafts from grammars: what is copied is named, habits are learned, and lookups propose nothing that is forbidden."""

import json

import pytest

from specinfer import SamplingParams, StructuredOutputsParams
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.request import FinishReason, Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.demo.pair import demo_folders
from specinfer.drafters.lookup.grammar import COPIED, GrammarDrafter, legal_part
from specinfer.model.definition import load_tokenizer
from tiny import make_request

TOKENIZER = load_tokenizer(demo_folders().target)
END = TOKENIZER.eos_token_id
COMPILER = GrammarCompiler(TOKENIZER, len(TOKENIZER), (END,))
SCHEMA = {
    "type": "object",
    "properties": {"who": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["who", "n"],
}
BUDGET = TreeBudget(24, 24)


def _ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def _request(prompt: str, said: str = "", params: SamplingParams | None = None) -> Request:
    grammar = COMPILER.compile(StructuredOutputsParams(json=SCHEMA))
    request: Request = make_request("r", _ids(prompt), params)
    request.grammar = grammar
    for token in _ids(said):
        request.append(token, None)
    return request


def _draft(drafter: GrammarDrafter, request: Request) -> TokenTree:
    known = len(request.token_ids)
    return drafter.draft([Span(request, known - 1, known)], [BUDGET])[0]


def test_copied_tokens_have_a_name_of_their_own() -> None:
    tree = _draft(GrammarDrafter(), _request("Who is Amina Diallo?", '{"who": "Am'))
    names = dict(zip([TOKENIZER.decode([token]) for token in tree.tokens], tree.drafters(), strict=True))
    assert COPIED in names.values()
    assert "grammar" in names.values()


@pytest.mark.parametrize(
    ("params", "learns"),
    [
        (SamplingParams(temperature=0.0, max_tokens=99), True),
        (SamplingParams(temperature=1.0, seed=3, max_tokens=99), False),
    ],
)
def test_habits_are_learned_but_from_no_seeded_draws(params: SamplingParams, learns: bool) -> None:
    drafter, value = GrammarDrafter(), {"who": "Bo", "n": 3}
    for _ in range(4):
        request = _request("x", json.dumps(value, indent=2), params)
        _draft(drafter, request)
        request.finish(FinishReason.STOP)
        drafter.forget(request.request_id)
    fresh, tree = (_draft(each, _request("x", "{")) for each in (GrammarDrafter(), drafter))
    assert _line_prob(tree) > _line_prob(fresh) if learns else _line_prob(tree) == _line_prob(fresh)


def test_only_tokens_that_end_outputs_are_counted_as_ends_not_those_of_stop_strings() -> None:
    drafter = GrammarDrafter()
    for text, is_ended in (('{"who": "Bo', False), ('{"who": "Bo", "n": 3}', True)):
        request = _request("x", text)
        request.eos_token_ids = (END,)
        if is_ended:
            request.token_ids.append(END)
        _draft(drafter, request)
        request.finish(FinishReason.STOP)
        drafter.forget(request.request_id)
    assert list(drafter._habits._ends) == [END]


def _line_prob(tree: TokenTree) -> float:
    """Return the confidence that a line ends at the root."""
    confidence = tree.arrays.draws.confidence
    return sum(
        float(confidence[node - 1]) for token, node in tree.children[0].items() if "\n" in TOKENIZER.decode([token])
    )


def test_a_tree_keeps_what_the_grammar_allows() -> None:
    request = _request("x", '{"who": "Bo"')
    good, bad = _ids(', "n": 3}'), _ids(', "who": 3}')
    shared = next(place for place, pair in enumerate(zip(good, bad, strict=False)) if pair[0] != pair[1])
    root = request.token_ids[-1]
    trees = [TokenTree.chain(root, path, "suffix") for path in ([*good, END], bad, _ids(" xyz"))]
    tree = legal_part(request, TokenTree.merge(trees))
    assert legal_part(request, trees[0]) is trees[0]
    assert len(legal_part(request, trees[1])) == 1 + shared
    assert legal_part(request, trees[2]).num_guessed == 0
    assert sorted(tree.tokens[1:]) == sorted([*good, END])
    unconstrained = make_request("u", [1])
    assert legal_part(unconstrained, trees[1]) is trees[1]
