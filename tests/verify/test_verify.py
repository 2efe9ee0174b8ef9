"""Verification: every small tree with every choice of the target, and the scores the choices come from."""

import itertools
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from specinfer.core.noise import UniformStream
from specinfer.core.request import Request
from specinfer.core.rules import RULES, random_rules
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import Draw, TokenTree
from specinfer.ops import tree_ops
from specinfer.ops.cpu import transfers
from specinfer.verify import NAN, NO_VALID_TOKEN, Acceptance, batch, verify, verify_coupled
from specinfer.verify.algorithms import SeededSource
from tiny import make_request, paths_of, trees


def _every_tree(num_guessed: int, vocab: int) -> Iterator[TokenTree]:
    for parents in itertools.product(*(range(node) for node in range(1, num_guessed + 1))):
        for tokens in itertools.product(range(vocab), repeat=num_guessed):
            if len(set(zip(parents, tokens, strict=True))) == num_guessed:
                yield TokenTree((0, *tokens), (-1, *parents))


def _check(tree: TokenTree, choices: Sequence[int]) -> tuple[int, ...]:
    (acceptance,) = verify_coupled([tree], lambda places: [choices[node] for _, node in places])
    said = (*(tree.tokens[node] for node in acceptance.path), acceptance.next_token)
    assert said == reference.walk(dict(zip(paths_of(tree), choices, strict=True)))
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


def test_the_output_does_not_depend_on_the_tree() -> None:
    """The target as a function of the path: whatever tree is verified, its tokens begin the same text."""

    def says(path: tuple[int, ...]) -> int:
        return reference.splitmix64(sum((t + 1) * 5**i for i, t in enumerate(path))) % 3

    plain: tuple[int, ...] = ()
    while len(plain) < 8:
        plain = (*plain, says(plain))
    for size, vocab in ((2, 3), (4, 2)):
        for tree in _every_tree(size, vocab):
            said = _check(tree, [says(path) for path in paths_of(tree)])
            assert said == plain[: len(said)]


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_k=2),
    SamplingParams(top_p=0.8, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(allowed_token_ids=[0, 2], min_tokens=4, stop_token_ids=[2]),
    SamplingParams(min_p=0.4),
    SamplingParams(temperature=1e-6),
]


def _request(i: int, params: SamplingParams) -> Request:
    request = make_request(str(i), [1, 2, 0], params, seed=100 + i, eos_token_ids=(1,))
    request.append(2, None)
    return request


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(MIXED), trees(root=2, vocab=4)), min_size=1, max_size=5),
    st.integers(0, 99),
    st.sampled_from(["coupled", "target-only"]),
)
def test_what_is_kept_is_the_argmax_of_the_plain_scores(
    mixed: list[tuple[SamplingParams, TokenTree]], seed: int, rule: str
) -> None:
    """Of several requests at once, each with noise for the position of the token that is said."""
    requests = [_request(i, params) for i, (params, _) in enumerate(mixed)]
    several = [tree for _, tree in mixed]
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(len(tree), 4, generator=generator) * 2 for tree in several]
    before = [rows.clone() for rows in logits]
    said = verify(rule, logits, requests, several)
    choices: list[list[int]] = []
    for request, tree, rows in zip(requests, several, logits, strict=True):
        choices.append([])
        for path, row in zip(paths_of(tree), rows.tolist(), strict=True):
            output = [*request.output_ids, *path]
            row = reference.scores(row, request.params, request.prompt_ids, output, request.seed, (1,))
            choices[-1].append(row.index(max(row)))
    assert said == verify_coupled(several, lambda places: [choices[i][node] for i, node in places])
    assert all(torch.equal(a, b) for a, b in zip(before, logits, strict=True)), "logits are not changed"


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(MIXED), trees(root=2, vocab=4)), min_size=1, max_size=5),
    st.integers(0, 99),
    st.sampled_from([None, math.nan, -math.inf]),
)
def test_all_nodes_at_once_or_level_by_level(
    mixed: list[tuple[SamplingParams, TokenTree]], seed: int, spoiled: float | None
) -> None:
    """As on an accelerator, where all requests are asked at once."""
    requests, forest = [_request(i, params) for i, (params, _) in enumerate(mixed)], [tree for _, tree in mixed]
    logits = [torch.randn((len(tree), 4), generator=torch.Generator().manual_seed(seed)) * 2 for tree in forest]
    if spoiled is not None:
        for rows in logits:
            rows[seed % len(rows)] = spoiled
    wanted, asked = verify("coupled", logits, requests, forest), list[int]()
    chosen = tree_ops.choose

    def counted(rows: Tensor, *others: Tensor | None) -> Tensor:
        asked.append(len(rows))
        return chosen(rows, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "is_apart", lambda _: True)
        patch.setattr(batch, "runs_on", lambda _: True)
        patch.setattr(tree_ops, "choose", counted)
        assert verify("coupled", logits, requests, forest) == wanted
    assert asked == [sum(map(len, forest))]
    with pytest.MonkeyPatch.context() as patch:  # node by node
        patch.setattr(batch, "_is_plain", lambda *_: False)
        assert verify("coupled", logits, requests, forest) == wanted


@pytest.mark.parametrize("at_once", [False, True])
def test_a_temperature_that_counts_as_greedy_takes_the_first_of_equal_tokens(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "is_apart", lambda _: at_once)
    monkeypatch.setattr(batch, "runs_on", lambda _: True)
    requests = [_request(i, SamplingParams(temperature=1e-6)) for i in range(8)]
    accepted = verify("coupled", [torch.zeros(1, 4)] * 8, requests, [TokenTree.root(2)] * 8)
    assert [acceptance.next_token for acceptance in accepted] == [0] * 8


@settings(max_examples=30)
@given(
    st.sampled_from([*random_rules(), "target-only"]),
    trees(root=2, vocab=4),
    st.integers(0, 99),
    st.sampled_from(MIXED[:2]),
)
def test_greedy_requests_are_walked_under_any_rule(
    rule: str, tree: TokenTree, seed: int, params: SamplingParams
) -> None:
    logits = torch.randn(len(tree), 4, generator=torch.Generator().manual_seed(seed))
    request = _request(0, params)
    uniforms = request.uniforms.next_uniform()
    wanted = verify("coupled", [logits], [_request(0, params)], [tree])
    request = _request(0, params)
    assert verify(rule, [logits], [request], [tree]) == wanted
    assert request.uniforms.next_uniform() == uniforms, "no coin was tossed"


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-17, 1e-9, 0.1, 1 / 3, 0.5, 0.7]), min_size=1, max_size=8).filter(any),
    st.sampled_from([0.0, 0.5, 1 - 2.0**-53]),
)
def test_a_sampled_token_always_has_a_probability(weights: list[float], uniform: float) -> None:
    """Also with the largest random number, and where only zeros follow."""
    source = SeededSource(cast(UniformStream, SimpleNamespace(next_uniform=lambda: uniform)))
    token = source.sample(np.array(weights))
    assert weights[token] > 0
    mass = np.cumsum(weights)
    assert (mass[token - 1] if token else 0) <= uniform * mass[-1] < mass[token]


@pytest.mark.parametrize("rule", random_rules())
def test_requests_without_drafts_get_plain_decoding_under_any_rule(rule: str) -> None:
    logits, params = torch.randn(1, 4, generator=torch.Generator().manual_seed(1)), SamplingParams(tree="off")
    wanted = verify("coupled", [logits], [_request(3, params)], [TokenTree.root(2)])
    assert verify(rule, [logits], [_request(3, params)], [TokenTree.root(2)]) == wanted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("params", [MIXED[0], MIXED[1], MIXED[2]], ids=["plain greedy", "greedy", "sampled"])
def test_nodes_that_name_no_token(rule: str, params: SamplingParams) -> None:
    """Only where the walk comes: of a node that is not reached nobody asks."""
    tree = TokenTree((2, 3, 0), (-1, 0, 0), (Draw(1, "a"), Draw(2, "a")))
    certain = torch.full((3, 4), -50.0)
    certain[0, 3], certain[1, 1], certain[2, 1] = 50.0, 50.0, 50.0
    logits = [certain.clone() for _ in range(4)]
    logits[1][2, 0] = math.nan  # beside the way
    logits[2][1, 0] = math.nan
    logits[3][0, 2] = math.nan
    requests = [_request(i, params) for i in range(4)]
    kept = verify(rule, logits, requests, [tree] * 4)
    assert kept[0] == Acceptance((1,), 1)
    assert kept[2].next_token == kept[3].next_token == NAN
    if rule != "traversal":  # which comes to every leaf
        assert kept[1] == Acceptance((1,), 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_valid(rule: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, allowed_token_ids=[3])
    logits = torch.zeros(1, 4)
    logits[0, 3] = -math.inf
    requests = [_request(0, params), _request(1, SamplingParams(temperature=temperature))]
    refused, fine = verify(rule, [logits, torch.zeros(1, 4)], requests, [TokenTree.root(2)] * 2)
    assert refused.next_token == NO_VALID_TOKEN
    assert 0 <= fine.next_token < 4


class _Threads(TorchDispatchMode):
    """The numbers of threads that PyTorch's operations may use."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif("openmp" not in torch.__config__.parallel_info().lower(), reason="PyTorch has other threads")
def test_rows_of_logits_are_processed_on_the_calling_thread() -> None:
    """On a busy machine PyTorch waits milliseconds for its other threads after each operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        request = make_request("a", [1, 2], SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2))
        logits = torch.randn(3, 500)
        with _Threads() as threads:
            verify("coupled", [logits], [request], [TokenTree.chain(2, [3, 4])])
        assert threads.seen == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
