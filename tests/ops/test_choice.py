"""The native choice of a token is plain decoding's, to the last bit, whatever the scores and the noise are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reference.trees import choose
from specinfer.core.noise import _keys, gumbel, noise_key
from specinfer.ops.cpu.choice import by_keys, choose_token, most_probable, most_probable_in_order, noise_for
from specinfer.ops.trees import NAN, NO_VALID_TOKEN


def _plain(scores: Tensor, noise: tuple[int, int] | None, least: float = -torch.inf) -> int:
    scores = scores.masked_fill(scores < least, -torch.inf)
    seed, position = noise or (0, 0)
    heat = torch.tensor([0.0 if noise is None else 1.0])
    return int(choose(scores.unsqueeze(0), torch.tensor([seed]), torch.tensor([position]), heat))


def _scores(size: int, seed: int, spread: float) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


@given(
    size=st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 2047, 2049, 5000]),
    spread=st.sampled_from([0.0, 1e-6, 0.3, 2.0, 20.0, 1e6]),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**20),
)
def test_the_token_is_that_of_plain_decoding(isa: str, size: int, spread: float, seed: int, position: int) -> None:
    scores = _scores(size, seed % 1000, spread)
    assert choose_token(scores, (seed, position)) == _plain(scores, (seed, position))
    assert choose_token(scores, None) == _plain(scores, None)
    least = float(scores.sort().values[size // 2])
    assert choose_token(scores, (seed, position), least) == _plain(scores, (seed, position), least)


def test_rounding_decides_between_equal_scores_as_in_plain_decoding(isa: str) -> None:
    """Scores so large that noise is rounded away: the first of the greatest sums is the token."""
    for size in (40, 4000):
        scores = _scores(size, 3, 1.0).round() * 2.0**22
        for seed in range(50):
            assert choose_token(scores, (seed, 1)) == _plain(scores, (seed, 1))


@pytest.mark.parametrize("size", [1, 16, 33, 3000])
@pytest.mark.parametrize("noise", [None, (5, 6)])
def test_rows_that_name_no_token(size: int, noise: tuple[int, int] | None, isa: str) -> None:
    scores = torch.full((size,), -torch.inf)
    assert choose_token(scores, noise) == NO_VALID_TOKEN
    scores[size - 1] = 1.0
    assert choose_token(scores, noise) == size - 1
    scores[size // 2] = torch.inf
    assert choose_token(scores, noise) == size // 2
    scores[size // 3] = torch.nan
    assert choose_token(scores, noise) == NAN


def test_more_tokens_than_it_lists_are_all_looked_at(isa: str) -> None:
    scores = torch.full((3000,), 2.0**26)  # no noise is left of
    assert choose_token(scores, (1, 2)) == _plain(scores, (1, 2))


def test_every_token_comes_as_often_as_it_should(isa: str) -> None:
    distribution = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    scores = torch.cat([distribution.log(), torch.full((2000,), -30.0)])
    chosen = torch.tensor([choose_token(scores, (7, position)) for position in range(4000)])
    found = torch.bincount(chosen, minlength=5)[:5] / 4000
    assert found.tolist() == pytest.approx(distribution.tolist(), abs=0.03)


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**40))
def test_keys_are_those_of_the_noise(seed: int, position: int) -> None:
    assert noise_key(seed, position) == int(_keys(torch.tensor([seed]), torch.tensor([position]))) % 2**64


def test_noise_for_few_tokens_is_the_noise(isa: str) -> None:
    ids = torch.randint(2**18, (7, 90), generator=torch.Generator().manual_seed(0))
    seeds, positions = [3, 2**63 - 1, 0, 5, 5, 6, 7], [1, 2, 3, 4, 4, 2**40, 0]
    wanted = gumbel(torch.tensor(seeds), torch.tensor(positions), ids)
    torch.testing.assert_close(noise_for(seeds, positions, ids), wanted, rtol=2e-7, atol=1e-7)


@given(
    size=st.sampled_from([64, 65, 300, 1000, 8192, 9001]),
    count=st.sampled_from([1, 3, 16, 128]),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["far apart", "some are equal", "all are equal", "few are finite", "infinite", "nan"]),
)
def test_the_greatest_scores_in_order(isa: str, size: int, count: int, seed: int, kind: str) -> None:
    count = min(count, size)
    rows = torch.stack([_scores(size, seed + i, 4.0) for i in range(3)])
    if kind == "some are equal":
        rows = rows.round()
    elif kind == "all are equal":
        rows[1] = 2.0
    elif kind == "few are finite":
        rows[1, 5:] = -torch.inf
    elif kind == "infinite":
        rows[1, size // 2] = torch.inf
    elif kind == "nan":
        rows[1, size // 2] = torch.nan
    values, tokens = most_probable(rows, count)
    assert torch.equal(values.nan_to_num(1e9), rows.topk(count, dim=-1).values.nan_to_num(1e9))
    assert torch.equal(rows.gather(1, tokens).nan_to_num(1e9), values.nan_to_num(1e9))
    assert all(len(set(row)) == count for row in tokens.tolist())


@pytest.mark.parametrize("count", [1, 20, 100, 300])
def test_the_first_of_equal_scores_comes_first_in_native_code_and_in_pytorch(count: int) -> None:
    rows = torch.stack([_scores(300, i, 4.0).round() for i in range(3)])
    rows[0, 5::7] = -torch.inf
    rows[1, ::2] = 0.0
    rows[1, 1::2] = -0.0
    rows[2, 7:] = -torch.inf
    wanted = rows.sort(dim=1, descending=True, stable=True)
    for find in (by_keys, most_probable_in_order):
        values, tokens = find(rows, count)
        assert torch.equal(values, wanted.values[:, :count])
        assert torch.equal(tokens, wanted.indices[:, :count])
