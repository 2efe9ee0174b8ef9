"""The native walks by random numbers decide what the plain rules decide, with the same random numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specinfer.core import rules as core_rules
from specinfer.core.draws import DrawnFrom
from specinfer.core.request import Request
from specinfer.core.rules import random_rules
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import Distribution, Draw, TokenTree
from specinfer.ops.trees import NAN, NO_VALID_TOKEN
from specinfer.verify import Acceptance, verify
from specinfer.verify.algorithms import verify_seeded
from tiny import make_request

RULES = [rule for rule in random_rules() if core_rules.RULES[rule].cpu_walk is not None]


def _law(rng: np.random.Generator, logits: np.ndarray, size: int, sharpness: float) -> tuple[np.ndarray, np.ndarray]:
    """The most probable tokens by logits that are blurred, and their probabilities."""
    blurred = logits + sharpness * rng.standard_normal(len(logits))
    ids = np.argsort(-blurred)[:size]
    weights = np.exp(blurred[ids] - blurred[ids].max())
    return ids, weights / weights.sum()


def _drafted(rng: np.random.Generator, vocab: int, max_nodes: int, sharpness: float) -> tuple[TokenTree, torch.Tensor]:
    """A tree whose tokens are drawn in every way, and the target's logits at its nodes."""
    tokens, parents, draws = [0], [-1], list[Draw]()
    logits = 3 * rng.standard_normal((max_nodes + 1, vocab)).astype(np.float32)
    node = 0
    while node < len(tokens):
        known: dict[int, int] = {}
        for _ in range(rng.integers(0, 3)):  # drafters
            ids, probs = _law(rng, logits[node], int(rng.integers(1, vocab + 1)), sharpness)
            way, drawn = rng.integers(3), list[int]()
            for _ in range(rng.integers(1, 5)):
                removed = tuple(drawn) if way == 1 else ()
                if len(removed) == len(ids):
                    break
                place = int(rng.choice(len(ids), p=Distribution(ids, probs, removed).weights()))
                token = int(ids[place])
                if token not in known and len(tokens) > max_nodes:
                    break
                if token not in known:
                    known[token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                drawn.append(place)
                draws.append(Draw(known[token], "a", Distribution(ids, probs, removed) if way < 2 else None))
        node += 1
    return TokenTree(tokens, parents, draws), torch.from_numpy(logits[: len(tokens)].copy())


def _both(rule: str, logits: list[torch.Tensor], trees: list[TokenTree], heats: list[float], seed: int) -> None:
    """Check that both ways accept the same, and leave the same random numbers."""

    def requests() -> list[Request]:
        params = [SamplingParams(temperature=heat) for heat in heats]
        return [make_request(str(i), [0], one, seed=seed + i) for i, one in enumerate(params)]

    natively, plainly = requests(), requests()
    found = verify(rule, logits, natively, trees)
    wanted = [
        verify_seeded(rule, tree, (rows / heat).numpy().__getitem__, request.uniforms)
        for rows, request, tree, heat in zip(logits, plainly, trees, heats, strict=True)
    ]
    assert found == wanted
    assert [one.uniforms.state for one in natively] == [one.uniforms.state for one in plainly]


@pytest.mark.parametrize("rule", RULES)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([2, 5, 40, 700]),
    sharpness=st.sampled_from([0.0, 0.3, 3.0]),
    heats=st.lists(st.sampled_from([1.0, 0.6, 1.7]), min_size=1, max_size=4),
    spoiled=st.sampled_from([None, None, float("nan"), -float("inf")]),
)
def test_the_plain_rules_decide_the_same(
    isa: str, rule: str, seed: int, vocab: int, sharpness: float, heats: list[float], spoiled: float | None
) -> None:
    """With tokens drawn with and without replacement, chosen ones, duplicates, and several drafters."""
    rng = np.random.default_rng(seed)
    drafted = [_drafted(rng, vocab, int(rng.integers(0, 14)), sharpness) for _ in heats]
    logits = [rows for _, rows in drafted]
    if spoiled is not None:
        logits[0][rng.integers(len(logits[0]))] = spoiled
    _both(rule, logits, [tree for tree, _ in drafted], heats, seed)


@pytest.mark.parametrize("rule", RULES)
def test_large_rows_are_walked_on_several_threads(isa: str, rule: str) -> None:
    rng = np.random.default_rng(3)
    drafted = [_drafted(rng, 3000, 30, 0.5) for _ in range(8)]
    _both(rule, [rows for _, rows in drafted], [tree for tree, _ in drafted], [1.0] * 8, 11)


@pytest.mark.parametrize("rule", RULES)
def test_a_node_without_a_token_ends_the_walk_with_its_reason(isa: str, rule: str) -> None:
    tree = TokenTree.chain(0, [1])
    logits = [torch.full((2, 4), -torch.inf) for _ in range(3)]
    logits[1][0, 1] = logits[2][0, 1] = 0.0
    logits[2][1, 2] = torch.nan
    requests = [make_request(str(i), [0], SamplingParams(temperature=1.0)) for i in range(3)]
    found = verify(rule, logits, requests, [tree] * 3)
    assert found == [Acceptance((), NO_VALID_TOKEN), Acceptance((), 1), Acceptance((), NAN)]


def test_the_stride_of_a_single_column_does_not_matter() -> None:
    """NumPy sets any, also for arrays that are contiguous."""
    tokens = np.arange(6, dtype=np.int64).reshape(2, 3)
    places = np.lib.stride_tricks.as_strided(np.arange(2, dtype=np.int64), (2, 1), (8, 1))
    rows = np.array([1, 0, 1])
    found = DrawnFrom(tokens, tokens / 2, places).addresses(rows)
    assert (found[:, 3] - places.ctypes.data).tolist() == [8, 0, 8]
    assert (found[:, 0] - tokens.ctypes.data).tolist() == [24, 0, 24]
