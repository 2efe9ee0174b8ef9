"""The native walk down several trees accepts what plain decoding's tokens accept, to the last bit."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.trees import choose
from specinfer.core.tree import TokenTree
from specinfer.ops.cpu.walk import walk_trees
from specinfer.ops.trees import NAN, NO_VALID_TOKEN
from specinfer.verify import verify_coupled
from tiny import trees


def _walked(
    logits: list[torch.Tensor], several: list[TokenTree], noises: list[tuple[int, int]], heats: list[float]
) -> list[tuple[tuple[int, ...], int]]:
    """The walk on the tokens that `choose` names at every node."""
    chosen = []
    for rows, tree, (seed, position), heat in zip(logits, several, noises, heats, strict=True):
        seeds = torch.full((len(tree),), seed)
        positions = position + torch.tensor(tree.depths)
        chosen.append(choose(rows, seeds, positions, torch.full((len(tree),), heat)).tolist())
    kept = verify_coupled(several, lambda places: [chosen[i][node] for i, node in places])
    return [(acceptance.path, acceptance.next_token) for acceptance in kept]


@given(
    several=st.lists(trees(vocab=3, max_nodes=20), min_size=1, max_size=4),
    vocab=st.sampled_from([3, 17, 300, 2500]),
    seed=st.integers(0, 2**62),
    heats=st.lists(st.sampled_from([0.0, 1.0, 0.7, 1.3, 1e-3]), min_size=4, max_size=4),
    scale=st.sampled_from([0.0, 0.5, 8.0, 2.0**22]),
    spoiled=st.sampled_from([None, float("nan"), -float("inf"), float("inf")]),
)
def test_paths_are_those_of_plain_decoding(
    isa: str, several: list[TokenTree], vocab: int, seed: int, heats: list[float], scale: float, spoiled: float | None
) -> None:
    """Also with rows where rounding decides, and rows that name no token."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = [(torch.randn(len(tree), vocab, generator=generator) * 4).round() * scale for tree in several]
    for rows in logits:
        rows[:, :3] += 6 * scale  # the trees' tokens are likely, so paths are long
    if spoiled is not None:
        logits[0][seed % len(several[0])] = spoiled
    noises, heats = [(seed + i, seed % 1000 + 3 * i) for i in range(len(several))], heats[: len(several)]
    assert walk_trees(logits, several, noises, heats) == _walked(logits, several, noises, heats)


def test_large_rows_are_walked_on_several_threads(isa: str) -> None:
    several = [TokenTree((0, 1, 2), (-1, 0, 1))] * 5
    logits = [torch.randn(3, 40000, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    for rows in logits:
        rows[0, 1] = rows[1, 2] = 40.0
    noises, heats = [(i, 7) for i in range(5)], [0.0, 1.0, 0.5, 2.0, 1.0]
    found = walk_trees(logits, several, noises, heats)
    assert found == _walked(logits, several, noises, heats)
    assert [path for path, _ in found] == [(1, 2)] * 5


def test_a_row_without_a_token_ends_the_walk_with_its_reason(isa: str) -> None:
    tree = TokenTree((0, 1), (-1, 0))
    logits = [torch.zeros(2, 4) for _ in range(3)]
    for rows in logits:
        rows[0, 1] = 9.0
    logits[1][1], logits[2][1, 2] = -torch.inf, torch.nan
    found = walk_trees(logits, [tree] * 3, [(0, 5)] * 3, [0.0] * 3)
    assert found == [((1,), 0), ((1,), NO_VALID_TOKEN), ((1,), NAN)]
