"""A whole draft in one native call: the passes of a small model or a head, and the growth of trees, see draft.h."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specinfer.core.draws import DrawnFrom, Draws, Floats, Ints
from specinfer.core.tree import TokenTree, TreeArrays, depths_of
from specinfer.ops.cpu.decoder import LayersCall
from specinfer.ops.cpu.growth import BIN_EDGES
from specinfer.ops.cpu.layer_inputs import LayerInputsCall
from specinfer.ops.cpu.library import call
from specinfer.ops.cpu.linear_call import LinearCall
from specinfer.ops.cpu.panels import TYPES

BEST, NOISY, DRAWN = range(3)  # how children are chosen, as in types.h


class DraftTree(ctypes.Structure):
    """The tree of one request, and how it may grow.

    Attributes:
        tokens, prefix, slots: Addresses of the known tokens to read, the root last; of the slots of those read before;
            and of the slots of the tokens to read, followed by one for each node.
        widths: Address of the number of children of each node, by level; None to grow best first.
        heights, slopes, by_rank: Addresses of a calibration's numbers; None in a fixed expansion.
        features: Address of the features that a head reads with the known tokens; None for a small model.
        temperature: 0 for the best tokens.
        choice: How children are chosen: `BEST`, `NOISY`, with the noise of the target, which `seed` determines, or
            `DRAWN`, with noise that `seed` determines, from number `first_draw` at the root.
        first_draw: For `NOISY`, the number of the target's tokens that are skipped.
        size, num_computed: Results: nodes with the root, and how many of the others have keys and values.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tokens", "prefix", "slots")),
        *((name, ctypes.c_int64) for name in ("num_prefix", "num_new", "max_nodes", "max_depth")),
        *((name, ctypes.c_void_p) for name in ("widths", "heights", "slopes", "by_rank", "features")),
        *((name, ctypes.c_double) for name in ("min_path_prob", "min_gain", "top_p")),
        ("seed", ctypes.c_uint64),
        ("top_k", ctypes.c_int64),
        ("first_draw", ctypes.c_int64),
        ("temperature", ctypes.c_float),
        ("log_min_p", ctypes.c_float),
        ("choice", ctypes.c_int32),
        ("size", ctypes.c_int64),
        ("num_computed", ctypes.c_int64),
    )


class _Features(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("stored", "embedding_norm", "feature_norm", "join")),
        *((name, ctypes.c_int32) for name in ("type", "stores_normed", "adds_to_normed")),
        *((name, ctypes.c_int32) for name in ("feature_is_first", "blanks_first", "norms_joined")),
    )


class _Draft(ctypes.Structure):
    _fields_ = (
        ("places", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "floats")),
        *((name, ctypes.c_void_p) for name in ("embedding", "rows", "norm", "head", "token_map")),
        *((name, ctypes.c_int64) for name in ("columns", "support", "breadth")),
        *((name, ctypes.c_void_p) for name in ("edges", "middles")),
        *((name, ctypes.c_int64) for name in ("bins", "middles_count", "ranks")),
        *((name, ctypes.c_void_p) for name in ("layer_inputs", "features")),
        *((name, ctypes.c_float) for name in ("embedding_scale", "eps", "cap")),
        ("type", ctypes.c_int32),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("trees", "tokens", "parents", "confidence")),
        *((name, ctypes.c_void_p) for name in ("candidates", "drawn", "probs")),
    )


class FeatureParts(NamedTuple):
    """The feature of the token before each, which a head reads in addition to the token.

    Attributes:
        stored: [slots, hidden] in one of `TYPES`: outputs by the slots of tokens, features of the tokens after them.
        embedding_norm, feature_norm: [hidden] float32, or None for no norm.
        stores_normed: Whether outputs have the last norm.
        join: Layer that makes hidden states of embedding and feature; None if the layers add to the feature, and the
            first of them reads both.
        adds_to_normed: Whether they add to the normed feature.
        feature_is_first: Whether the feature comes before the embedding.
        blanks_first: Whether the embedding at position 0 is zero.
        norms_joined: Whether the first layer norms what was joined.
    """

    stored: Tensor
    embedding_norm: Tensor | None
    feature_norm: Tensor | None
    stores_normed: bool
    join: LinearCall | None = None
    adds_to_normed: bool = False
    feature_is_first: bool = False
    blanks_first: bool = False
    norms_joined: bool = True


class DecoderParts(NamedTuple):
    """A decoder whose passes are made of native calls."""

    layers: LayersCall
    layer_floats: int  # scratch floats of the layers for each token
    embedding: LinearCall | Tensor  # panels with its rows, or [vocab, hidden] in one of `TYPES`
    embedding_scale: float
    norm: Tensor | None  # [hidden] float32, before the head
    eps: float
    head: LinearCall
    layer_inputs: LayerInputsCall | None = None
    cap: float | None = None  # of the logits
    features: FeatureParts | None = None  # of a head

    @property
    def floats(self) -> int:
        """Scratch floats for each token."""
        calls = [self.head, self.layer_inputs, None if self.features is None else self.features.join]
        return max(self.layer_floats, *(call.scratch_floats for call in calls if call is not None))


class GrowthRules(NamedTuple):
    """The numbers by which all trees grow.

    Attributes:
        support: Number of candidates that probabilities cover.
        breadth: Most children of a node, best first.
        middles, ranks: Where the lines of a calibration meet, and its number of ranks.
    """

    support: int
    breadth: int
    middles: Floats
    ranks: int


def _features(parts: FeatureParts) -> _Features:
    stored, join, norms = parts.stored, parts.join, (parts.embedding_norm, parts.feature_norm)
    return _Features(
        stored.data_ptr(), *(None if norm is None else norm.data_ptr() for norm in norms),
        None if join is None else join.address, TYPES[stored.dtype], parts.stores_normed, parts.adds_to_normed,
        parts.feature_is_first, parts.blanks_first, parts.norms_joined,
    )  # fmt: skip


class DraftCall:
    """The drafts of one model on one cache, ready to be called.

    Args:
        token_map: [columns] int64 the tokens of the logits, or None for all in order.
        columns: Number of the logits that count, from the first.
    """

    def __init__(self, parts: DecoderParts, rules: GrowthRules, token_map: Tensor | None, columns: int) -> None:
        self.parts, self._alive = parts, (rules, token_map)  # addresses stay valid
        self._draft = _Draft()
        draft, embedding = self._draft, parts.embedding
        draft.places, draft.layers = parts.layers.arguments
        inputs = parts.layer_inputs
        draft.hidden, draft.floats, draft.cap = parts.head.panels.inputs, parts.floats, parts.cap or 0.0
        draft.layer_inputs = None if inputs is None else inputs.address
        draft.embedding = embedding.address if isinstance(embedding, LinearCall) else None
        if isinstance(embedding, Tensor):
            draft.rows, draft.type = embedding.data_ptr(), TYPES[embedding.dtype]
        draft.norm, draft.head = None if parts.norm is None else parts.norm.data_ptr(), parts.head.address
        draft.token_map, draft.columns = None if token_map is None else token_map.data_ptr(), columns
        draft.support, draft.breadth, draft.ranks = rules.support, rules.breadth, rules.ranks
        draft.edges, draft.bins = BIN_EDGES.ctypes.data, len(BIN_EDGES) + 1
        draft.middles, draft.middles_count = rules.middles.ctypes.data, len(rules.middles)
        draft.embedding_scale, draft.eps = parts.embedding_scale, parts.eps
        if parts.features is not None:
            self._features = _features(parts.features)
            draft.features = ctypes.addressof(self._features)
        self._address = ctypes.addressof(draft)
        self._nodes: tuple[Ints, Floats] = np.empty((2, 0), dtype=np.int64), np.empty(0)

    def __call__(self, trees: Sequence[DraftTree], drafter: str) -> list[tuple[TokenTree, int]]:
        """Read the known tokens and grow the trees; keys and values are in the trees' slots afterwards.

        Args:
            drafter: Name of the drafter.

        Returns:
            Each tree, and how many of its nodes but the root have keys and values.
        """
        array, draft = (DraftTree * len(trees))(*trees), self._draft
        total = sum(tree.max_nodes + 1 for tree in trees)
        if total > len(self._nodes[1]):
            self._nodes = np.empty((2, 2 * total), dtype=np.int64), np.empty(2 * total)
            draft.tokens, draft.parents = (column.ctypes.data for column in self._nodes[0])
            draft.confidence = self._nodes[1].ctypes.data
        draft.count, draft.trees = len(trees), ctypes.addressof(array)
        drawn_from = self._room_for_draws(total) if any(tree.choice == DRAWN for tree in trees) else None
        call("specinfer_draft", self._address)
        grown, start = [], 0
        for tree in array:
            end = start + tree.size
            tokens, parents = self._nodes[0][:, start:end].copy()
            draws = Draws.chosen(self._nodes[1][start + 1 : end].copy(), drafter)
            if drawn_from is not None and tree.choice == DRAWN:
                candidates, probs, places = drawn_from
                pool = DrawnFrom(candidates[start:end], probs[start:end], places[start:end])
                draws = draws._replace(numbers=pool.numbers(parents[1:], _ranks(parents)[1:]), pools=(pool,))
            depths = np.array(depths_of(parents.tolist()), dtype=np.int64)
            grown.append((TokenTree.from_arrays(TreeArrays(tokens, parents, depths, draws)), tree.num_computed))
            start += tree.max_nodes + 1
        return grown

    def _room_for_draws(self, total: int) -> tuple[Ints, Floats, Ints]:
        """Return new arrays for this many nodes, to which the next call writes what children are drawn from."""
        draft = self._draft
        candidates, places = np.empty((2, total, draft.support), dtype=np.int64)
        probs = np.empty((total, draft.support))
        draft.candidates, draft.drawn, draft.probs = (array.ctypes.data for array in (candidates, places, probs))
        size = min(draft.support, draft.columns)
        return candidates[:, :size], probs[:, :size], places


def _ranks(parents: Ints) -> Ints:
    """Return each node's number among the children of its parent, [nodes]; these are in draw order."""
    order = parents.argsort(kind="stable")
    in_order = parents[order]
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order)) - in_order.searchsorted(in_order)
    return ranks
