"""Random inputs of attention under a TreeLayout, what attention over explicit paths makes of them, and drawn trees."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import reference
from specinfer.core.tree import Distribution, Draw, TokenTree
from specinfer.ops.kv_types import NO_SCALES, KVScales, to_stored
from specinfer.ops.tree_layout import TreeLayout, num_words, pack_bits

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SLOPES = torch.tensor([[-0.5], [0.25], [0.125], [0.06]]) * torch.arange(400)
# Of attention, for four heads.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "alibi": {"key_bias": SLOPES},
    "all": {"window": 4, "softcap": 2.0, "sinks": SINKS, "key_bias": SLOPES},
}


class Part(NamedTuple):
    """One request: its prefix, and a chain with a tree on its last token, of which passes before did the first ones."""

    prefix: int
    chain: int
    tree: TokenTree
    earlier: int = 0

    @property
    def num_nodes(self) -> int:
        return self.chain + self.tree.num_guessed

    def visible(self) -> Tensor:
        """[nodes, nodes] bool."""
        size, root = self.num_nodes, self.chain - 1
        seen = np.zeros((size, size), dtype=np.bool_)
        seen[:, : self.chain] = np.tri(size, self.chain, dtype=np.bool_)
        seen[root:, root:] = self.tree.ancestry()
        return torch.from_numpy(seen)

    def positions(self) -> list[int]:
        root = self.prefix + self.chain - 1
        return [*range(self.prefix, root), *(root + depth for depth in self.tree.depths)]


class AttentionCase:
    """Tables are filled up with a slot that has NaN, and there are rows and requests of padding."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dims: tuple[int, int] = (16, 16),
        dtype: torch.dtype = torch.float32,
        is_chain: bool = False,
        padding: tuple[int, int] = (3, 1),
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.parts = parts
        total = sum(part.prefix + part.num_nodes for part in parts)
        slots = torch.randperm(total, generator=generator).int() + 1
        requests, num_new = len(parts) + padding[1], [part.num_nodes - part.earlier for part in parts]
        tokens, nodes = sum(num_new) + padding[0], max(part.num_nodes for part in parts)
        zeros = torch.zeros(requests, dtype=torch.int32)
        starts = torch.full((requests + 1,), sum(num_new), dtype=torch.int32)
        starts[: len(parts) + 1] = torch.tensor([0, *np.cumsum(num_new)])
        self.layout = TreeLayout(
            slot_table=torch.zeros((requests, max(part.prefix for part in parts) + 1), dtype=torch.int32),
            prefix_lens=zeros.clone(),
            starts=starts,
            node_slots=torch.zeros((requests, nodes), dtype=torch.int32),
            node_positions=torch.full((requests, nodes), 2**20, dtype=torch.int32),
            node_lens=zeros.clone(),
            visible=torch.full((tokens, num_words(nodes)), -1, dtype=torch.int32),  # of padding: whatever lies there
            positions=torch.zeros(tokens, dtype=torch.int32),
            max_new=max(num_new) + 1,
            is_chain=is_chain,
        )
        self.paths: list[Tensor] = []  # slots that each row sees
        at = 0
        for i, part in enumerate(parts):
            prefix, rest = slots[at : at + part.prefix], slots[at + part.prefix :][: part.num_nodes]
            at += part.prefix + part.num_nodes
            self._fill(i, part, prefix, rest)
        shape = (total + 1, kv_heads)
        self.keys, self.values = (torch.randn((*shape, dim), generator=generator).to(dtype) for dim in dims)
        self.keys[0] = self.values[0] = math.nan
        self.query = torch.randn((tokens, heads, dims[0]), generator=generator).to(dtype)
        self.query[len(self.paths) :] = math.nan
        self.scale, self.scales = dims[0] ** -0.5, NO_SCALES

    def store_as(self, dtype: torch.dtype, scales: KVScales) -> None:
        """Let keys and values be of a type with scales."""
        self.keys = to_stored(self.keys, dtype, 1 / scales.key)
        self.values = to_stored(self.values, dtype, 1 / scales.value)
        self.scales = scales

    def _fill(self, i: int, part: Part, prefix: Tensor, rest: Tensor) -> None:
        layout, visible, positions = self.layout, part.visible(), torch.tensor(part.positions(), dtype=torch.int32)
        layout.slot_table[i, : len(prefix)] = prefix
        layout.prefix_lens[i], layout.node_lens[i] = len(prefix), len(rest)
        layout.node_slots[i, : len(rest)] = rest
        layout.node_positions[i, : len(rest)] = positions
        rows = slice(int(layout.starts[i]), int(layout.starts[i + 1]))
        layout.positions[rows] = positions[part.earlier :]
        if not layout.is_chain:
            layout.visible[rows] = pack_bits(visible[part.earlier :], layout.visible.shape[1])
        self.paths += [torch.cat([prefix, rest[row]]) for row in visible[part.earlier :]]

    def run(self, attend: Any, **options: Any) -> Tensor:
        scales = {"scale": self.scale * self.scales.key, "value_scale": self.scales.value}
        return attend(self.query, self.keys, self.values, self.layout, **scales, **options)

    def expected(self, **features: Any) -> Tensor:
        """[tokens, heads, value_dim] float32 over the numbers that are stored, by tests/reference."""
        rows = [
            reference.attention(
                self.query[row].float(),
                self.keys[path].float() * self.scales.key,
                self.values[path].float() * self.scales.value,
                self.scale,
                **features,
            )
            for row, path in enumerate(self.paths)
        ]
        return torch.cat([torch.stack(rows), torch.zeros((self.layout.num_tokens - len(rows), *rows[0].shape))])

    def as_chain(self) -> TreeLayout:
        """The same without bits: they must not be read."""
        return replace(self.layout, visible=torch.zeros_like(self.layout.visible), is_chain=True)


def wide(nodes: int) -> TokenTree:
    """A root with so many children."""
    return TokenTree((0, *range(1, nodes + 1)), (-1, *[0] * nodes))


def bushy(nodes: int, seed: int = 0) -> TokenTree:
    """Each node under any of those before it."""
    source = np.random.default_rng(seed)
    return TokenTree(tuple(range(nodes + 1)), (-1, *(int(source.integers(node)) for node in range(1, nodes + 1))))


def drawn_tree(source: np.random.Generator, size: int, support: int, logits: Tensor) -> TokenTree:
    """Draws without replacement from a few of the likely tokens of a node, and duplicates."""
    tokens, parents, made = [0], [-1], list[Draw]()
    supports = dict[int, Any]()
    while len(tokens) < size:
        parent = int(source.integers(len(tokens)))
        if parent not in supports:
            supports[parent] = source.choice(logits[parent].topk(9).indices, support, replace=False)
        ids = supports[parent]
        distribution = np.exp(logits[parent, ids].double().numpy() + 0.5 * source.normal(size=support))
        distribution /= distribution.sum()
        removed = tuple[int, ...]()
        for _ in range(int(source.integers(1, 4))):
            whole = Distribution(ids, distribution, removed)
            place = int(source.choice(support, p=whole.weights()))
            known = next(
                (n for n in range(1, len(tokens)) if (parents[n], tokens[n]) == (parent, int(ids[place]))), None
            )
            if known is None:
                known = len(tokens)
                tokens.append(int(ids[place]))
                parents.append(parent)
            made.append(Draw(known, "a", whole))
            if source.random() < 0.7 and len(removed) < support - 1:
                removed = (*removed, place)
    return TokenTree(tuple(tokens), tuple(parents), tuple(made))
