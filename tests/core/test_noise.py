"""The shared noise: against plain integers, against its distribution, and with samplers that must fail."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import reference
from specinfer.core.noise import UniformStream, derive_seed, draws_of, gumbel

POSITIONS = 20_000
LOGITS = torch.tensor([1.5, -2.0, 0.3, 0.0, 2.2, -0.7])


def _noise(seed: int, positions: Tensor, num_tokens: int) -> Tensor:
    return gumbel(torch.full_like(positions, seed), positions, torch.arange(num_tokens))


def test_hash_is_splitmix64() -> None:
    """The first outputs of the published generator, from seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    state = [(1234567 + (i + 1) * 0x9E3779B97F4A7C15) % 2**64 for i in range(4)]
    assert [reference.splitmix64(x) for x in state] == published
    assert [reference.unsplitmix64(y) for y in published] == state


@given(
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**31),
    tokens=st.lists(st.integers(0, 2**20), min_size=1, max_size=4),
)
@example(seed=0, position=0, tokens=[0])
@example(seed=2**63 - 1, position=2**31, tokens=[2**20])
def test_equals_plain_integers(seed: int, position: int, tokens: list[int]) -> None:
    row = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.tensor(tokens))
    wanted = torch.tensor([[reference.gumbel(seed, position, token) for token in tokens]])
    torch.testing.assert_close(row, wanted, rtol=1e-6, atol=1e-6)
    assert row.dtype == torch.float32


def test_made_alone_or_together_it_is_the_same() -> None:
    seeds, positions, tokens = torch.tensor([3, 3, 9]), torch.tensor([0, 7, 7]), torch.arange(30_000)
    together = gumbel(seeds, positions, tokens)
    for i in range(3):
        some = torch.tensor([41, 5, 29_999, 11_000])
        assert torch.equal(gumbel(seeds[i : i + 1], positions[i : i + 1], some)[0], together[i, some])


def _legal_case(bits: int, token: int) -> tuple[int, int]:
    """A (seed, position) at which this token's hash is `bits`."""
    for position in range(64):
        key = (reference.unsplitmix64(bits) - (token + 1) * 0x9E3779B97F4A7C15) % 2**64
        inner = reference.unsplitmix64(key) ^ ((position * 0x9E3779B97F4A7C15) % 2**64)
        seed = (reference.unsplitmix64(inner) - 0x9E3779B97F4A7C15) % 2**64
        if seed < 2**63:
            return seed, position
    raise AssertionError


@pytest.mark.parametrize("bits", [0, 1, 2**64 - 1, 2**64 - 2**11, 2**63])
def test_every_hash_gives_finite_noise(bits: int) -> None:
    """Infinite noise would lift a token that cannot be said: -inf + inf is no number, and argmax takes it."""
    seed, position = _legal_case(bits, token=0)
    (value,) = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.tensor([0]))[0].tolist()
    assert math.isfinite(value)
    assert value == pytest.approx(reference.gumbel(seed, position, 0), abs=1e-5)


# -------------------------------------------------------------------------------------------- coins


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_uniform_numbers_are_splitmix64_of_a_stream_of_their_own(seed: int) -> None:
    uniforms, state = UniformStream(seed), derive_seed(seed, 2**62)
    for _ in range(20):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        toss = uniforms.next_uniform()
        assert toss == (reference.splitmix64(state) >> 11) * 2.0**-53
        assert 0 <= toss < 1


def test_uniform_numbers_depend_on_the_seed_alone() -> None:
    tossed = {
        seed: tuple(uniforms.next_uniform() for _ in range(3))
        for seed in range(50)
        if (uniforms := UniformStream(seed))
    }
    again = UniformStream(7)
    assert tossed[7] == tuple(again.next_uniform() for _ in range(3))
    assert len({toss for tosses in tossed.values() for toss in tosses}) == 150


def test_streams_of_a_seed_have_nothing_in_common() -> None:
    """What a drafter draws with, what a rule tosses, and what the target says with."""
    count = 20_000
    uniforms = UniformStream(3)
    tossed = torch.tensor([uniforms.next_uniform() for _ in range(count)], dtype=torch.float64)
    assert abs(chi_square(_counts((tossed * 64).long(), 64), torch.full((64,), 1 / 64))) < 4
    pairs = (tossed[:-1] * 8).long() * 8 + (tossed[1:] * 8).long()
    assert abs(chi_square(_counts(pairs[::2], 64), torch.full((64,), 1 / 64))) < 4
    shared = _noise(3, torch.arange(count), 1)[:, 0].double()
    drawn = _noise(derive_seed(3, draws_of("a")), torch.arange(count), 1)[:, 0].double()
    for a, b in ((tossed, shared), (tossed, drawn), (shared, drawn)):
        for x, y in ((a, b), (a[1:], b[:-1]), (a[:-1], b[1:])):
            assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 4 / math.sqrt(count)


def test_drafters_of_different_names_draw_from_different_streams() -> None:
    names = ["small", "small sampled", "ngram", "a", "b", ""]
    seeds = {derive_seed(3, draws_of(name)) for name in names}
    assert len(seeds) == len(names)
    assert seeds == {derive_seed(3, draws_of(name)) for name in names}


def test_streams_are_far_from_the_seeds_of_requests() -> None:
    """Requests of one engine are numbered from 0; no such number is a stream's."""
    ours = {derive_seed(5, stream) for stream in (draws_of("a"), 2**62)}
    assert not ours & {derive_seed(5, i) for i in range(10_000)}


# --------------------------------------------------------------------------------------- statistics


def chi_square(observed: Tensor, distribution: Tensor) -> float:
    """The statistic as a standard normal deviate (Wilson and Hilferty): beyond 4 by chance in 3e-5 of cases."""
    expected = distribution * observed.sum()
    assert bool((expected >= 5).all()), "too few draws for this test"
    free = len(distribution) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


def _counts(samples: Tensor, num_kinds: int) -> Tensor:
    return torch.bincount(samples, minlength=num_kinds).double()


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_moments(seed: int) -> None:
    noise = _noise(seed, torch.arange(POSITIONS), 8).double()
    root = math.sqrt(noise.numel())
    assert float(noise.mean()) == pytest.approx(0.5772156649, abs=4 * 1.2825 / root)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=4 * 3.0 / root)  # kurtosis is 5.4


@pytest.mark.parametrize("seed", [0, 5])
def test_uniform_beneath_the_gumbel(seed: int) -> None:
    uniform = torch.exp(-torch.exp(-_noise(seed, torch.arange(POSITIONS), 4).double())).flatten()
    bins = _counts((uniform * 64).long().clamp(max=63), 64)
    assert abs(chi_square(bins, torch.full((64,), 1 / 64))) < 4


def test_no_correlation_between_neighbours() -> None:
    """Of positions, tokens and seeds: numbers that lie close together give noise that has nothing in common."""
    noise = _noise(7, torch.arange(POSITIONS), 2)
    other_seed = _noise(8, torch.arange(POSITIONS), 1)
    pairs = [(noise[1:, 0], noise[:-1, 0]), (noise[:, 0], noise[:, 1]), (noise[:, :1], other_seed)]
    for a, b in pairs:
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(POSITIONS)


def _coupled(noise: Tensor) -> Tensor:
    return (LOGITS + noise).argmax(dim=-1)


def _pairs(samples: Tensor) -> Tensor:
    """Tokens at positions (0, 1), (2, 3), ... as one number each."""
    return samples[0::2] * len(LOGITS) + samples[1::2]


def _worst(samples: Tensor) -> float:
    """How far single tokens, and tokens at neighbouring positions, are from independent draws of softmax."""
    distribution = LOGITS.double().softmax(dim=-1)
    joint = torch.outer(distribution, distribution).flatten()
    common = joint * POSITIONS / 2 >= 5  # rare pairs are counted together
    pairs = _counts(_pairs(samples), len(joint))
    pooled = torch.cat([pairs[common], pairs[~common].sum().reshape(1)])
    pooled_distribution = torch.cat([joint[common], joint[~common].sum().reshape(1)])
    return max(chi_square(_counts(samples, len(distribution)), distribution), chi_square(pooled, pooled_distribution))


@pytest.mark.parametrize("seed", range(5))
def test_coupled_sampling_draws_from_the_softmax(seed: int) -> None:
    assert _worst(_coupled(_noise(derive_seed(seed, 0), torch.arange(POSITIONS), len(LOGITS)))) < 4


def test_over_seeds_too() -> None:
    """One position of many requests, seeded one after the other, as `n` and the engine's counter do."""
    by_request = torch.tensor([derive_seed(0, i) for i in range(POSITIONS // 2)])
    in_a_row = torch.arange(POSITIONS // 2)
    for seeds in (by_request, in_a_row):
        samples = _coupled(gumbel(seeds, torch.full_like(seeds, 12), torch.arange(len(LOGITS))))
        assert chi_square(_counts(samples, len(LOGITS)), LOGITS.double().softmax(dim=-1)) < 4


def test_null_arm_passes() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.multinomial(LOGITS.softmax(dim=-1), POSITIONS, replacement=True, generator=generator)
    assert _worst(samples) < 4


def test_known_bad_arms_fail() -> None:
    """The same test finds noise used twice, noise that ignores the token, and noise of a wrong distribution."""
    positions, tokens = torch.arange(POSITIONS), len(LOGITS)
    reused = _noise(0, positions // 2, tokens)
    of_position_only = _noise(0, positions, 1).expand(-1, tokens)
    too_small = 0.9 * _noise(0, positions, tokens)
    normal = torch.randn(POSITIONS, tokens, generator=torch.Generator().manual_seed(0)) * math.pi / math.sqrt(6)
    by_rank = _noise(0, positions, tokens).sort(dim=-1).values
    for bad in (reused, of_position_only, too_small, normal, by_rank):
        assert _worst(_coupled(bad)) > 4


def test_derived_seeds_are_legal_and_differ() -> None:
    seeds = {derive_seed(seed, index) for seed in (0, 1, 2, 2**63 - 1) for index in range(500)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(3, 4) == derive_seed(3, 4)
