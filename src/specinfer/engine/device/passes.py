"""The passes of a drafter that give the levels of its trees their logits: one for each level, or one over a block."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from specinfer.drafters.feature_drafter import HeadRunner
from specinfer.engine.device.growth import DraftShape
from specinfer.engine.device.known_tokens import DraftInputs, FirstPass, KnownTokens
from specinfer.ops.tree_layout import num_words, pack_bits
from specinfer.ops.trees import Candidates, Frontier

# -> [requests * frontier, vocab] logits after each node, and the probability that the best token is accepted, if the
# drafter predicts it
ScoreLevel = Callable[[Frontier, Candidates], tuple[Tensor, Tensor | None]]


class Compute(Protocol):
    """One pass of a draft loop."""

    def __call__(
        self, number: int, tokens: Tensor, visible: Tensor | None, logit_rows: Tensor, features: Tensor | None
    ) -> Tensor:
        """Return [rows, vocab] logits.

        Args:
            number: Number of the pass.
            tokens: [requests, width] int64.
            visible: [requests * width, words] int32 bits of the columns that each token sees, or None for a chain.
            logit_rows: [rows] tokens with logits.
            features: [requests * width, width] of a head, or None for tokens alone.
        """
        ...


class Passes(Protocol):
    """The passes of one kind of drafters."""

    def begin(self, first: FirstPass, roots: Tensor, compute: Compute) -> ScoreLevel:
        """Return the function that scores the levels, in their order.

        Args:
            first: What the first pass computes.
            roots: [requests] int64 the last known tokens.
        """
        ...


class LevelPasses:
    """A pass for each level, of which the first computes known tokens, the root among them."""

    def __init__(self, known: KnownTokens, shape: DraftShape, num_rows: int, device: torch.device) -> None:
        self._known = known
        with torch.inference_mode(mode=False):
            self._first_rows = torch.arange(num_rows, dtype=torch.int32, device=device) * shape.num_known
            self._logit_rows = torch.arange(num_rows * max(shape.frontiers), device=device)

    def begin(self, first: FirstPass, roots: Tensor, compute: Compute) -> ScoreLevel:
        wanted = self._first_rows + first.root_columns

        def score(frontier: Frontier, candidates: Candidates) -> tuple[Tensor, None]:
            features = self._known.features(frontier, candidates, first)
            if frontier.level == 0:
                return compute(0, first.tokens, None, wanted, features), None
            rows = self._logit_rows[: frontier.tokens.numel()]
            return compute(frontier.level, frontier.tokens, frontier.sees.flatten(0, 1), rows, features), None

        return score


class BlockPass:
    """A pass over known tokens, and one over a block of mask tokens, which has the logits of all levels.

    The block begins with the root. Where a head reads pairs, the root is the last known token, with the logits of the
    first level, and the block has mask tokens alone.
    """

    def __init__(
        self, runner: HeadRunner, shape: DraftShape, inputs: DraftInputs, num_rows: int, device: torch.device
    ) -> None:
        self._runner, self._inputs, self._mask = runner, inputs, runner.mask_features
        block, first, (columns,) = runner.head.block, shape.num_known, shape.passes
        assert block is not None
        self._has_root = not runner.head.reads_pairs
        assert self._has_root or block.from_anchor
        self._words = num_words(shape.num_columns)
        skipped = 0 if block.from_anchor else 1
        with_logits = slice(skipped, skipped + shape.num_levels - (0 if self._has_root else 1))
        self._columns = range(first, shape.num_columns)[with_logits]
        width = len(columns)
        with torch.inference_mode(mode=False):
            self._first_rows = torch.arange(num_rows, dtype=torch.int32, device=device) * first
            self._logit_rows = torch.arange(num_rows * width, device=device).view(-1, width)[:, with_logits].flatten()
            self._numbers = torch.arange(shape.num_columns, dtype=torch.int32, device=device)
            sees = torch.ones(width, width, dtype=torch.bool, device=device)
            self._sees = torch.nn.functional.pad(sees.tril() if block.is_causal else sees, (first, 0))
            self._masks = torch.full((num_rows, width - self._has_root), block.mask_token, device=device)

    def begin(self, first: FirstPass, roots: Tensor, compute: Compute) -> ScoreLevel:
        wanted = self._first_rows if self._has_root else self._first_rows + first.root_columns
        logits = compute(0, first.tokens, None, wanted, first.features)
        by_level = [] if self._has_root else [logits]
        if self._columns:
            tokens = torch.cat([roots.unsqueeze(1), self._masks], dim=1) if self._has_root else self._masks
            sees = pack_bits((self._numbers <= first.root_columns.view(-1, 1, 1)) | self._sees, self._words)
            features = None if self._mask is None else self._mask.repeat(tokens.numel(), 1)
            logits = compute(1, tokens, sees.flatten(0, 1), self._logit_rows, features)
            by_level += logits.unflatten(0, (len(roots), -1)).unbind(1)
        head, rows = self._runner.head, self._runner.tensors.taps[0]

        def score(frontier: Frontier, candidates: Candidates) -> tuple[Tensor, Tensor | None]:
            width, logits = frontier.tokens.shape[1], by_level[frontier.level]
            if not head.is_pairwise:
                return _repeated(logits, width), None
            hidden = rows[self._inputs.slots[:, self._columns[frontier.level]]]
            before = frontier.tokens.flatten()
            return head.conditional(_repeated(logits, width), _repeated(hidden, width), before)

        return score


def _repeated(values: Tensor, count: int) -> Tensor:
    """Return each row of [requests, size] `count` times, [requests * count, size], each in memory of its own."""
    return values if count == 1 else values.repeat_interleave(count, dim=0)
