"""Tree attention against attention over each token's explicit path, one head and one key at a time."""

import math
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from specinfer.core.tree import TokenTree
from specinfer.model.attention import UnsupportedAttentionError, tree_attention
from specinfer.model.batch import Piece, pack
from specinfer.model.kv_tensors import KVTensors, LayerShape
from specinfer.ops import attends
from tiny import trees
from tree_cases import FEATURES

CPU = torch.device("cpu")
MODULE: Any = SimpleNamespace(layer_idx=0)
HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 6, 5
CASES = FEATURES | {"scaling": {"scaling": 0.3}}
NAMES = {"window": "sliding_window", "sinks": "s_aux"}  # that transformers has for features


class Rig:
    """Random queries, keys and values for some spans; the prefixes are already in the store."""

    def __init__(
        self,
        parts: list[tuple[int, int, TokenTree]],
        seed: int = 0,
        *,
        heads: int = HEADS,
        kv_heads: int = KV_HEADS,
        dims: tuple[int, int] = (KEY_DIM, VALUE_DIM),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        total = sum(prefix + chain + tree.num_guessed for prefix, chain, tree in parts)
        self.store = KVTensors([LayerShape(kv_heads, *dims)], total + 3, dtype, CPU)
        # What unused slots hold must not matter.
        self.store.keys[0].normal_(generator=self.generator)
        self.store.values[0].normal_(generator=self.generator)
        slots = torch.randperm(total + 3, generator=self.generator).numpy()
        self.pieces, start = [], 0
        for prefix, chain, tree in parts:
            end = start + prefix + chain + tree.num_guessed
            tokens = [*range(chain - 1), tree.tokens[0]]
            self.pieces.append(
                Piece.from_span(tokens, tree, slots[start : start + prefix], slots[start + prefix : end])
            )
            start = end
        num_new = sum(len(piece.tokens) for piece in self.pieces)
        self.query = self.random(1, heads, num_new, dims[0]).to(dtype)
        self.key, self.value = (self.random(1, kv_heads, num_new, dim) for dim in dims)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def run(self, *, native: bool = True, **features: Any) -> Tensor:
        batch = pack(self.pieces, self.store, CPU, native=native)
        features = {NAMES.get(name, name): value for name, value in features.items()}
        out, weights = tree_attention(MODULE, self.query, self.key, self.value, None, forward_batch=batch, **features)
        assert weights is None
        assert out.shape == (1, self.query.shape[2], self.query.shape[1], self.value.shape[3])
        return out[0]

    def expected(self, **features: Any) -> Tensor:
        """Call after `run`: the new keys and values are in the store by then."""
        keys, values = self.store.keys[0], self.store.values[0]
        scale = features.pop("scaling", self.query.shape[3] ** -0.5)
        paths = [
            [*piece.prefix_slots, *np.asarray(piece.slots)[visible]]
            for piece in self.pieces
            for visible in piece.visible
        ]
        rows = [
            reference.attention(
                self.query[0, :, row].float(), keys[path].float(), values[path].float(), scale, **features
            )
            for row, path in enumerate(paths)
        ]
        return torch.stack(rows)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12)
@given(
    parts=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4), trees(max_nodes=6)), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_equals_attention_over_the_path(name: str, parts: list[tuple[int, int, TokenTree]], seed: int) -> None:
    rig = Rig(parts, seed)
    out = rig.run(**CASES[name])
    torch.testing.assert_close(out, rig.expected(**CASES[name]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_long_chunks_next_to_short_ones(name: str) -> None:
    tree = TokenTree((1, 2, 3), (-1, 0, 0))
    rig = Rig([(3, 2, tree), (2, 131, TokenTree.root(1)), (0, 1, tree)])
    torch.testing.assert_close(rig.run(**CASES[name]), rig.expected(**CASES[name]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_what_others_cannot_see_cannot_hurt_them(name: str) -> None:
    """NaN in one request's keys and values stays there, whichever slots they lie in."""
    rig = Rig([(6, 1, TokenTree.root(1)), (1, 1, TokenTree.chain(1, [2]))])
    slots = np.arange(10)  # the first request has slot 0
    rig.pieces = [
        Piece.from_span([1], TokenTree.root(1), slots[:6], slots[6:7]),
        Piece.from_span([1], TokenTree.chain(1, [2]), slots[7:8], slots[8:]),
    ]
    clean = rig.run(**CASES[name])
    rig.store.keys[0][:6] = rig.store.values[0][:6] = math.nan
    out = rig.run(**CASES[name])
    assert bool(out[0].isnan().all())
    torch.testing.assert_close(out[1:], clean[1:])


PARTS = [
    (0, 1, TokenTree.root(1)),
    (70, 3, TokenTree((1, 2, 3, 4, 5), (-1, 0, 0, 1, 1))),
    (31, 1, TokenTree.root(1)),
    (5, 40, TokenTree.chain(1, [2, 3])),
    (64, 1, TokenTree((1, *range(2, 12)), (-1, *[0] * 10))),
]


@cache
def rig_of(name: str, heads: int, dim: int, dtype: torch.dtype) -> tuple[Rig, Tensor]:
    """A rig and what it is to compute, for all instruction sets."""
    rig = Rig(PARTS, heads=heads, dims=(dim, dim), dtype=dtype)
    rig.run(**CASES[name])  # stores the new keys and values
    return rig, rig.expected(**CASES[name])


@pytest.mark.parametrize(
    ("name", "heads", "dim", "dtype"),
    [
        ("plain", 2, 6, torch.float32),
        ("scaling", 6, 32, torch.bfloat16),
        ("window", 6, 64, torch.float16),
        ("plain", 4, 80, torch.bfloat16),
        ("window", 4, 64, torch.bfloat16),
        ("plain", 80, 8, torch.float32),
        ("plain", 2, 256, torch.bfloat16),
        ("window", 4, 512, torch.bfloat16),
        ("plain", 4, 300, torch.float32),
    ],
)
def test_native_attention(isa: str, name: str, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Requests of all sizes together: blocks of keys full and not, rows of one vector and of several."""
    rig, expected = rig_of(name, heads, dim, dtype)
    batch = pack(rig.pieces, rig.store, CPU)
    assert batch.native is not None
    assert attends(rig.store.keys[0], rig.store.values[0])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    out = rig.run(**CASES[name])
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@cache
def rig_of_a_block() -> tuple[Rig, Tensor]:
    """Return a block that is not causal next to a short request, and the output of the slow rule."""
    rig = Rig([(505, 1, TokenTree.chain(1, range(2, 17))), (3, 1, TokenTree.root(1))], heads=40, dims=(16, 16))
    rig.pieces[0] = replace(rig.pieces[0], visible=np.ones((16, 16), dtype=np.bool_))
    rig.run()  # stores the new keys and values
    return rig, rig.expected()


def test_tokens_of_a_block_that_is_not_causal_see_later_ones_in_the_next_part_of_the_keys(isa: str) -> None:
    """Keys are taken in parts of 512 positions, and with so many heads a few tokens at a time."""
    rig, expected = rig_of_a_block()
    out = rig.run()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, rig.run(native=False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_native_attention_lets_what_is_not_finite_show(isa: str, dtype: torch.dtype) -> None:
    """In whoever sees it; another request never does."""
    rig = Rig([(3, 1, TokenTree.chain(1, [2])), (40, 1, TokenTree.root(1))], dims=(20, 20), dtype=dtype)
    clean = rig.run()
    for spoiled in (rig.key, rig.value):
        spoiled[0, :, 0] = math.inf
    out = rig.run()
    assert bool((~out[:2].isfinite()).any())
    assert torch.equal(out[2], clean[2])


@pytest.mark.parametrize(("name", "heads", "dtype"), [("plain", 4, torch.bfloat16), ("window", 8, torch.float32)])
def test_long_contexts_are_taken_in_parts(isa: str, name: str, heads: int, dtype: torch.dtype) -> None:
    """A tree that crosses a part's border, a chain of many rows and a short request, equal to PyTorch's attention."""
    features = {"window": 600} if name == "window" else {}
    parts = [(1021, 1, TokenTree.chain(1, [2, 3, 4])), (1100, 30, TokenTree.root(1)), (7, 1, TokenTree.root(1))]
    rig = Rig(parts, heads=heads, dims=(16, 16), dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    out, wanted = rig.run(**features), rig.run(native=False, **features)
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requests_get_the_same_to_the_bit_together_and_alone(isa: str, dtype: torch.dtype) -> None:
    """After contexts of several parts, with work enough for all threads: short chains, a tree and a long chain."""
    short = [(600 + 97 * i, 1, TokenTree.chain(1, [2, 3])) for i in range(9)]
    parts = [*short, (1020, 2, TokenTree((1, 2, 3, 4), (-1, 0, 0, 1))), (520, 90, TokenTree.root(1))]
    rig = Rig(parts, heads=8, kv_heads=4, dims=(40, 40), dtype=dtype)
    rig.query = rig.query.float()  # as is the output, which in 16 bits would hide differences
    together, first = rig.run(), 0
    alone = Rig(parts[:1], heads=8, kv_heads=4, dims=(40, 40), dtype=dtype)
    alone.store = rig.store
    for piece in rig.pieces:
        end = first + len(piece.tokens)
        alone.pieces = [piece]
        alone.query, alone.key, alone.value = (x[:, :, first:end] for x in (rig.query, rig.key, rig.value))
        assert torch.equal(alone.run(), together[first:end])
        first = end


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("window", [None, 700])
def test_a_prefix_may_leave_out_tokens(native: bool, window: int | None) -> None:
    """What is left out counts for windows, because positions are true, and for nothing else."""
    rig = Rig([(1300, 1, TokenTree.chain(1, [2]))], heads=4, dims=(8, 8))
    whole = rig.pieces[0]
    kept = np.concatenate([np.arange(5), np.arange(580, 640), np.arange(1200, 1300)])
    rig.pieces = [replace(whole, prefix_slots=whole.prefix_slots[kept], prefix_positions=kept)]
    out = rig.run(native=native, window=window)
    if window is not None:
        kept = kept[1300 - kept < window]
    near = Rig([(0, 1, TokenTree.root(1))])
    near.store, near.query, near.key, near.value = rig.store, rig.query, rig.key, rig.value
    near.pieces = [replace(whole, prefix_slots=whole.prefix_slots[kept])]
    torch.testing.assert_close(out[:1], near.expected()[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("prefix", "dim", "dtype", "size"),
    [
        *product([40, 62, 509, 1020], [20, 64, 512], [torch.float32, torch.bfloat16, torch.float16], [1.0]),
        (40, 64, torch.bfloat16, 2.0**-127),
    ],
)
def test_a_token_gets_the_same_to_the_bit_in_a_tree_and_in_a_chain(
    isa: str, prefix: int, dim: int, dtype: torch.dtype, size: float
) -> None:
    """Whatever the number of rows and the order of nodes: some lie behind a part's border, others before it.

    Values may be of any `size`, subnormal ones too.
    """
    path = [1, 2, 3, 4, 5, 6]
    tokens = (1, 20, 2, 3, 21, 4, 22, 23, 5, 24, 6, 25)
    parents = (-1, 0, 0, 2, 1, 3, 4, 0, 5, 6, 8, 9)
    on_path = [tokens.index(token) for token in path]
    tree = Rig([(prefix, 1, TokenTree(tokens, parents)), (700, 1, TokenTree.root(1))], dims=(dim, dim), dtype=dtype)
    tree.query = tree.query.float()  # the output is, too: rounded to 16 bits, it would hide differences
    tree.value *= size
    tree.store.values[0].mul_(size)
    wanted = tree.run()[on_path]
    slots = tree.pieces[0].slots[on_path]
    for first in range(len(path)):  # each token alone after those before it, as plain decoding has them
        alone = Rig([(0, 1, TokenTree.root(1))], dims=(dim, dim), dtype=dtype)
        alone.store = tree.store
        known = np.concatenate([tree.pieces[0].prefix_slots, slots[:first]])
        alone.pieces = [Piece.from_span([path[first]], TokenTree.root(path[first]), known, slots[first : first + 1])]
        alone.query, alone.key, alone.value = (x[:, :, [on_path[first]]] for x in (tree.query, tree.key, tree.value))
        assert torch.equal(alone.run()[0], wanted[first])


@pytest.mark.covering(1)
@pytest.mark.parametrize("heads", [65, 71, 200])
def test_very_many_heads_of_one_key_head(isa: str, heads: int) -> None:
    """As Falcon has them."""
    rig = Rig([(40, 2, TokenTree.chain(1, [2])), (1, 1, TokenTree.root(1))], heads=heads, kv_heads=1, dims=(8, 8))
    torch.testing.assert_close(rig.run(), rig.expected(), rtol=1e-5, atol=1e-5)


def test_new_keys_are_in_the_store_afterwards() -> None:
    rig = Rig([(2, 2, TokenTree.chain(1, [2]))])
    rig.run()
    slots = torch.from_numpy(rig.pieces[0].slots.copy())
    assert torch.equal(rig.store.keys[0][slots], rig.key[0].transpose(0, 1))
    assert torch.equal(rig.store.values[0][slots], rig.value[0].transpose(0, 1))


def test_what_is_not_known_is_refused() -> None:
    rig = Rig([(0, 1, TokenTree.root(1))])
    with pytest.raises(UnsupportedAttentionError, match="position_bias"):
        rig.run(position_bias=torch.zeros(1))
    rig.run(position_bias=None, output_attentions=False, is_causal=True)
    with pytest.raises(UnsupportedAttentionError, match="mask"):
        tree_attention(
            MODULE, rig.query, rig.key, rig.value, torch.zeros(1), forward_batch=pack(rig.pieces, rig.store, CPU)
        )
    with pytest.raises(UnsupportedAttentionError, match="keywords"):
        tree_attention(MODULE, rig.query, rig.key, rig.value, None)
    seeing = SimpleNamespace(layer_idx=0, is_causal=False)
    with pytest.raises(UnsupportedAttentionError, match="later"):
        tree_attention(seeing, rig.query, rig.key, rig.value, None)  # type: ignore[arg-type]
