"""Verification of all trees of a step: the target's logits become tokens, or distributions if a rule needs them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.rules import RULES, is_random
from specinfer.core.tree import TokenTree
from specinfer.ops import computing_alone
from specinfer.ops.cpu import transfers
from specinfer.ops.cpu.choice import choose_token, chooses
from specinfer.ops.cpu.stochastic_walk import walk_stochastic
from specinfer.ops.cpu.walk import walk_trees
from specinfer.ops.tree_ops import NAN, NO_VALID_TOKEN
from specinfer.verify.acceptance import Acceptance
from specinfer.verify.coupled import Place, verify_coupled
from specinfer.verify.device_batch import verify_on_device
from specinfer.verify.logits import is_adjusted, least_score, process_logits, temperature_of
from specinfer.verify.node_scores import NodeScores, Part, parameters_of
from specinfer.verify.rules import verify_seeded

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
    draws = [
        is_random(each) and not request.params.is_greedy and request.params.tree != "off"
        for each, request in zip(rules, requests, strict=True)
    ]
    if transfers.is_apart(logits[0]):
        random_rules = [each if is_drawn else None for each, is_drawn in zip(rules, draws, strict=True)]
        return verify_on_device(random_rules, logits, requests, trees)
    walked = [i for i, is_drawn in enumerate(draws) if not is_drawn]
    is_native = [_is_plain(requests[i], trees[i]) and chooses(logits[i]) for i in walked]
    tossed = [
        i
        for i, is_drawn in enumerate(draws)
        if is_drawn and _tosses_natively(rules[i], requests[i], trees[i], logits[i])
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
    found = walk_trees(logits, trees, noises, [temperature_of(request.params) for request in requests])
    return [Acceptance(path, token) for path, token in found]


def _tosses_natively(rule: str, request: Request, tree: TokenTree, logits: Tensor) -> bool:
    return RULES[rule].cpu_walk is not None and _is_plain(request, tree) and chooses(logits)


def _toss_natively(
    rules: Sequence[str], logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]
) -> list[Acceptance]:
    temperatures = [request.params.temperature for request in requests]
    states = [request.uniforms.state for request in requests]
    found = walk_stochastic(logits, trees, temperatures, [RULES[rule].cpu_walk or 0 for rule in rules], states)
    for request, (_, _, state) in zip(requests, found, strict=True):
        request.uniforms.state = state
    return [Acceptance(() if token < 0 else path, token) for path, token, _ in found]


def _walk(logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]) -> list[Acceptance]:
    """Walk trees whose nodes are looked at when a walk reaches them: of a large tree it visits few."""

    def choose(places: Sequence[Place]) -> list[int]:
        parts = [Part(requests[i], trees[i], (node,), logits[i][node : node + 1]) for i, node in places]
        if all(chooses(part.logits) for part in parts):
            return [
                _choose_next(part.adjusted()[0], part.request, len(part.request.token_ids) + trees[i].depths[node])
                for part, (i, node) in zip(parts, places, strict=True)
            ]
        chosen: list[int] = NodeScores.of(parts, torch.from_numpy(parameters_of(parts))).choose().tolist()
        return chosen

    return verify_coupled(trees, choose)


def _choose_next(row: Tensor, request: Request, position: int) -> int:
    """Return the token at a position, chosen by native code from adjusted logits, [vocab]."""
    params = request.params
    if params.is_greedy:
        return choose_token(row, None)
    if params.temperature != 1.0:
        row = row / params.temperature
    least = float(least_score(row.unsqueeze(0), params)) if params.truncates else -torch.inf
    return choose_token(row, (request.seed, position), least)


def _is_plain(request: Request, tree: TokenTree) -> bool:
    """Return whether the distribution is the softmax of the logits over the temperature, or their argmax at 0."""
    params = request.params
    return not is_adjusted(request, tree.max_depth) and (params.is_greedy or not params.truncates)


def _verify_random(rule: str, logits: Tensor, request: Request, tree: TokenTree) -> Acceptance:
    """Verify one tree by a rule that uses random numbers; a node is processed when a walk reaches it."""

    def row_at(node: int) -> npt.NDArray[Any]:
        row = logits[node : node + 1]
        return np.asarray(process_logits(row, request, [tree.path_tokens(node)])[0].numpy())

    return verify_seeded(rule, tree, row_at, request.uniforms)
