"""Sequence-based verification, with which the paper compares trees (section 4.2 and Figure 11).

Each path from the root to a leaf is a sequence of its own: it has its own keys and values, and tokens that several
paths share are computed once for each of them. Results are those of the tree.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from specinfer.llm import LLM
from specinfer.model.batch import Piece
from specinfer.model.kv_cache import KVCache, Slots
from specinfer.model.runner import DeferredPass, TargetRunner

_REQUEST = "sequences"  # owner of the slots that a pass needs in addition


@contextmanager
def sequence_based(llm: LLM) -> Iterator[None]:
    """Verify by sequences within the context."""
    executor = llm.engine.host
    target = executor.target
    executor.target = cast(TargetRunner, SequenceRunner(target))
    try:
        yield
    finally:
        executor.target = target


class SequenceRunner:
    """A target whose passes compute every path of a tree by itself; all else is the target's own."""

    def __init__(self, target: TargetRunner) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def begin(self, pieces: Sequence[Piece]) -> DeferredPass:
        return DeferredPass(partial(self.forward, pieces))

    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the logits of the pieces, as the target does."""
        sequences, rows = [], []
        try:
            start = 0
            for piece in pieces:
                for sequence, places in split(piece, self._target.cache):
                    sequences.append(sequence)
                    rows += [start + place for place in places]
                start += piece.num_logits
            logits = self._target.forward(sequences)
        finally:
            self._target.cache.free(_REQUEST)
        return logits[torch.from_numpy(np.argsort(np.asarray(rows, dtype=np.int64))).to(logits.device)]


def split(piece: Piece, cache: KVCache) -> list[tuple[Piece, list[int]]]:
    """Return the sequences of a piece, each with the places of its logits among those of the piece.

    A token is stored in its own slot by the first sequence that has it, and in a slot taken for the time of the pass by
    the others.
    """
    paths = paths_of(piece)
    if len(paths) == 1:
        return [(piece, list(range(piece.num_logits)))]
    first_logit = len(piece.tokens) - piece.num_logits
    known: set[int] = set()
    found = []
    for path in paths:
        repeated = [node for node in path if node in known]
        slots: Slots = np.concatenate([cache.reserve(_REQUEST, len(repeated)), piece.slots[path[len(repeated) :]]])
        wanted = [node for node in path if node not in known and node >= first_logit]
        sequence = Piece(
            tokens=[piece.tokens[node] for node in path],
            positions=[piece.positions[node] for node in path],
            prefix_slots=piece.prefix_slots,
            slots=slots,
            visible=np.tri(len(path), dtype=np.bool_),
            num_logits=len(wanted),
        )
        found.append((sequence, [node - first_logit for node in wanted]))
        known.update(path)
    return found


def paths_of(piece: Piece) -> list[list[int]]:
    """Return the tokens of each path from the first token of a piece to a leaf, in the order of the piece."""
    assert not len(piece.earlier_slots), "the pass is not one of a whole tree"
    below = piece.visible.copy()
    np.fill_diagonal(below, False)
    leaves = np.flatnonzero(~below.any(axis=0))
    return [np.flatnonzero(piece.visible[leaf]).tolist() for leaf in leaves]
