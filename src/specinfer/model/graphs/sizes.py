"""The sizes that passes are padded to: few enough to be captured, close enough to waste little."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specinfer.kernels.tree_layout import WORD
from specinfer.model.batch import Piece

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_NODES = tuple(WORD * 2**i for i in range(8))  # whole words of bits
_LOADED_CHAINS = 16  # tokens of the largest one that is known
_LOADED_TREES = 64  # tokens of the largest pass over one request's tree that is captured when a model is loaded


@dataclass(frozen=True, slots=True)
class Size:
    """What is fixed in a captured pass.

    Attributes:
        tokens: Rows of the pass; those that nobody needs are padding.
        requests: At most, with new tokens or without.
        new: Most new tokens of one request.
        nodes: Most nodes of one request's tree part: earlier ones and new tokens.
        rows: Of which logits are wanted.
        is_chain: Every new token sees all nodes before it: no mask is read.
    """

    tokens: int
    requests: int
    new: int
    nodes: int
    rows: int
    is_chain: bool

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "Size":
        """Exactly that of a pass."""
        news = [len(piece.tokens) for piece in pieces]
        return cls(
            tokens=sum(news),
            requests=len(pieces),
            new=max(news),
            nodes=max(piece.visible.shape[1] for piece in pieces),
            rows=sum(piece.num_logits for piece in pieces),
            is_chain=all(map(is_chain, pieces)),
        )

    def padded(self) -> "Size | None":
        """The smallest size that holds it; None: it is larger than all."""
        tokens, requests = at_least(TOKENS, self.tokens), at_least(REQUESTS, self.requests)
        nodes = at_least(_NODES, self.nodes)
        if tokens is None or requests is None or nodes is None:
            return None
        new = tokens if requests == 1 else min(1 << (self.new - 1).bit_length(), tokens)
        # Of chunks of prompts the last rows are wanted at most, of trees all.
        rows = requests if self.rows <= requests else tokens
        return Size(tokens, requests, new, nodes, rows, self.is_chain)


def at_least(ladder: Sequence[int], count: int) -> int | None:
    """The first step of an ascending ladder that is not lower; None: there is none."""
    place = bisect.bisect_left(ladder, count)
    return ladder[place] if place < len(ladder) else None


def is_chain(piece: Piece) -> bool:
    """Whether each new token sees all nodes before it."""
    visible = piece.visible
    new, nodes = visible.shape
    return bool(visible.all() if new == 1 else np.array_equal(visible, np.tri(new, nodes, nodes - new, dtype=np.bool_)))


def loaded_sizes(max_requests: int) -> list[Size]:
    """Those that are captured when a model is loaded, largest first: memory of the larger serves the smaller ones.

    Plain decoding of any number of requests, and of one its trees, and what a drafter reads after a step; others are
    captured when they come.
    """
    most = at_least(REQUESTS, max_requests) or REQUESTS[-1]
    plain = [Size(count, count, 1, WORD, count, is_chain=True) for count in REQUESTS if count <= most]
    trees = [
        Size(tokens, 1, tokens, at_least(_NODES, tokens) or tokens, tokens, is_chain=False)
        for tokens in TOKENS
        if 1 < tokens <= _LOADED_TREES
    ]
    chains = [replace(size, is_chain=True) for size in trees]
    read = [replace(size, rows=1) for size in chains if size.tokens <= _LOADED_CHAINS]
    return sorted([*plain, *trees, *chains, *read], key=lambda size: (size.tokens, size.requests), reverse=True)
