"""Verification of all trees of a step: the target's logits become tokens, or distributions if a rule needs them."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.tree import TokenTree
from specinfer.kernels import computing_alone
from specinfer.kernels.choice import choose_token, chooses
from specinfer.kernels.plain_logits import Truncation
from specinfer.kernels.toss import toss_trees
from specinfer.kernels.tree_ops import NAN, NO_VALID_TOKEN, choose, least_kept
from specinfer.kernels.walk import walk_trees
from specinfer.verify.acceptance import Acceptance, Probs, SeededSource
from specinfer.verify.coupled import Place, verify_coupled
from specinfer.verify.logits import adjust, is_adjusted, least_score, log_min_p, process_logits
from specinfer.verify.rules import MULTI_STEP, RANDOM_RULES, TRAVERSAL

__all__ = ["NAN", "NO_VALID_TOKEN", "verify"]


@computing_alone()
def verify(
    rule: str, logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]
) -> list[Acceptance]:
    """Return what the target accepts of each tree.

    Under any rule a request that is greedy, or asked for no drafts, is walked as in plain decoding.

    Args:
        rule: "coupled", "multi-step", "traversal" or "target-only", for requests that have none of their own.
        logits: For each tree, [num_nodes, vocab] float32.
        requests: The request of each tree.
        trees: The trees.
    """
    rules = [request.verification or rule for request in requests]
    is_random = [
        each in RANDOM_RULES and not request.params.is_greedy and request.params.tree != "off"
        for each, request in zip(rules, requests, strict=True)
    ]
    walked = [i for i, tossing in enumerate(is_random) if not tossing]
    is_native = [_is_plain(requests[i]) and chooses(logits[i]) and not _is_asked_at_once(logits[i]) for i in walked]
    tossed = [
        i for i, tossing in enumerate(is_random) if tossing and _tosses_natively(rules[i], requests[i], logits[i])
    ]
    kept: dict[int, Acceptance] = {}
    for verify_group, group in (
        (_walk_natively, [i for i, native in zip(walked, is_native, strict=True) if native]),
        (_walk, [i for i, native in zip(walked, is_native, strict=True) if not native]),
        (partial(_toss_natively, [rules[i] for i in tossed]), tossed),
    ):
        if group:
            found = verify_group([logits[i] for i in group], [requests[i] for i in group], [trees[i] for i in group])
            kept |= zip(group, found, strict=True)
    return [
        kept[i] if i in kept else _verify_random(rules[i], rows, request, tree)
        for i, (rows, request, tree) in enumerate(zip(logits, requests, trees, strict=True))
    ]


def _walk_natively(
    logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]
) -> list[Acceptance]:
    if len(trees) == 1 and not trees[0].num_guessed:  # a step of plain decoding
        return [Acceptance((), _choose_next(logits[0][0], requests[0], len(requests[0].token_ids)))]
    noises = [(request.seed, len(request.token_ids)) for request in requests]
    found = walk_trees(logits, trees, noises, [_heat(request) for request in requests])
    return [Acceptance(path, token) for path, token in found]


def _tosses_natively(rule: str, request: Request, logits: Tensor) -> bool:
    return rule in (MULTI_STEP, TRAVERSAL) and _is_plain(request) and chooses(logits)


def _toss_natively(
    rules: Sequence[str], logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]
) -> list[Acceptance]:
    temperatures = [request.params.temperature for request in requests]
    states = [request.uniforms.state for request in requests]
    found = toss_trees(logits, trees, temperatures, [rule == TRAVERSAL for rule in rules], states)
    for request, (_, _, state) in zip(requests, found, strict=True):
        request.uniforms.state = state
    return [Acceptance(() if token < 0 else path, token) for path, token, _ in found]


def _walk(logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]) -> list[Acceptance]:
    return verify_coupled(trees, _Choices(logits, requests, trees).at)


def _heat(request: Request) -> float:
    """Return the temperature, 0 if it counts as greedy."""
    return 0.0 if request.params.is_greedy else request.params.temperature


class _Choices:
    """Tokens of plain decoding after nodes of several trees: argmax(log p + noise), or argmax(log p) if greedy."""

    def __init__(self, logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]) -> None:
        self._logits, self._requests, self.trees = logits, requests, trees
        self._known: dict[Place, int] = {}
        if _is_asked_at_once(logits[0]):
            # A grammar knows what may follow legal paths only, so its nodes are looked at when a walk reaches them.
            at_once = [i for i, request in enumerate(requests) if request.grammar is None]
            places = [(i, node) for i in at_once for node in range(len(trees[i]))]
            if places:
                self._known = dict(zip(places, self._choose(places), strict=True))

    def at(self, places: Sequence[Place]) -> list[int]:
        """Return the token after each of these nodes, `NAN` or `NO_VALID_TOKEN`."""
        unknown = [place for place in places if place not in self._known]
        found = iter(self._look(unknown) if unknown else ())
        return [self._known[place] if place in self._known else next(found) for place in places]

    def _look(self, places: Sequence[Place]) -> list[int]:
        if all(chooses(self._logits[i]) for i, _ in places):
            return [self._token(i, node) for i, node in places]
        return self._choose(places)

    def _choose(self, places: Sequence[Place]) -> list[int]:
        """Return the tokens after these nodes, all together.

        A device is waited for twice, for the parameters and for the result, and when logits are adjusted.

        Args:
            places: Tree by tree, of each a range of its nodes.
        """
        rows = torch.cat([self._adjusted(i, [node for _, node in of]) for i, of in groupby(places, itemgetter(0))])
        requests = [self._requests[i] for i, _ in places]
        params = [request.params for request in requests]
        numbers = np.zeros((6, len(places)), dtype=np.int64)
        floats = numbers.view(np.float64)
        numbers[0] = [request.seed for request in requests]
        numbers[1] = [len(self._requests[i].token_ids) + self.trees[i].depths[node] for i, node in places]
        numbers[2] = [one.top_k if 0 < one.top_k < rows.shape[1] else 0 for one in params]
        floats[3] = [_heat(request) for request in requests]
        floats[4] = [one.top_p for one in params]
        floats[5] = [log_min_p(one) for one in params]
        there = torch.from_numpy(numbers).to(rows.device)
        heat, top_p, share = there[3:].view(torch.float64)
        heat = heat.float()
        least = None
        if any(one.truncates for one in params):
            least = least_kept(rows, Truncation(heat, share.float(), there[2].int(), top_p))
        chosen: list[int] = choose(rows, there[0], there[1], heat, least).tolist()
        return chosen

    def _adjusted(self, i: int, nodes: Sequence[int]) -> Tensor:
        """Return the adjusted logits of a range of nodes."""
        rows, request, tree = self._logits[i][nodes[0] : nodes[-1] + 1], self._requests[i], self.trees[i]
        return adjust(rows, request, [tree.path_tokens(node) for node in nodes]) if is_adjusted(request) else rows

    def _token(self, i: int, node: int) -> int:
        """Return the token after one node, chosen by native code."""
        request, tree, row = self._requests[i], self.trees[i], self._logits[i][node]
        if is_adjusted(request):
            row = adjust(row.unsqueeze(0), request, [tree.path_tokens(node)])[0]
        return _choose_next(row, request, len(request.token_ids) + tree.depths[node])


def _choose_next(row: Tensor, request: Request, position: int) -> int:
    """Return the token at a position, chosen by native code from adjusted logits, [vocab]."""
    params = request.params
    if params.is_greedy:
        return choose_token(row, None)
    if params.temperature != 1.0:
        row = row / params.temperature
    least = float(least_score(row.unsqueeze(0), params)) if params.truncates else -torch.inf
    return choose_token(row, (request.seed, position), least)


def _is_plain(request: Request) -> bool:
    """Return whether the distribution is the softmax of the logits over the temperature, or their argmax at 0."""
    params = request.params
    return not is_adjusted(request) and (params.is_greedy or not params.truncates)


def _is_asked_at_once(logits: Tensor) -> bool:
    """Return whether all nodes are evaluated together: on an accelerator waiting for each level takes longer."""
    return logits.device.type != "cpu"


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
        # By numpy: waking PyTorch's threads takes longer than the row itself.
        row = _processed(logits, request, tree, node)[0].cpu().numpy().astype(np.float64)
        best = row.max()
        if best != best:
            raise _NoValidTokenError(NAN)
        if best > -torch.inf:
            return np.asarray(torch.from_numpy(row).softmax(dim=-1).numpy())
        if node == 0:
            raise _NoValidTokenError(NO_VALID_TOKEN)
        return None  # an accepted path may end here, and other nodes are not affected

    start = time.perf_counter()
    try:
        found = RANDOM_RULES[rule](tree, probs_at, SeededSource(request.uniforms))
        return replace(found, seconds=time.perf_counter() - start)
    except _NoValidTokenError as error:
        return Acceptance((), error.reason)
