"""Verification of all trees of a step: the target's logits become tokens, or distributions if a rule needs them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specinfer.core.noise import gumbel
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree
from specinfer.kernels.choice import choose_token, chooses
from specinfer.kernels.tree_ops import NAN, NO_VALID_TOKEN, choose
from specinfer.kernels.walk import walk_trees
from specinfer.verify.acceptance import Acceptance, Probs, SeededSource
from specinfer.verify.coupled import Place, verify_coupled
from specinfer.verify.logits import adjust, is_adjusted, least_kept, process_logits
from specinfer.verify.rules import RANDOM_RULES

__all__ = ["NAN", "NO_VALID_TOKEN", "verify"]


def verify(
    rule: str, logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]
) -> list[Acceptance]:
    """Return what the target accepts of each tree.

    Under any rule a request that is greedy, or asked for no drafts, is walked as in plain decoding.

    Args:
        rule: "coupled", "multi-step", "traversal" or "target-only".
        logits: For each tree, [num_nodes, vocab] float32.
        requests: The request of each tree.
        trees: The trees.
    """
    is_random = [rule in RANDOM_RULES and not r.params.is_greedy and r.params.tree != "off" for r in requests]
    walked = [i for i, tossing in enumerate(is_random) if not tossing]
    is_native = [_is_plain(requests[i]) and chooses(logits[i]) and not _is_asked_at_once(logits[i]) for i in walked]
    kept: dict[int, Acceptance] = {}
    for verify_group, group in (
        (_walk_natively, [i for i, native in zip(walked, is_native, strict=True) if native]),
        (_walk, [i for i, native in zip(walked, is_native, strict=True) if not native]),
    ):
        if group:
            found = verify_group([logits[i] for i in group], [requests[i] for i in group], [trees[i] for i in group])
            kept |= zip(group, found, strict=True)
    return [
        _verify_random(rule, rows, request, tree) if is_random[i] else kept[i]
        for i, (rows, request, tree) in enumerate(zip(logits, requests, trees, strict=True))
    ]


def _walk_natively(
    logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]
) -> list[Acceptance]:
    noises = [(request.seed, len(request.token_ids)) for request in requests]
    found = walk_trees(logits, trees, noises, [_heat(request) for request in requests])
    return [Acceptance(path, token) for path, token in found]


def _walk(logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]) -> list[Acceptance]:
    return verify_coupled(trees, _Choices(logits, requests, trees).at)


def _heat(request: Request) -> float:
    """Return the temperature, 0 if it counts as greedy."""
    return 0.0 if request.params.is_greedy else request.params.temperature


class _Choices:
    """Tokens of plain decoding after nodes of several trees: argmax(log p + noise), or argmax(log p) if greedy."""

    def __init__(self, logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]) -> None:
        self._logits, self._requests, self.trees = logits, requests, trees
        self._known: dict[int, list[int]] = {}
        plain = [i for i, request in enumerate(requests) if _is_plain(request)]
        if plain and _is_asked_at_once(logits[0]):
            tokens = self._choose(plain)
            ends = np.cumsum([len(trees[i]) for i in plain]).tolist()
            self._known = {i: tokens[end - len(trees[i]) : end] for i, end in zip(plain, ends, strict=True)}

    def _choose(self, plain: Sequence[int]) -> list[int]:
        """Return the tokens after all nodes of these trees."""
        rows = torch.cat([self._logits[i] for i in plain])
        requests, trees = [self._requests[i] for i in plain], [self.trees[i] for i in plain]
        sizes = [len(tree) for tree in trees]
        seeds = np.repeat([request.seed for request in requests], sizes)
        starts = np.repeat([len(request.token_ids) for request in requests], sizes)
        positions = starts + np.concatenate([tree.depths for tree in trees])
        heat = torch.from_numpy(np.repeat(np.asarray([_heat(request) for request in requests], np.float32), sizes))
        numbers = torch.from_numpy(np.stack([seeds, positions])).to(rows.device)
        chosen: list[int] = choose(rows, numbers[0], numbers[1], heat.to(rows.device)).tolist()
        return chosen

    def at(self, places: Sequence[Place]) -> list[int]:
        """Return the token after each of these nodes, `NAN` or `NO_VALID_TOKEN`."""
        unknown = [(i, node) for i, node in places if i not in self._known]
        found = iter(self._look(unknown) if unknown else ())
        return [self._known[i][node] if i in self._known else next(found) for i, node in places]

    def _look(self, places: Sequence[Place]) -> list[int]:
        if all(chooses(self._logits[i]) for i, _ in places):
            return [self._token(i, node) for i, node in places]
        rows = torch.cat([_processed(self._logits[i], self._requests[i], self.trees[i], node) for i, node in places])
        lowest = rows.amin(dim=-1).tolist()
        everywhere, somewhere = list[int](), list[int]()  # rows where any token can be emitted, and the others
        for row, (i, _) in enumerate(places):
            if not self._requests[i].params.is_greedy:
                (everywhere if lowest[row] > -torch.inf else somewhere).append(row)
        tokens = torch.arange(rows.shape[-1], device=rows.device)
        if everywhere:
            rows[everywhere] += self._noise([places[row] for row in everywhere], tokens)
        for row in somewhere:
            possible = (rows[row] > -torch.inf).nonzero().squeeze(1)
            rows[row, possible] += self._noise([places[row]], possible)[0]
        return _argmax(rows)

    def _token(self, i: int, node: int) -> int:
        """Return the token after one node, chosen by native code."""
        request, tree, row = self._requests[i], self.trees[i], self._logits[i][node]
        params = request.params
        if is_adjusted(request):
            row = adjust(row.unsqueeze(0), request, [tree.path_tokens(node)])[0]
        if params.is_greedy:
            return choose_token(row, None)
        if params.temperature != 1.0:
            row = row / params.temperature
        least = float(least_kept(row.unsqueeze(0), params)) if params.truncates else -torch.inf
        return choose_token(row, (request.seed, len(request.token_ids) + tree.depths[node]), least)

    def _noise(self, places: Sequence[Place], tokens: Tensor) -> Tensor:
        """Return the requests' noise for the token that follows each place: [places, tokens]."""
        seeds = [self._requests[i].seed for i, _ in places]
        positions = [len(self._requests[i].token_ids) + self.trees[i].depths[node] for i, node in places]
        return gumbel(torch.tensor(seeds, device=tokens.device), torch.tensor(positions, device=tokens.device), tokens)


def _is_plain(request: Request) -> bool:
    """Return whether the distribution is the softmax of the logits over the temperature, or their argmax at 0."""
    params = request.params
    return not is_adjusted(request) and (params.is_greedy or not params.truncates)


def _is_asked_at_once(logits: Tensor) -> bool:
    """Return whether all nodes are evaluated together: on an accelerator waiting for each level takes longer."""
    return logits.device.type != "cpu"


def _argmax(rows: Tensor) -> list[int]:
    """Return the best token of each row, `NAN` or `NO_VALID_TOKEN`."""
    best = rows.max(dim=-1)  # NaN wins, so a NaN anywhere in a row is found
    tokens = best.indices.masked_fill(best.values == -torch.inf, NO_VALID_TOKEN).masked_fill(best.values.isnan(), NAN)
    chosen: list[int] = tokens.tolist()
    return chosen


def _processed(logits: Tensor, request: Request, tree: TokenTree, node: int) -> Tensor:
    """Return the processed row of a node, [1, vocab], when a walk reaches it: of a large tree it visits few nodes."""
    row = logits[node : node + 1]
    return row if request.is_plain_greedy else process_logits(row, request, [tree.path_tokens(node)])


class _NoValidTokenError(Exception):
    """A node without a valid token."""

    def __init__(self, reason: int) -> None:
        self.reason = reason


def _verify_random(rule: str, logits: Tensor, request: Request, tree: TokenTree) -> Acceptance:
    """Verify one tree by a rule that uses random numbers."""

    def probs_at(node: int) -> Probs | None:
        row = _processed(logits, request, tree, node)[0]
        best = row.max().item()
        if best != best:
            raise _NoValidTokenError(NAN)
        if best > -torch.inf:
            return np.asarray(row.double().softmax(dim=-1).cpu().numpy())
        if node == 0:
            raise _NoValidTokenError(NO_VALID_TOKEN)
        return None  # an accepted path may end here, and other nodes are not affected

    try:
        return RANDOM_RULES[rule](tree, probs_at, SeededSource(request.uniforms))
    except _NoValidTokenError as error:
        return Acceptance((), error.reason)
