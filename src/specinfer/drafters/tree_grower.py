"""TreeGrower: a way to grow all levels of trees in one call. NativeGrower is that of a CPU.

Tokens are chosen, or drawn without replacement. The trees of other models and requests grow level by level
(`small_model.py`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from specinfer.core.noise import derive_seed, draws_of
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.drafter_cache import DrafterCache
from specinfer.drafters.growth.calibration import MIDDLE, RANKS, Calibration, source
from specinfer.drafters.growth.draft_sampling import chooses_for, sampling_of
from specinfer.drafters.growth.tree_batch import BEST_FIRST_WIDTH
from specinfer.drafters.vocabulary.token_map import Vocabulary
from specinfer.model.heads.head import FeatureHead
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.runner import ModelRunner
from specinfer.ops.cpu.choice import SUPPORT
from specinfer.ops.cpu.draft import DRAWN, NOISY, DecoderParts, DraftCall, DraftTree, GrowthRules
from specinfer.verify.logits import is_adjusted, log_min_p

MAX_READ = 64  # known tokens of a request that a draft reads; more are read before
_RULES = GrowthRules(SUPPORT, BEST_FIRST_WIDTH, MIDDLE, RANKS)


class Wanted(NamedTuple):
    """A tree to grow for a request."""

    request: Request
    budget: TreeBudget


class GrownTree(NamedTuple):
    """The tree that was grown for a request, and its nodes that have keys and values."""

    request: Request
    tree: TokenTree
    computed: Sequence[int]  # by reserved slot, that of the first one; -1 where there is none


class TreeGrower(Protocol):
    """A way to grow trees without a step for each level: by native code on CPUs, by a program on GPUs."""

    def fitting(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Return those whose trees can be grown in one call, if the model can grow any."""
        ...

    def draft(self, wanted: Sequence[Wanted]) -> list[GrownTree] | None:
        """Return the tree of each request, which fit together, or None if the model cannot grow them now.

        What the drafter has computed of known tokens is noted in its cache; slots of drafts stay reserved there.
        """
        ...


class NativeGrower:
    """A grower of trees by native code, for a small model or a head whose tokens are the target's.

    Args:
        name: Name of the drafter.
        features: For a head, function that returns the [end - start, width] features of a request's tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: DrafterCache,
        vocabulary: Vocabulary,
        draft_sampling: str,
        calibration: Calibration,
        name: str,
        features: Callable[[str, int, int], Tensor] | None = None,
    ) -> None:
        assert not vocabulary.translates
        self._features = features
        self._runner, self._cache, self._vocabulary = runner, cache, vocabulary
        self._draft_sampling, self._calibration, self._name = draft_sampling, calibration, name
        self._model: nn.Module | None = None  # that the call is of
        self._calls: tuple[DraftCall, DraftCall] | None = None  # of all tokens, and of those proposed as a rule

    def draft(self, wanted: Sequence[Wanted]) -> list[GrownTree] | None:
        cache, known = self._runner.cache, self._cache.known
        calls = self._ready_calls(
            max(len(known[request.request_id].ids) + budget.max_depth for request, budget in wanted)
        )
        if calls is None:
            return None
        # All trees of a call have the same head.
        reduced = self._vocabulary.reduced
        call = calls[reduced is not None and all(reduced.suits(request.token_ids) for request, _ in wanted)]
        num_new = [self._num_new(request) for request, _ in wanted]
        if cache.num_available < sum(num_new) + sum(budget.max_nodes for _, budget in wanted):
            return None
        for i, (request, _) in enumerate(wanted):
            if num_new[i] > MAX_READ:
                self._cache.read_known(request)
                num_new[i] = self._num_new(request)
        alive: list[object] = []
        trees = [self._tree(tree, num, alive) for tree, num in zip(wanted, num_new, strict=True)]
        grown = call(trees, self._name)
        for (request, _), num, (tree, num_computed) in zip(wanted, num_new, grown, strict=True):
            self._cache.note_read(request, num)
            cache.give_back(request.request_id, num_computed)
            if not tree.is_chosen:
                request.drafting.num_draws[self._name] += 1 + num_computed
        return [
            GrownTree(request, tree, range(1, num_computed + 1))
            for (request, _), (tree, num_computed) in zip(wanted, grown, strict=True)
        ]

    def _num_new(self, request: Request) -> int:
        """Return the number of known tokens that the model has not computed."""
        return len(self._cache.known[request.request_id].ids) - len(self._runner.cache.slots(request.request_id))

    def fitting(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        def is_wide(tree: Wanted) -> bool:  # the distribution of a draw is over `SUPPORT` tokens
            return max(tree.budget.widths, default=0) > SUPPORT

        fitting = [tree for tree in wanted if self._can_draft(*tree)]
        fitting = [tree for tree in fitting if not (is_wide(tree) and self._draws(tree.request))]
        any_draws = any(self._draws(tree.request) for tree in fitting)
        return [tree for tree in fitting if not (is_wide(tree) and any_draws)]

    def _can_draft(self, request: Request, budget: TreeBudget) -> bool:
        return not is_adjusted(request, budget.max_depth) and (
            chooses_for(self._draft_sampling, request) or self._draws(request)
        )

    def _draws(self, request: Request) -> bool:
        """Return whether tokens for a request are drawn without replacement."""
        sampling = sampling_of(self._draft_sampling, request)
        return not request.params.is_greedy and sampling == "without-replacement"

    def _ready_calls(self, positions: int) -> tuple[DraftCall, DraftCall] | None:
        """Return the calls for the model as it is now, with tables for this many positions, or None if there is none.

        The first is for all tokens, the second for those of the reduced vocabulary.
        """
        model, tensors = self._runner.loaded.model, self._runner.tensors
        if self._calls is None or self._model is not model or positions > self._calls[0].parts.layers.num_positions:
            parts = None
            if isinstance(model, FusedDecoder | FeatureHead) and self._runner.graphs is None:
                parts = model.parts(tensors, positions)
            self._model, self._calls = model, None if parts is None else self._made(parts)
        return self._calls

    def _made(self, parts: DecoderParts) -> tuple[DraftCall, DraftCall]:
        token_map, reduced = self._vocabulary.token_map, self._vocabulary.reduced
        outputs = parts.head.outputs
        columns = min(outputs, self._vocabulary.compact(torch.empty(0, outputs)).shape[1])
        whole = DraftCall(parts, _RULES, None if token_map is None else token_map.ids, columns)
        if reduced is None or parts.head.following is not None:
            return whole, whole
        small = parts._replace(head=parts.head.part(reduced.runs))
        return whole, DraftCall(small, _RULES, reduced.ids, small.head.outputs)

    def _tree(self, wanted: Wanted, num_new: int, alive: list[object]) -> DraftTree:
        """Return a tree to grow; `alive` gets the arrays whose addresses it has."""
        request, budget = wanted
        params, cache, request_id = request.params, self._runner.cache, request.request_id
        prefix, ids = cache.slots(request_id), self._cache.known[request_id].ids
        slots = cache.reserve(request_id, num_new + budget.max_nodes)
        tokens = np.array(ids[len(ids) - num_new :], dtype=np.int64)
        tree = DraftTree(tokens.ctypes.data, prefix.ctypes.data, slots.ctypes.data, len(prefix), num_new)
        alive += tokens, prefix, slots
        if self._features is not None:
            features = self._features(request_id, len(prefix), len(ids)).float().contiguous()
            alive.append(features)
            tree.features = features.data_ptr()
        tree.max_nodes, tree.max_depth = budget.max_nodes, budget.max_depth
        if budget.widths:
            widths = np.array(budget.widths, dtype=np.int64)
            alive.append(widths)
            tree.widths = widths.ctypes.data
        else:
            name = source(self._name, request)
            numbers = (*self._calibration.lines(name), self._calibration.by_rank(name))
            alive.append(numbers)
            tree.heights, tree.slopes, tree.by_rank = (column.ctypes.data for column in numbers)
            tree.min_path_prob, tree.min_gain = budget.min_path_prob, budget.min_gain
        if not params.is_greedy:
            tree.seed, tree.temperature = request.seed, params.temperature
            sampling = sampling_of(self._draft_sampling, request)
            if sampling == "without-replacement":
                tree.choice, tree.seed = DRAWN, derive_seed(request.seed, draws_of(self._name))
                tree.first_draw = request.drafting.num_draws[self._name]
            elif sampling == "shared-noise":
                tree.choice = NOISY
                tree.first_draw = self._cache.num_skipped(request_id)
            tree.top_k, tree.top_p, tree.log_min_p = params.top_k, params.top_p, log_min_p(params)
        return tree
