"""TreeLayout: the slots of a pass's keys and the tree attention mask, as tensors of shapes independent of the trees.

A request's new tokens see its whole prefix, which needs no mask. In the tree part (nodes of previous passes, then the
new tokens) they see what the bits of `visible` select: their ancestors and themselves. An example of two requests, the
second with one earlier node (slot 6) and two new tokens, of which only the first is its child:

    slot_table     [[3, 1, 0], [2, 0, 0]]     prefix_lens  [2, 1]     values beyond a length are never read
    starts         [0, 1, 3]                  rows 1 and 2 of the packed queries are the second request's
    node_slots     [[4, 0, 0], [6, 5, 7]]     node_lens    [1, 3]
    node_positions [[2, 0, 0], [1, 2, 1]]
    visible        [[0b1], [0b011], [0b100]]
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 32  # bits


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """The slots and masks of one launch. All tensors are int32 and on one device."""

    slot_table: Tensor  # [requests, max_context] slots of each request's prefix, in order; at positions 0, 1, ...
    prefix_lens: Tensor  # [requests] tokens of the prefix, which all its new tokens see
    starts: Tensor  # [requests + 1] first row of each request's new tokens; rows from the last one on are padding
    node_slots: Tensor  # [requests, max_nodes] slots of the tree part: earlier nodes, then the new tokens
    node_positions: Tensor  # [requests, max_nodes]
    node_lens: Tensor  # [requests] nodes in use
    visible: Tensor  # [tokens, words] bit b of word w: the token sees node 32 w + b of its request
    positions: Tensor  # [tokens] of the queries
    max_new: int  # most new tokens of one request that a launch is made for
    is_chain: bool  # `visible` is not read: a token sees all nodes of its request up to itself

    def __post_init__(self) -> None:
        requests, nodes = self.node_slots.shape
        assert self.slot_table.shape[0] == len(self.prefix_lens) == len(self.node_lens) == requests
        assert len(self.starts) == requests + 1
        assert self.node_positions.shape == self.node_slots.shape
        assert len(self.visible) == len(self.positions)
        assert self.is_chain or self.visible.shape[1] * WORD >= nodes
        assert self.max_new > 0

    @property
    def num_requests(self) -> int:
        return len(self.prefix_lens)

    @property
    def num_tokens(self) -> int:
        """Number of rows of the packed queries, padding included."""
        return len(self.positions)


def num_words(num_nodes: int) -> int:
    """Return the number of words for a token's bits, at least one, because kernels need a valid pointer."""
    return max(-(-num_nodes // WORD), 1)


def pack_bits(visible: Tensor, words: int | None = None) -> Tensor:
    """Pack bool `visible` [..., nodes] into int32 [..., words], padded with zero bits."""
    nodes = visible.shape[-1]
    words = num_words(nodes) if words is None else words
    assert nodes <= words * WORD
    bits = torch.nn.functional.pad(visible, (0, words * WORD - nodes)).unflatten(-1, (words, WORD))
    values = torch.bitwise_left_shift(bits.to(torch.int64), torch.arange(WORD, device=visible.device))
    return values.sum(dim=-1).to(torch.int32)  # wraps: bit 31 is the sign


def unpack_bits(words: Tensor, nodes: int) -> Tensor:
    """Unpack int32 `words` [..., words] into bool [..., nodes]."""
    bits = torch.bitwise_right_shift(words.unsqueeze(-1), torch.arange(WORD, dtype=torch.int32, device=words.device))
    return bits.bitwise_and(1).flatten(-2)[..., :nodes].bool()
