"""Trees of a step as arrays on a device: the scores of their nodes, and the draws that kernels of walks take."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.draws import Floats, Ints
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree
from specinfer.ops import tree_ops
from specinfer.ops.logits import Truncation
from specinfer.ops.trees import MOST_TOKENS, WalkInputs
from specinfer.verify.algorithms import Acceptance
from specinfer.verify.logits import adjust, is_adjusted, log_min_p, temperature_of, top_k_of


class ScoredTree(NamedTuple):
    """A request's tree, and the target's logits of its nodes, [nodes, vocab]."""

    request: Request
    tree: TokenTree
    logits: Tensor

    def adjusted(self) -> Tensor:
        """Return the logits after constraints, biases and penalties."""
        if not is_adjusted(self.request, self.tree.max_depth):
            return self.logits
        return adjust(self.logits, self.request, list(map(self.tree.path_tokens, range(len(self.tree)))))


class NodeScores(NamedTuple):
    """Adjusted logits of nodes, and parameters of each node."""

    rows: Tensor  # [nodes, vocab] float32
    seeds: Tensor  # [nodes] int64
    positions: Tensor  # [nodes] int64, of the tokens to choose
    temperatures: Tensor  # [nodes] float32; 0 is greedy
    least: Tensor | None  # [nodes] float32 least score of a token that may be sampled, or None to keep all

    @classmethod
    def from_trees(cls, scored: Sequence[ScoredTree], parameters: Tensor) -> "NodeScores":
        """Return the scores of all nodes; nothing waits for a device.

        Args:
            scored: The trees.
            parameters: What `parameters_of` returns for them, on the device of their logits.
        """
        rows = torch.cat([one.adjusted() for one in scored])
        temperatures, top_p, share = parameters[3:].view(torch.float64)
        temperatures, least = temperatures.float(), None
        if any(one.request.params.truncates for one in scored):
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


def parameters_of(scored: Sequence[ScoredTree]) -> Ints:
    """Return the parameters of nodes, [6, nodes]: seed, top-k, position; and as float64 temperature, top-p, min-p.

    Rows 0, 2 and 4 begin at multiples of 16 bytes: for other addresses kernels are compiled once more.
    """
    requests, vocab = [one.request for one in scored], scored[0].logits.shape[1]
    params = [request.params for request in requests]
    numbers = np.zeros((6, len(scored)), dtype=np.int64)
    floats = numbers.view(np.float64)
    numbers[0] = [request.seed for request in requests]
    numbers[1] = [top_k_of(each, vocab) for each in params]
    floats[3] = [temperature_of(each) for each in params]
    floats[4] = [each.top_p for each in params]
    floats[5] = [log_min_p(each) for each in params]
    numbers = np.repeat(numbers, [len(one.tree) for one in scored], axis=1)
    numbers[2] = [len(one.request.token_ids) + depth for one in scored for depth in one.tree.depths]
    return numbers


_CERTAIN = np.ones(1)
_MULTIPLE = 16


class TreeDraws(NamedTuple):
    """The tokens that draws of a node could have produced, and each draw's probabilities, in draw order."""

    supports: list[Ints]
    probs: list[Floats]


def draws_of(tree: TokenTree) -> TreeDraws | None:
    """Return the draws of a tree; a chosen token counts as drawn with probability 1.

    All draws of a node get the same tokens in the same order, which the kernels need: those of any of them.

    Returns:
        The draws, or None if those of a node could have produced too many tokens for a kernel.
    """
    together: dict[int, Ints] = {}
    own = list[tuple[int, Ints, Floats]]()
    for node, _, distribution, _ in tree.draws:
        parent = tree.parents[node]
        ids = np.array([tree.tokens[node]]) if distribution is None else distribution.token_ids
        own.append((parent, ids, _CERTAIN if distribution is None else distribution.weights()))
        known = together.setdefault(parent, ids)
        if not np.array_equal(known, ids):
            together[parent] = np.concatenate([known, ids[~np.isin(ids, known)]])
    if any(len(ids) > MOST_TOKENS for ids in together.values()):
        return None
    found = TreeDraws([], [])
    for parent, ids, weights in own:
        support = together[parent]
        if support is not ids and not np.array_equal(support, ids):
            order = np.argsort(support)
            spread = np.zeros(len(support))
            spread[order[np.searchsorted(support, ids, sorter=order)]] = weights
            weights = spread
        found.supports.append(support)
        found.probs.append(weights)
    return found


class DrawnTrees:
    """Trees of a step that are walked together.

    Args:
        scored: The trees.
        rules: The rule of each tree.
        draws: The draws of each tree.
        first: Row of the first root among the scores of all nodes.

    Attributes:
        arrays: What the walks read on the device.
    """

    def __init__(
        self, scored: Sequence[ScoredTree], rules: Sequence[str], draws: Sequence[TreeDraws], first: int
    ) -> None:
        self._requests, trees, count = [one.request for one in scored], [one.tree for one in scored], len(scored)
        self._rules = sorted(set(rules))
        self._depth = _padded(tree.max_depth for tree in trees)
        num_nodes, num_draws = _padded(map(len, trees)), _padded(len(one.supports) for one in draws)
        support = _padded(len(ids) for one in draws for ids in one.supports)
        tokens, parents = np.zeros((2, count, num_nodes), dtype=np.int32)
        nodes = np.full((count, num_draws), -1, dtype=np.int32)
        ids = np.full((count, num_draws, support), -1, dtype=np.int32)
        probs = np.zeros((count, num_draws, support))
        for i, (tree, own) in enumerate(zip(trees, draws, strict=True)):
            tokens[i, : len(tree)], parents[i, : len(tree)] = tree.tokens, tree.parents
            nodes[i, : len(tree.draws)] = [draw.node for draw in tree.draws]
            for j, (could, weights) in enumerate(zip(*own, strict=True)):
                ids[i, j, : len(could)], probs[i, j, : len(could)] = could, weights
        starts = np.array(list(accumulate(map(len, trees[:-1]), initial=first)), dtype=np.int32)
        temperatures = np.array([request.params.temperature for request in self._requests], dtype=np.float32)
        states = np.array([request.uniforms.state for request in self._requests], dtype=np.uint64).view(np.int64)
        sizes = [
            np.array([len(tree) if own == rule else 0 for own, tree in zip(rules, trees, strict=True)], dtype=np.int32)
            for rule in self._rules
        ]
        self.arrays: Sequence[npt.NDArray[Any]] = [
            starts, temperatures, tokens, parents, nodes, ids, probs, states, *sizes,
        ]  # fmt: skip

    def walk(self, scores: NodeScores, on_device: Sequence[Tensor]) -> list[Tensor]:
        """Start the walks, and return the tensors of their results.

        Args:
            scores: Those of all nodes.
            on_device: `arrays` there.
        """
        starts, temperatures, tokens, parents, nodes, ids, probs, states = on_device[:8]
        path = torch.empty((len(starts), self._depth), dtype=torch.int32, device=starts.device)
        lengths, following = torch.empty_like(starts), torch.empty_like(states)
        for rule, sizes in zip(self._rules, on_device[8:], strict=True):
            walk = tree_ops.walk_of(rule)
            inputs = WalkInputs(
                scores.rows, starts, temperatures, tokens, parents, sizes, nodes, ids, probs, states, scores.least
            )
            walk(inputs, out=(path, lengths, following))
        return [following, states, path, lengths]

    def accept(self, results: Sequence[npt.NDArray[Any]]) -> list[Acceptance]:
        """Return what is accepted of each tree, and let the requests continue with random numbers not used yet.

        Args:
            results: Those of `walk`, on the host.
        """
        following, states, path, lengths = results
        for request, state in zip(self._requests, states.view(np.uint64).tolist(), strict=True):
            request.uniforms.state = state
        return [
            Acceptance(tuple(nodes[:length]), token)
            for nodes, length, token in zip(path.tolist(), lengths.tolist(), following.tolist(), strict=True)
        ]


def _padded(counts: Iterable[int]) -> int:
    """Return a size that holds all of these and that 16 divides: for other numbers kernels are compiled once more."""
    return max(-(-max(counts, default=1) // _MULTIPLE), 1) * _MULTIPLE
