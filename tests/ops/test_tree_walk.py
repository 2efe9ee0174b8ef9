"""Choosing, walking and committing on a device: twins and Triton's kernels against the ordinary verification.

The kernels run in Triton's interpreter (tests/support/suite.py).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from interpreter import interpreted
from reference import trees as reference_trees
from specinfer.core.noise import gumbel
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TokenTree
from specinfer.ops.triton import choose as choosing
from specinfer.ops.triton.choose import choose
from specinfer.ops.triton.commit import commit
from specinfer.ops.triton.walk import walk
from specinfer.verify import NAN, NO_VALID_TOKEN, verify, verify_coupled
from tiny import make_request, trees
from tree_cases import bushy, wide

pytestmark = interpreted
Choose = Callable[..., Tensor]
CHOOSES = pytest.mark.parametrize("run", [reference_trees.choose, choose])
WALKS = pytest.mark.parametrize("run", [reference_trees.walk, walk])


def _rows(seeds: Sequence[int], positions: Sequence[int], temperatures: Sequence[float]) -> tuple[Tensor, ...]:
    return torch.tensor(seeds), torch.tensor(positions, dtype=torch.int32), torch.tensor(temperatures)


# ------------------------------------------------------------------------------------------- choose


@CHOOSES
@pytest.mark.parametrize("vocab", [1, 96, 5000])
def test_chosen_tokens_are_those_of_plain_decoding(run: Choose, vocab: int) -> None:
    """Greedy and sampled rows side by side, with the seeds and positions that verification has."""
    temperatures = [0.0, 1.0, 0.7, 1e-5, 0.3, 3.0, 1.0, 0.0]
    logits = 3 * torch.randn((len(temperatures), vocab), generator=torch.Generator().manual_seed(vocab))
    requests = [
        make_request(str(i), [1] * (i + 1), SamplingParams(temperature=t), seed=2**62 * (i % 2) + i)
        for i, t in enumerate(temperatures)
    ]
    roots = [TokenTree.root(1)] * len(requests)
    wanted = [kept.next_token for kept in verify("coupled", list(logits.split(1)), requests, roots)]
    rows = _rows([r.seed for r in requests], [len(r.token_ids) for r in requests], temperatures)
    assert run(logits, *rows).tolist() == wanted
    out = torch.zeros(len(requests), dtype=torch.int64)
    assert run(logits, *rows, out=out) is out
    assert out.tolist() == wanted


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31 - 1), temperature=st.sampled_from([0.5, 1.0]))
@settings(max_examples=10)
def test_the_noise_is_that_of_whole_numbers(seed: int, position: int, temperature: float) -> None:
    row = torch.randn(40, generator=torch.Generator().manual_seed(position))
    scores = [x / temperature + reference.gumbel(seed, position, token) for token, x in enumerate(row.tolist())]
    assert choose(row[None], *_rows([seed], [position], [temperature])).tolist() == [int(np.argmax(scores))]


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-4, 1e-3])
def test_near_ties_are_decided_by_the_precise_noise(spread: float) -> None:
    """Logits that undo the noise: all scores of the vocabulary lie within the error of the rough noise, or near it."""
    vocab, count = 4300, 6
    seeds, positions = torch.arange(count), torch.arange(count) + 7
    noise = gumbel(seeds, positions, torch.arange(vocab))
    logits = torch.randn((count, vocab), generator=torch.Generator().manual_seed(1)) * spread - noise
    best = (logits + noise).max(dim=1)
    tokens = choose(logits, seeds, positions, torch.ones(count))
    found = (logits + noise).gather(1, tokens[:, None])[:, 0]
    # NumPy's logarithm may differ from PyTorch's in the last bit of a double: seen where all scores are equal.
    assert bool((found >= best.values - 4e-6).all())
    if spread >= 1e-4:
        assert tokens.tolist() == best.indices.tolist()


def test_the_rough_noise_has_its_stated_accuracy() -> None:
    """Of all numbers that matter: the tails, the places where formulas change, and between."""
    import triton
    import triton.language as tl

    bits = [0, 1, 2, 2**20, 2**51, 2**52 - 1, 2**52 - 2, 2**52 - 2**20]
    edge = round((1 - 0.03125) * 2**52)
    bits += [edge + step for step in (-1, 0, 1)] + [int(2**52 * math.exp(-1)) + step * 2**40 for step in range(-3, 4)]
    bits += [round(2**52 * share) for share in np.linspace(0.0003, 0.9997, 200)]
    given_bits = torch.tensor(bits[:256] + [5] * (256 - len(bits)))
    found = torch.zeros(2, 256)

    @triton.jit
    def both(bits, out, rough, precise):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 256)
        values = tl.load(bits + at).to(tl.uint64)
        tl.store(out + at, rough(values))
        tl.store(out + 256 + at, precise(values))

    both[(1,)](given_bits, found, choosing.rough_noise, choosing.precise_noise)
    wanted = [-math.log(-math.log((x + 0.5) * 2.0**-52)) for x in given_bits.tolist()]
    np.testing.assert_allclose(found[1].numpy(), wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[0].numpy(), wanted, atol=2e-4, rtol=0)


@CHOOSES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore:All-NaN slice|invalid value:RuntimeWarning")
def test_rows_that_name_no_token(run: Choose, temperature: float) -> None:
    logits = torch.zeros((5, 2500))
    logits[0, 2400] = math.nan
    logits[1] = -math.inf
    logits[2] = -math.inf
    logits[2, 2300] = -5.0
    logits[3, 2100] = math.inf
    logits[4] = math.nan
    rows = _rows([1, 2, 3, 4, 5], [1, 1, 1, 1, 1], [temperature] * 5)
    assert run(logits, *rows).tolist() == [NAN, NO_VALID_TOKEN, 2300, 2100, NAN]


@CHOOSES
def test_of_equal_tokens_the_first_is_chosen(run: Choose) -> None:
    logits = torch.zeros((2, 4500))
    logits[0, [2047, 2048, 4400]] = 1.0
    assert run(logits, *_rows([1, 1], [1, 1], [0.0, 0.0])).tolist() == [2047, 0]


@CHOOSES
def test_half_precision_is_read_as_it_is(run: Choose) -> None:
    logits = torch.randn((4, 300), generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = _rows([1, 2, 3, 4], [5, 6, 7, 8], [0.0, 1.0, 0.5, 2.0])
    assert run(logits, *rows).tolist() == reference_trees.choose(logits.float(), *rows).tolist()


# --------------------------------------------------------------------------------------------- walk


def _packed(forest: Sequence[TokenTree], nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, parents and sizes; what is not in use looks like a child of the root."""
    tokens = torch.zeros((len(forest), nodes), dtype=torch.int32)
    parents = torch.zeros_like(tokens)
    for i, tree in enumerate(forest):
        tokens[i, : len(tree)] = torch.tensor(tree.tokens)
        parents[i, : len(tree)] = torch.tensor(tree.parents)
    return tokens, parents, torch.tensor([len(tree) for tree in forest], dtype=torch.int32)


def _check_walk(run: Any, forest: Sequence[TokenTree], chosen: Sequence[Sequence[int]]) -> None:
    wanted = verify_coupled(forest, lambda places: [chosen[i][node] for i, node in places])
    depth, nodes = max(tree.max_depth for tree in forest) + 1, max(map(len, forest)) + 2
    tokens, parents, sizes = _packed(forest, nodes)
    starts = torch.tensor([0, *np.cumsum([len(rows) for rows in chosen])[:-1]], dtype=torch.int32)
    flat = torch.tensor([token for rows in chosen for token in rows])
    path, lengths, following = run(flat, starts, tokens, parents, sizes, max_depth=depth)
    assert lengths.tolist() == [len(kept.path) for kept in wanted]
    assert path.tolist() == [[*kept.path, *[-1] * (depth - len(kept.path))] for kept in wanted]
    assert following.tolist() == [kept.next_token for kept in wanted]


@WALKS
@settings(max_examples=12)
@given(data=st.data())
def test_walks_are_those_of_the_rule(run: Any, data: st.DataObject) -> None:
    forest = data.draw(st.lists(trees(max_nodes=12), min_size=1, max_size=3))
    chosen = [data.draw(st.lists(st.integers(-2, 3), min_size=len(tree), max_size=len(tree))) for tree in forest]
    _check_walk(run, forest, chosen)


@WALKS
def test_walks_of_large_trees(run: Any) -> None:
    forest = [wide(64), TokenTree.chain(0, [1] * 15), TokenTree.root(3)]
    _check_walk(run, forest, [[64, *[5] * 64], [1] * 12 + [0] * 4, [9]])
    tree = bushy(255)
    _check_walk(run, [tree], [[max(children, default=7) for children in tree.children]])


@WALKS
def test_no_tree_and_no_capacity(run: Any) -> None:
    """A request of padding; and a path is cut at the greatest depth, where the chosen token is still right."""
    tokens, parents, sizes = _packed([TokenTree.chain(0, [5, 6, 7]), TokenTree.root(0)], 4)
    sizes[1] = 0
    chosen, starts = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 4], dtype=torch.int32)
    out = (torch.zeros((2, 2), dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
    result = run(chosen, starts, tokens, parents, sizes, max_depth=2, out=out)
    assert all(a is b for a, b in zip(result, out, strict=True))
    path, lengths, following = out
    assert path.tolist() == [[1, 2], [-1, -1]]
    assert lengths.tolist() == [2, -1]
    assert following.tolist() == [7, NO_VALID_TOKEN]


# ------------------------------------------------------------------------------------------- commit


@pytest.mark.parametrize("run", [reference_trees.commit, commit])
def test_commit_lists_the_slots_of_the_path(run: Any) -> None:
    table = torch.arange(3 * 8, dtype=torch.int32).view(3, 8)
    lens = torch.tensor([3, 0, 5], dtype=torch.int32)
    node_slots = torch.tensor([[90, 91, 92, 93], [80, 81, 82, 83], [70, 71, 72, 73]], dtype=torch.int32)
    path = torch.tensor([[1, 3, -1], [-1, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    wanted = table.clone()
    wanted[0, 3:6] = torch.tensor([90, 91, 93])
    wanted[1, 0] = 80
    run(table, lens, node_slots, path, torch.tensor([2, 0, -1], dtype=torch.int32))
    assert lens.tolist() == [6, 1, 5]
    assert torch.equal(table, wanted)
    full = torch.tensor([[1, 2, -1], [-1] * 3, [1, 2, -1]], dtype=torch.int32)
    run(table, lens, node_slots, full, torch.tensor([-1, -1, 2], dtype=torch.int32))
    assert table[2].tolist() == [16, 17, 18, 19, 20, 70, 71, 72], "up to the end of a row"
    assert lens.tolist() == [6, 1, 8]
