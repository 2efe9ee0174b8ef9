"""The rules with random numbers on a device: twins and Triton's kernels against the rules, with the same coins."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interpreter import interpreted
from reference import device as reference_device
from specinfer.core.noise import UniformStream
from specinfer.core.request import Request
from specinfer.core.rules import RULES
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import Distribution, Draw, TokenTree
from specinfer.ops import kernels
from specinfer.ops.trees import Walk, WalkInputs
from specinfer.verify import NAN, NO_VALID_TOKEN, Acceptance, verify
from tiny import make_request
from tree_cases import drawn_tree

pytestmark = interpreted
RUNS = pytest.mark.parametrize(
    ("rule", "run"),
    [
        pytest.param(name, run, id=f"{name}-{kind}")
        for name, rule in RULES.items()
        if rule.gpu_walk is not None
        for kind, run in (
            ("twin", reference_device.OPERATIONS[rule.gpu_walk]),
            ("kernel", kernels.kernel(rule.gpu_walk)),
        )
    ],
)
VOCAB = 30


def _nothing_walked(requests: int, depth: int) -> Walk:
    """What walks overwrite."""
    path = torch.full((requests, depth), 77, dtype=torch.int32)
    return path, torch.full((requests,), 78, dtype=torch.int32), torch.full((requests,), 79)


def _run(
    run: Any,
    logits: Sequence[Tensor],
    requests: Sequence[Request],
    forest: Sequence[TokenTree],
    least: Tensor | None = None,
) -> list[Any]:
    """Acceptances, with the requests' own coins tossed."""
    nodes, num_draws = max(map(len, forest)) + 1, max(len(tree.draws) for tree in forest) + 1
    support = max(
        (len(draw.distribution.token_ids) for tree in forest for draw in tree.draws if draw.distribution), default=1
    )
    shape = (len(forest), num_draws)
    tokens, parents = (torch.zeros((len(forest), nodes), dtype=torch.int32) for _ in range(2))
    draws = torch.full(shape, -1, dtype=torch.int32)
    distribution_tokens = torch.full((*shape, support), -1, dtype=torch.int32)
    distribution_probs = torch.zeros((*shape, support), dtype=torch.float64)
    for i, tree in enumerate(forest):
        tokens[i, : len(tree)], parents[i, : len(tree)] = torch.tensor(tree.tokens), torch.tensor(tree.parents)
        for j, draw in enumerate(tree.draws):
            draws[i, j] = draw.node
            ids = draw.distribution.token_ids if draw.distribution else np.array([tree.tokens[draw.node]])
            distribution_tokens[i, j, : len(ids)] = torch.from_numpy(ids)
            distribution_probs[i, j, : len(ids)] = torch.from_numpy(
                draw.distribution.weights() if draw.distribution else np.ones(1)
            )
    states = [request.uniforms.state for request in requests]
    uniforms = torch.tensor([state - 2**64 if state >= 2**63 else state for state in states])
    starts = torch.tensor([0, *np.cumsum([len(tree) for tree in forest])[:-1]], dtype=torch.int32)
    temperatures = torch.tensor([request.params.temperature for request in requests])
    sizes = torch.tensor([len(tree) for tree in forest], dtype=torch.int32)
    depth = max(tree.max_depth for tree in forest) + 1
    path, lengths, following = walked = _nothing_walked(len(forest), depth)
    inputs = WalkInputs(
        torch.cat(list(logits)), starts, temperatures, tokens, parents, sizes,
        draws, distribution_tokens, distribution_probs, uniforms, least,
    )  # fmt: skip
    run(inputs, out=walked)
    kept = []
    for nodes_kept, length, token in zip(path.tolist(), lengths.tolist(), following.tolist(), strict=True):
        assert nodes_kept[length:] == [-1] * (len(nodes_kept) - length)
        kept.append(Acceptance(tuple(nodes_kept[:length]), token))
    return [*kept, *(state % 2**64 for state in uniforms.tolist())]


def _requests(count: int, seed: int, temperatures: Sequence[float] = (1.0, 0.7, 1.6)) -> list[Request]:
    params = [SamplingParams(temperature=temperatures[i % len(temperatures)]) for i in range(count)]
    return [make_request(str(i), [1], each, seed=seed + i) for i, each in enumerate(params)]


@RUNS
@settings(max_examples=6)
@given(seed=st.integers(0, 999), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_decisions_are_those_of_the_rule(rule: str, run: Any, seed: int, sizes: list[int]) -> None:
    source, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    logits = [torch.randn((size + 3, VOCAB), generator=generator) * 2 for size in sizes]
    forest = [drawn_tree(source, size, 5, rows) for size, rows in zip(sizes, logits, strict=True)]
    logits = [rows[: len(tree)] for rows, tree in zip(logits, forest, strict=True)]
    requests = _requests(len(sizes), seed)
    found = _run(run, logits, requests, forest)
    wanted = verify(rule, logits, requests, forest)
    assert found == [*wanted, *(request.uniforms.state for request in requests)]


@RUNS
def test_large_vocabularies_go_by_chunks(rule: str, run: Any) -> None:
    vocab = 5000
    logits = [torch.randn((3, vocab), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    distributions = [
        Distribution(np.array([7, 2500, 4999]), np.array([0.2, 0.3, 0.5]), removed) for removed in ((), (1,))
    ]
    tree = TokenTree((0, 2500, 7), (-1, 0, 0), (Draw(1, "a", distributions[0]), Draw(2, "a", distributions[1])))
    requests = _requests(3, 50)
    found = _run(run, logits, requests, [tree] * 3)
    assert found[:3] == verify(rule, logits, requests, [tree] * 3)


@RUNS
def test_what_truncation_drops_has_no_probability(rule: str, run: Any) -> None:
    """With the same trees as for the logits that are kept."""
    source, generator = np.random.default_rng(5), torch.Generator().manual_seed(5)
    logits = [torch.randn((9, VOCAB), generator=generator) * 2 for _ in range(6)]
    forest = [drawn_tree(source, 7, 5, rows) for rows in logits]
    logits = [rows[: len(tree)] for rows, tree in zip(logits, forest, strict=True)]
    requests = _requests(6, 5)
    over_temperature = [
        rows / request.params.temperature for rows, request in zip(logits, requests, strict=True)
    ]  # fmt: skip
    least = torch.cat([rows.topk(6, dim=1).values[:, -1] for rows in over_temperature])
    found = _run(run, logits, requests, forest, least)
    kept = [rows.masked_fill(rows < rows.topk(6, dim=1).values[:, -1:], -math.inf) for rows in logits]
    assert found[:6] == verify(rule, kept, requests, forest)
    assert found[6:] == [request.uniforms.state for request in requests]


@RUNS
@pytest.mark.filterwarnings("ignore:All-NaN slice|invalid value:RuntimeWarning")
def test_nodes_that_name_no_token(rule: str, run: Any) -> None:
    certain = torch.full((3, 8), -math.inf)
    certain[0, 3] = certain[1, 4] = certain[2, 5] = 0.0
    tree = TokenTree((0, 3, 4), (-1, 0, 1), (Draw(1, "a"), Draw(2, "a")))
    logits = [certain.clone() for _ in range(5)]
    logits[1][0] = -math.inf
    logits[2][1, 0] = math.nan
    logits[3][2] = -math.inf
    logits[4][0, 3], logits[4][0, 6] = -math.inf, 0.0
    requests = _requests(5, 3, (1.0,))
    found = _run(run, logits, requests, [tree] * 5)[:5]
    assert found == verify(rule, logits, requests, [tree] * 5)
    expected = [((1, 2), 5), ((), NO_VALID_TOKEN), ((), NAN), ((1,), 4), ((), 6)]
    assert found == [Acceptance(path, token) for path, token in expected]


@RUNS
def test_no_tree_is_no_walk(rule: str, run: Any) -> None:
    zeros = torch.zeros((1, 2), dtype=torch.int32)
    uniforms = torch.tensor(
        [UniformStream(1).state - 2**64 if UniformStream(1).state >= 2**63 else UniformStream(1).state]
    )
    before = uniforms.clone()
    walked = _nothing_walked(1, 2)
    inputs = WalkInputs(
        torch.zeros((1, 4)), zeros[:, 0], torch.zeros(1), zeros, zeros, zeros[:, 0].clone(), zeros - 1,
        zeros[..., None], torch.zeros((1, 2, 1), dtype=torch.float64), uniforms,
    )  # fmt: skip
    run(inputs, out=walked)
    assert [tensor.tolist() for tensor in walked] == [tensor.tolist() for tensor in _nothing_walked(1, 2)]
    assert torch.equal(uniforms, before)
