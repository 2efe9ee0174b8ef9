"""Scores of many nodes at once: the logits of several requests' trees, processed, and what tokens are chosen from."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specinfer.core.draws import Ints
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree
from specinfer.ops import tree_ops
from specinfer.ops.logits import Truncation
from specinfer.verify.logits import adjust, is_adjusted, log_min_p, temperature_of, top_k_of


class Part(NamedTuple):
    """Nodes of one request's tree, and their logits, [nodes, vocab]."""

    request: Request
    tree: TokenTree
    nodes: Sequence[int]
    logits: Tensor

    def adjusted(self) -> Tensor:
        """Return the logits after constraints, biases and penalties."""
        if not is_adjusted(self.request, self.tree.max_depth):
            return self.logits
        return adjust(self.logits, self.request, [self.tree.path_tokens(node) for node in self.nodes])


class NodeScores(NamedTuple):
    """Adjusted logits of nodes, and parameters of each node."""

    rows: Tensor  # [nodes, vocab] float32
    seeds: Tensor  # [nodes] int64
    positions: Tensor  # [nodes] int64, of the tokens to choose
    temperatures: Tensor  # [nodes] float32; 0 is greedy
    least: Tensor | None  # [nodes] float32 least score of a token that may be sampled, or None to keep all

    @classmethod
    def from_parts(cls, parts: Sequence[Part], parameters: Tensor) -> "NodeScores":
        """Return the scores of all nodes; nothing waits for a device.

        Args:
            parts: The nodes.
            parameters: What `parameters_of` returns for them, on the device of their logits.
        """
        rows = torch.cat([part.adjusted() for part in parts])
        temperatures, top_p, share = parameters[3:].view(torch.float64)
        temperatures, least = temperatures.float(), None
        if any(part.request.params.truncates for part in parts):
            least = tree_ops.least_kept(rows, Truncation(temperatures, share.float(), parameters[1].int(), top_p))
        return cls(rows, parameters[0], parameters[2], temperatures, least)

    def between(self, start: int, end: int) -> "NodeScores":
        """Return those of a range of nodes."""
        rows, seeds, positions, temperatures = (one[start:end] for one in self[:4])
        least = None if self.least is None else self.least[start:end]
        return NodeScores(rows, seeds, positions, temperatures, least)

    def choose(self) -> Tensor:
        """Return the token of plain decoding after each node, `NAN` or `NO_VALID_TOKEN`: [nodes] int64."""
        return tree_ops.choose(*self)

    def kept(self) -> Tensor:
        """Return the logits over the temperatures, which are above 0, and -inf for what truncation drops."""
        scores = self.rows / self.temperatures.unsqueeze(1)
        return scores if self.least is None else scores.masked_fill(scores < self.least.unsqueeze(1), -torch.inf)


def parameters_of(parts: Sequence[Part]) -> Ints:
    """Return the parameters of nodes, [6, nodes]: seed, top-k, position; and as float64 temperature, top-p, min-p.

    Rows 0, 2 and 4 begin at multiples of 16 bytes: for other addresses kernels are compiled once more.
    """
    params, vocab = [part.request.params for part in parts], parts[0].logits.shape[1]
    numbers = np.zeros((6, len(parts)), dtype=np.int64)
    floats = numbers.view(np.float64)
    numbers[0] = [part.request.seed for part in parts]
    numbers[1] = [top_k_of(one, vocab) for one in params]
    floats[3] = [temperature_of(one) for one in params]
    floats[4] = [one.top_p for one in params]
    floats[5] = [log_min_p(one) for one in params]
    numbers = np.repeat(numbers, [len(part.nodes) for part in parts], axis=1)
    numbers[2] = [len(part.request.token_ids) + part.tree.depths[node] for part in parts for node in part.nodes]
    return numbers
