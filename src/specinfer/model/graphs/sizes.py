"""The sizes that passes are padded to: few enough to capture all, and close enough together to waste little."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specinfer.model.batch import Piece
from specinfer.ops.tree_layout import WORD

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_NODES = tuple(WORD * 2**i for i in range(8))  # whole words of bits
MAX_ROWS = 256  # largest number of logit rows of a captured pass
MAX_STATES = 96  # most states of recurrent layers that a captured pass holds at a time
_LOADED_CHAINS = 16  # most tokens of a chain with one logit row that is captured at load
_LOADED_TREES = 64  # most tokens of a pass over one request's tree that is captured at load


@dataclass(frozen=True, slots=True)
class Size:
    """The fixed sizes of a captured pass.

    Attributes:
        tokens: Rows of the pass, padding included.
        requests: Largest number of requests; unused ones have no tokens.
        new: Most new tokens of one request.
        nodes: Most nodes of one request's tree part: earlier ones and new tokens.
        rows: Number of rows whose logits are computed.
        is_chain: Whether every new token sees all nodes before it, so that no mask is read.
        adapts: Whether some rows have adapters.
        scanned: Tokens that recurrent layers compute: new ones, and known ones once more. 0 if there are none.
    """

    tokens: int
    requests: int
    new: int
    nodes: int
    rows: int
    is_chain: bool
    adapts: bool = False
    scanned: int = 0

    @classmethod
    def from_pieces(cls, pieces: Sequence[Piece], scanned: int = 0) -> "Size":
        """Return the exact size of a pass."""
        news = [len(piece.tokens) for piece in pieces]
        return cls(
            tokens=sum(news),
            requests=len(pieces),
            new=max(news),
            nodes=max(piece.visible.shape[1] for piece in pieces),
            rows=sum(piece.num_logits for piece in pieces),
            is_chain=all(map(is_chain, pieces)),
            adapts=any(piece.adapter is not None for piece in pieces),
            scanned=scanned,
        )

    def padded(self) -> "Size | None":
        """Return the smallest captured size that this fits into, or None if it is too large."""
        tokens, requests = at_least(TOKENS, self.tokens), at_least(REQUESTS, self.requests)
        nodes = at_least(_NODES, self.nodes)
        if tokens is None or requests is None or nodes is None:
            return None
        new = tokens if requests == 1 else min(power_of_two(self.new), tokens)
        # Chunks of prompts need the logits of at most their last rows, trees of all rows.
        rows = requests if self.rows <= requests else tokens
        size = Size(tokens, requests, new, nodes, rows, self.is_chain, self.adapts)
        return size.scanning(self.scanned) if self.scanned else size

    def scanning(self, scanned: int) -> "Size | None":
        """Return the size if recurrent layers compute this many tokens; None if they are too many."""
        fitting = at_least(TOKENS, max(scanned, self.tokens))
        # Of a tree, any token may be the parent of one that does not follow it.
        if fitting is None or (fitting > MAX_STATES and not self.is_chain):
            return None
        return replace(self, scanned=fitting)


def power_of_two(count: int) -> int:
    """Round up to a power of two."""
    return 1 << (count - 1).bit_length()


def at_least(ladder: Sequence[int], count: int) -> int | None:
    """Return the first number of an ascending ladder that is at least `count`, or None."""
    place = bisect.bisect_left(ladder, count)
    return ladder[place] if place < len(ladder) else None


def max_rows(*, has_states: bool) -> int:
    """Return the most rows of a step on a device; with recurrent layers each may need a state of its own."""
    return MAX_STATES if has_states else MAX_ROWS


def is_chain(piece: Piece) -> bool:
    """Return whether each new token sees all nodes before it."""
    visible = piece.visible
    new, nodes = visible.shape
    # Each sees the first nodes up to itself, and no other: making a mask to compare with takes longer for prompts.
    seen = np.arange(nodes - new + 1, nodes + 1)
    sees_first = visible[-1].all() and np.array_equal(visible[:-1].argmin(axis=1), seen[:-1])
    return bool(sees_first and np.count_nonzero(visible) == seen.sum())


def loaded_sizes(max_requests: int) -> list[Size]:
    """Return the sizes to capture at load, largest first, because smaller ones reuse the memory of larger ones.

    They are: plain decoding of any number of requests, the trees of one request, and the chains that a drafter reads
    after a step. Others are captured once their passes have taken as long as a capture.
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
