"""Verification: every small tree with every choice of the target, and the scores the choices come from."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from specinfer.request import Request
from specinfer.sampling import SamplingParams
from specinfer.tree import TokenTree
from specinfer.verify import choose, perturb, verify_coupled
from tiny import make_request, trees


def _every_tree(num_guessed: int, vocab: int) -> Iterator[TokenTree]:
    for parents in itertools.product(*(range(node) for node in range(1, num_guessed + 1))):
        for tokens in itertools.product(range(vocab), repeat=num_guessed):
            if len(set(zip(parents, tokens, strict=True))) == num_guessed:
                yield TokenTree((0, *tokens), (-1, *parents))


def _check(tree: TokenTree, choices: Sequence[int]) -> tuple[int, ...]:
    acceptance = verify_coupled(tree, choices)
    said = (*(tree.tokens[node] for node in acceptance.path), acceptance.next_token)
    assert said == reference.walk(dict(zip(tree.path_tokens(), choices, strict=True)))
    assert acceptance.path == (tree.path(acceptance.path[-1]) if acceptance.path else ())
    return said


@pytest.mark.parametrize(("num_guessed", "vocab"), [(0, 3), (1, 3), (2, 3), (3, 3), (4, 2)])
def test_every_tree_and_every_choice(num_guessed: int, vocab: int) -> None:
    lengths = set()
    for tree in _every_tree(num_guessed, vocab):
        for choices in itertools.product(range(vocab), repeat=len(tree)):
            lengths.add(len(_check(tree, choices)))
    assert lengths == set(range(1, num_guessed + 2)), "from nothing accepted to everything"


@given(trees(max_nodes=30), st.lists(st.integers(0, 2), min_size=31, max_size=31))
def test_larger_trees(tree: TokenTree, choices: list[int]) -> None:
    _check(tree, choices[: len(tree)])


def test_what_is_said_does_not_depend_on_the_tree() -> None:
    """The target as a function of the path: whatever tree is verified, its tokens begin the same text."""

    def says(path: tuple[int, ...]) -> int:
        return reference.splitmix64(sum((t + 1) * 5**i for i, t in enumerate(path))) % 3

    plain: tuple[int, ...] = ()
    while len(plain) < 8:
        plain = (*plain, says(plain))
    for size, vocab in ((2, 3), (4, 2)):
        for tree in _every_tree(size, vocab):
            said = _check(tree, [says(path) for path in tree.path_tokens()])
            assert said == plain[: len(said)]


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_k=2),
    SamplingParams(top_p=0.8, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(allowed_token_ids=[0, 2], min_tokens=4, stop_token_ids=[2]),
]


def _request(i: int, params: SamplingParams) -> Request:
    request = make_request(str(i), [1, 2, 0], params, seed=100 + i, eos_token_ids=(1,))
    request.append(2, None)
    return request


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(MIXED), trees(root=2, vocab=4)), min_size=1, max_size=5), st.integers(0, 99))
def test_choices_are_the_argmax_of_the_plain_scores(batch: list[tuple[SamplingParams, TokenTree]], seed: int) -> None:
    requests = [_request(i, params) for i, (params, _) in enumerate(batch)]
    several = [tree for _, tree in batch]
    rows = torch.randn(sum(map(len, several)), 4, generator=torch.Generator().manual_seed(seed)) * 2
    chosen = choose(rows, requests, several)
    left = iter(rows.tolist())
    for request, tree, choices in zip(requests, several, chosen, strict=True):
        for path, choice in zip(tree.path_tokens(), choices, strict=True):
            output = [*request.output_ids, *path]
            row = reference.scores(next(left), request.params, request.prompt_ids, output, request.seed, (1,))
            assert choice == row.index(max(row))


def test_a_drafter_ranks_by_the_very_scores_of_the_target() -> None:
    """The noise at a node belongs to the position of the token to be chosen, however deep the node is."""
    request = _request(0, SamplingParams(temperature=0.8))
    logits = torch.zeros(3, 4)
    rows = perturb(logits, request, [(), (3,), (1,)])
    start = len(request.token_ids)
    for row, position in zip(rows.tolist(), (start, start + 1, start + 1), strict=True):
        wanted = [reference.gumbel(request.seed, position, token) for token in range(4)]
        assert row == pytest.approx(wanted, abs=1e-5)


def test_greedy_has_no_noise() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert torch.equal(perturb(logits, _request(0, MIXED[0]), [()]), logits)
    assert choose(logits, [_request(0, MIXED[0])], [TokenTree.root(2)]) == [[1]]
