"""Verification of all trees of a step: trees and logits in, accepted paths out."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.rules import RULES, is_random
from specinfer.core.tree import TokenTree
from specinfer.ops import computing_alone, tree_ops
from specinfer.ops.cpu import transfers
from specinfer.ops.cpu.choice import choose_token
from specinfer.ops.cpu.stochastic_walk import NUM_WALKS, walk_stochastic
from specinfer.ops.cpu.walk import walk_trees
from specinfer.ops.logits import host_fields
from specinfer.ops.triton import runs_on
from specinfer.verify.algorithms import Acceptance, Place, verify_coupled, verify_seeded
from specinfer.verify.device_batch import verify_on_device
from specinfer.verify.logits import adjust, is_adjusted, least_score, process_logits, temperature_of


def check_rule(rule: str) -> None:
    """Check that the algorithm and the walks that a rule names exist.

    Args:
        rule: One of `RULES`, or "auto".

    Raises:
        ValueError: There is no such rule, or it names what does not exist; the message says what to change.
    """
    if not is_random(rule):
        return
    entry = RULES[rule]
    try:
        entry.find_algorithm()
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"verification: the algorithm {entry.algorithm} of {rule!r} is not there ({error})") from error
    if entry.cpu_walk is not None and not 0 <= entry.cpu_walk < NUM_WALKS:
        raise ValueError(
            f"verification: the native code has no walk {entry.cpu_walk} for {rule!r}; add it to stochastic_walk.h, "
            "raise NUM_WALKS and build again, or leave cpu_walk out"
        )
    if entry.gpu_walk is not None and entry.gpu_walk not in tree_ops.OPERATIONS:
        raise ValueError(
            f"verification: devices have no operation {entry.gpu_walk!r} for {rule!r}; add it to tree_ops.OPERATIONS, "
            "or leave gpu_walk out"
        )


@computing_alone()
def verify(
    rule: str, logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]
) -> list[Acceptance]:
    """Return what the target accepts of each tree.

    Under any rule a request that is greedy, or asked for no drafts, is walked as in plain decoding.

    Args:
        rule: A name in `RULES`, or "auto", for requests that have none of their own.
        logits: For each tree, [num_nodes, vocab] float32.
        requests: The request of each tree.
        trees: The trees.
    """
    random_rules = [random_rule(request, rule) for request in requests]
    if not transfers.is_apart(logits[0]):
        return _verify_on_host(random_rules, logits, requests, trees)
    has_kernels = runs_on(logits[0])
    on_device = [i for i, request in enumerate(requests) if has_kernels and not host_fields(request.params)]
    if len(on_device) == len(requests):
        return verify_on_device(random_rules, logits, requests, trees)
    on_host = [i for i in range(len(requests)) if i not in on_device]

    def verified(numbers: Sequence[int], verify_trees: Callable[..., list[Acceptance]], rows: Sequence[Tensor]) -> Any:
        columns = ([column[i] for i in numbers] for column in (requests, trees))
        return zip(numbers, verify_trees([random_rules[i] for i in numbers], rows, *columns), strict=True)

    accepted = dict[int, Acceptance]()
    if on_device:
        accepted |= verified(on_device, verify_on_device, [logits[i] for i in on_device])
    rows = transfers.fetch([logits[i] for i in on_host])
    accepted |= verified(on_host, _verify_on_host, list(map(torch.from_numpy, rows)))
    return [accepted[i] for i in range(len(requests))]


def random_rule(request: Request, rule: str) -> str | None:
    """Return the rule with random numbers of a request, or None if it is walked as in plain decoding."""
    rule = request.verification or rule
    return rule if is_random(rule) and not request.params.is_greedy and request.params.tree != "off" else None


class _Case(NamedTuple):
    """A tree to verify on the host."""

    rule: str | None
    logits: Tensor
    request: Request
    tree: TokenTree

    @property
    def native_walk(self) -> int | None:
        """Number of the native walk of a rule with random numbers, or None."""
        return None if self.rule is None else RULES[self.rule].cpu_walk


def _verify_on_host(
    rules: Sequence[str | None], logits: Sequence[Tensor], requests: Sequence[Request], trees: Sequence[TokenTree]
) -> list[Acceptance]:
    """Return what the target accepts of each tree; the arguments are those of `verify_on_device`."""
    cases = [_Case(*columns) for columns in zip(rules, logits, requests, trees, strict=True)]
    plain = [i for i, case in enumerate(cases) if _is_plain(case.request, case.tree)]
    coupled = [i for i in plain if rules[i] is None]
    stochastic = [i for i in plain if cases[i].native_walk is not None]
    accepted = dict[int, Acceptance]()
    for walk, group in ((_walk_coupled, coupled), (_walk_stochastic, stochastic)):
        if group:
            accepted |= zip(group, walk([cases[i] for i in group]), strict=True)
    return [accepted[i] if i in accepted else _verify_processed(*case) for i, case in enumerate(cases)]


def _is_plain(request: Request, tree: TokenTree) -> bool:
    """Return whether the distribution is the softmax of the logits over the temperature, or their argmax at 0."""
    params = request.params
    if host_fields(params):  # native walks apply no more than kernels do
        return False
    return not is_adjusted(request, tree.max_depth) and (params.is_greedy or not params.truncates)


def _walk_coupled(cases: Sequence[_Case]) -> list[Acceptance]:
    _, logits, requests, trees = zip(*cases, strict=True)
    if len(trees) == 1 and not trees[0].num_guessed:  # a step of plain decoding
        return [Acceptance((), _choose_next(logits[0][0], requests[0], len(requests[0].token_ids)))]
    noises = [(request.seed, len(request.token_ids)) for request in requests]
    walks = walk_trees(logits, trees, noises, [temperature_of(request.params) for request in requests])
    return [Acceptance(path, token) for path, token in walks]


def _walk_stochastic(cases: Sequence[_Case]) -> list[Acceptance]:
    _, logits, requests, trees = zip(*cases, strict=True)
    temperatures = [request.params.temperature for request in requests]
    states = [request.uniforms.state for request in requests]
    numbers = [number for case in cases if (number := case.native_walk) is not None]
    assert len(numbers) == len(cases)
    walks = walk_stochastic(logits, trees, temperatures, numbers, states)
    for request, (_, _, state) in zip(requests, walks, strict=True):
        request.uniforms.state = state
    return [Acceptance(() if token < 0 else path, token) for path, token, _ in walks]


def _verify_processed(rule: str | None, logits: Tensor, request: Request, tree: TokenTree) -> Acceptance:
    """Verify one tree by a rule's algorithm; a node is processed when the walk reaches it: of a large tree few are."""
    if rule is None:
        return verify_coupled([tree], lambda places: [_choose_at(places[0], logits, request, tree)])[0]

    def row_at(node: int) -> npt.NDArray[Any]:
        row = process_logits(logits[node : node + 1], request, [tree.path_tokens(node)])
        return np.asarray(row[0].numpy())

    return verify_seeded(rule, tree, row_at, request.uniforms)


def _choose_at(place: Place, logits: Tensor, request: Request, tree: TokenTree) -> int:
    node = place[1]
    row = logits[node : node + 1]
    if is_adjusted(request, tree.max_depth):
        row = adjust(row, request, [tree.path_tokens(node)])
    return _choose_next(row[0], request, len(request.token_ids) + tree.depths[node])


def _choose_next(row: Tensor, request: Request, position: int) -> int:
    """Return the token at a position, chosen from adjusted logits, [vocab]."""
    params = request.params
    if params.is_greedy:
        return choose_token(row, None)
    if params.temperature != 1.0:
        row = row / params.temperature
    least = float(least_score(row.unsqueeze(0), params)) if params.truncates else -torch.inf
    return choose_token(row, (request.seed, position), least)
