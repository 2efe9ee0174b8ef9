"""The passes of a drafter that give the levels of its trees their logits: one for each level, or one over a block.

Their tokens are in columns, whose positions and slots are laid out for all passes at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specinfer.drafters.feature_drafter import HeadRunner
from specinfer.engine.device.draft_shape import DraftShape
from specinfer.engine.device.known_tokens import DraftInputs, FirstPass, KnownTokens
from specinfer.ops.tree_layout import TreeLayout, num_words, pack_bits
from specinfer.ops.trees import Candidates, Frontier


@dataclass(frozen=True, slots=True)
class PassLayout:
    """The layout of a pass but for its attention mask; fields are those of `TreeLayout`."""

    prefix_lens: Tensor
    starts: Tensor
    node_slots: Tensor
    node_positions: Tensor
    node_lens: Tensor
    positions: Tensor
    width: int

    def over(self, slot_table: Tensor, visible: Tensor | None) -> TreeLayout:
        """Return the layout with a mask [tokens, words], or None for a chain."""
        return TreeLayout(
            slot_table, self.prefix_lens, self.starts, self.node_slots, self.node_positions, self.node_lens,
            self.positions.unsqueeze(1) if visible is None else visible,  # of a chain, never read
            self.positions, self.width, is_chain=visible is None,
        )  # fmt: skip


class PassInputs(NamedTuple):
    """The inputs of a pass, but for its tokens and mask."""

    layout: PassLayout
    positions: Tensor  # [requests * width] int64
    slots: Tensor  # [requests * width] int64


class DraftColumns:
    """The columns of a draft shape: known tokens, as many of them as a request has, then those of each later pass.

    Args:
        shape: The draft loop of one model.
        num_rows: Number of requests.
    """

    def __init__(self, shape: DraftShape, num_rows: int, device: torch.device) -> None:
        self._widths = (shape.num_known, *map(len, shape.passes))
        self._ends = tuple(accumulate(self._widths))
        stores_drafts = shape.kinds[0].stores_drafts
        seen = self._ends if stores_drafts else [0] * len(self._ends)
        columns = torch.arange(num_rows * self._ends[-1], dtype=torch.int32).view(num_rows, -1)
        in_order = [
            columns[:, end - width : end].flatten() for end, width in zip(self._ends, self._widths, strict=True)
        ]
        depths = [*range(shape.num_known), *chain.from_iterable(shape.passes)]
        with torch.inference_mode(mode=False):
            self._order = torch.cat(in_order).long().to(device)  # of columns, pass by pass instead of row by row
            self._depths = torch.tensor(depths, dtype=torch.int32, device=device)
            # Copies and assistants compute roots alone; how many tokens a copy attends to is not the root's position.
            num_counted = 0 if shape.kinds[0].shares_cache else shape.num_known
            self._is_known = torch.arange(len(depths), device=device) < num_counted
            self._numbers = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
            # Of drafts that are not stored only the output is kept, until the next pass.
            self._in_pass = None if stores_drafts else torch.arange(num_rows * max(self._widths), device=device)
            self._each = torch.tensor([self._widths, seen], dtype=torch.int32, device=device).unsqueeze(2)

    def lay_out(
        self, slots: Tensor, drafts: Tensor, draft_known: Tensor, roots: Tensor, num: Tensor, last: int
    ) -> list[PassInputs]:
        """Return the inputs of each pass.

        Args:
            slots: [requests, columns] int32 reserved for a request.
            drafts: [requests] bool, True if there are drafts for the request.
            draft_known: [requests] int32 tokens that the drafter has computed.
            roots: [requests] int32 positions of the roots.
            num: [1] int32 number of requests.
            last: Highest position.
        """
        slots = torch.where(drafts.unsqueeze(1), slots, -1)
        node_slots, flat_slots = slots.clamp(min=0), slots.flatten()[self._order].long()
        places = torch.where(self._is_known, draft_known.unsqueeze(1), roots.unsqueeze(1)) + self._depths
        places = places.clamp(max=last)
        flat_places = places.flatten()[self._order]
        wide_places = flat_places.long()
        starts = torch.minimum(self._numbers, num) * self._each[0]
        lens = drafts * self._each[1]
        passes, first = list[PassInputs](), 0
        for number, (width, end) in enumerate(zip(self._widths, self._ends, strict=True)):
            part = slice(first, first + len(drafts) * width)
            first = part.stop
            known = draft_known, starts[number], node_slots[:, :end], places[:, :end], lens[number]
            layout = PassLayout(*known, flat_places[part], width)
            own_slots = flat_slots[part] if self._in_pass is None else self._in_pass[: part.stop - part.start]
            passes.append(PassInputs(layout, wide_places[part], own_slots))
        return passes


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
