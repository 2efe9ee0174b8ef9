"""The known tokens that a drafter computes in the first pass of a draft loop, and what it keeps of a step.

A small model has computed all of an accepted path except perhaps the last node. So it reads one or two tokens, and
keeps what it computes of the next path. A copy of the target or an assistant attends to what the target has stored:
it computes the root alone, and keeps nothing. A head computes known tokens from the target's hidden states, but drafts
from its own output. So it reads the whole path anew, and keeps that alone. An example of a head, at token 12 after a
path of two:

    the target has computed tokens 0 ... 11, the head the pairs (feature of t, token t + 1) of t = 0 ... 8
    columns 0, 1, 2 are the pairs of t = 9, 10, 11; the last one is the root's, and predicts token 13

A block head that reads features alone computes the same places t, and none if it has read all: there the root is the
first token of the block.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specinfer.drafters.feature_drafter import HeadRunner
from specinfer.drafters.sparse_context import kept_slots
from specinfer.engine.device.draft_shape import DraftShape
from specinfer.engine.device.state import DeviceState, DraftState
from specinfer.model.heads.assistant import AssistantHead
from specinfer.model.runner import ModelRunner
from specinfer.ops import tree_ops
from specinfer.ops.trees import Candidates, DeviceTrees, Frontier, Walk

Kept = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The inputs of one drafter that come from the host."""

    slots: Tensor  # [rows, columns] int32 of the tokens that it computes
    reads: Tensor  # [rows] int32, 1 if it has read the request
    max_nodes: Tensor  # [rows] int32, 0 if it is not asked
    lora_indices: Tensor | None = None  # [rows] int32 slots of adapters, or None in steps without


class FirstPass(NamedTuple):
    """The tokens that a drafter computes in its first pass."""

    tokens: Tensor  # [rows, num_known] int64
    root_columns: Tensor  # [rows] the last column that is needed, mostly the root's; a bool if there are at most two
    root_positions: Tensor  # [rows] int32, as the drafter counts
    is_whole: Tensor | None = None  # [rows] False where further known tokens come before the root; None for nowhere
    features: Tensor | None = None  # [rows * num_known, width] of a head
    # Slots of the tokens before that drafts attend to, [rows, kept] int32, and their number, [rows] int32; None for all
    prefix: tuple[Tensor, Tensor] | None = None


class KnownTokens(Protocol):
    """The known tokens of one kind of drafters."""

    def read(self) -> FirstPass:
        """Return what the first pass computes."""
        ...

    def features(self, frontier: Frontier, candidates: Candidates, first: FirstPass) -> Tensor | None:
        """Return the [tokens, width] features that a level reads with its tokens, or None if it reads tokens alone."""
        ...

    def keep(self, walked: Walk, trees: DeviceTrees, merged: DeviceTrees) -> None:
        """Keep what the drafter computed of the accepted paths.

        Args:
            trees: The trees of this drafter.
            merged: Those of all, which the paths are in.
        """
        ...


class KnownPair:
    """The known tokens of a small model: the root, and the token before it if it has not computed that.

    Args:
        drafted: What the drafter has computed of each request.
        kept: [rows, depth + 1] int32 columns that it keeps, after the first one, and [rows] int32 their number; written
            to.
    """

    def __init__(self, state: DeviceState, drafted: DraftState, inputs: DraftInputs, kept: Kept) -> None:
        self._state, self._drafted, self._inputs, self._kept = state, drafted, inputs, kept
        rows, depth = kept[0].shape
        with torch.inference_mode(mode=False):
            self._numbers = torch.arange(rows, dtype=torch.int32, device=kept[0].device)
            self._depths = torch.arange(depth - 1, dtype=torch.int32, device=kept[0].device)

    def read(self) -> FirstPass:
        rows = len(self._numbers)
        roots, has_two = self._state.roots[:rows], self._drafted.has_two[:rows]
        tokens = torch.stack(
            [torch.where(has_two, self._drafted.before[:rows], roots), torch.where(has_two, roots, 0)], dim=1
        )
        return FirstPass(tokens, has_two, self._state.known[:rows])

    def features(self, frontier: Frontier, candidates: Candidates, first: FirstPass) -> None:
        return None

    def keep(self, walked: Walk, trees: DeviceTrees, merged: DeviceTrees) -> None:
        path, lengths, _ = walked
        drafted, rows = self._drafted, len(path)
        tokens, columns = trees.tokens, trees.columns
        if merged is not trees:
            tokens = merged.tokens.gather(1, path.clamp(min=0).long())
            columns = self._follow(path, tokens, trees)
            path = torch.where(path >= 0, self._depths, -1)
        tree_ops.keep_drafted(
            path,
            lengths,
            tokens,
            columns,
            self._inputs.reads,
            drafted.before[:rows],
            drafted.has_two[:rows],
            self._kept,
        )
        tree_ops.commit(drafted.slots[:rows], drafted.known[:rows], self._inputs.slots, *self._kept)

    def _follow(self, path: Tensor, tokens: Tensor, trees: DeviceTrees) -> Tensor:
        """Return the columns of the paths' tokens in the trees of this drafter, -1 where it has none: [rows, depth].

        Args:
            tokens: [rows, depth] int32 of the paths.
        """
        depth = path.shape[1]
        accepted = torch.nn.functional.pad(tokens.long().masked_fill(path < 0, -1), (0, 1), value=-1)
        _, depths = tree_ops.mark_ancestors(
            trees.parents, torch.zeros_like(trees.sizes), max_depth=depth, last=depth
        )  # fmt: skip
        starts = self._numbers * trees.tokens.shape[1]
        following = accepted.gather(1, depths.long()).flatten()
        nodes, _, _ = tree_ops.walk(following, starts, trees.tokens, trees.parents, trees.sizes, max_depth=depth)
        return torch.where(nodes >= 0, trees.columns.gather(1, nodes.clamp(min=0).long()), -1)


class KnownRoot:
    """The known token of a copy of the target: the root.

    Args:
        kept: As that of `KnownPair`.
        is_sparse: Whether it attends to a part of a long context only.
    """

    def __init__(self, state: DeviceState, kept: Kept, *, is_sparse: bool = False) -> None:
        self._state, self._is_sparse, rows = state, is_sparse, len(kept[1])
        with torch.inference_mode(mode=False):
            self._columns = torch.zeros(rows, dtype=torch.bool, device=kept[1].device)
            kept[1].fill_(-1)  # the host keeps no column

    def read(self) -> FirstPass:
        rows = len(self._columns)
        state = self._state
        prefix = kept_slots(state.slots[:rows], state.known[:rows]) if self._is_sparse else None
        return FirstPass(state.roots[:rows].unsqueeze(1), self._columns, state.known[:rows], prefix=prefix)

    def features(self, frontier: Frontier, candidates: Candidates, first: FirstPass) -> Tensor | None:
        return None

    def keep(self, walked: Walk, trees: DeviceTrees, merged: DeviceTrees) -> None:
        """Do nothing."""


class KnownFeature(KnownRoot):
    """The known token of an assistant: the root, with the feature of the token before it.

    Args:
        outputs: [tokens + 1, width] what the last pass has computed, request by request.
        state, kept: As those of `KnownRoot`.
    """

    def __init__(self, runner: HeadRunner, shape: DraftShape, state: DeviceState, kept: Kept, outputs: Tensor) -> None:
        super().__init__(state, kept)
        assert isinstance(runner.target, ModelRunner)
        assert isinstance(runner.head, AssistantHead)
        self._head, self._taps, self._outputs = runner.head, runner.target.tensors.taps, outputs
        self._shape = shape
        with torch.inference_mode(mode=False):
            self._rows = torch.arange(len(self._columns), device=outputs.device).unsqueeze(1)
            self._zero = torch.zeros(1, dtype=torch.int64, device=outputs.device)

    def read(self) -> FirstPass:
        first, rows = super().read(), len(self._columns)
        last = (first.root_positions - 1).clamp(min=0)
        slots = self._state.slots[:rows].gather(1, last.unsqueeze(1).long()).flatten()
        features = self._head.project([self._taps[layer][slots] for layer in self._head.reads])
        return first._replace(root_positions=first.root_positions + self._head.offset, features=features)

    def features(self, frontier: Frontier, candidates: Candidates, first: FirstPass) -> Tensor | None:
        if frontier.level == 0:
            return first.features
        above = frontier.level - 1
        places = self._rows * self._shape.frontiers[above]
        if above:  # the root's output is the first of its row; others are found by the columns of the parents
            columns = _parent_columns(frontier, candidates, self._zero)
            places = places + (columns - self._shape.first_columns[above]).clamp(min=0)
        return self._outputs[places.expand_as(frontier.numbers).flatten()]


class KnownPath:
    """The known tokens of a head: the last accepted path and the root, each with the feature of the token before it.

    Rows that lack more of them than there are columns read the first of these, and draft nothing in this step.

    Args:
        runner: The runner of the head.
        inputs, kept, drafted: As those of `KnownPair`.
    """

    def __init__(
        self,
        runner: HeadRunner,
        shape: DraftShape,
        state: DeviceState,
        drafted: DraftState,
        inputs: DraftInputs,
        kept: Kept,
    ) -> None:
        self._runner, self._target = runner, runner.target
        self._state, self._drafted, self._inputs, self._kept = state, drafted, inputs, kept
        self._num_known, device = shape.num_known, kept[0].device
        with torch.inference_mode(mode=False):
            self._columns = torch.arange(shape.num_known, dtype=torch.int32, device=device)
            self._zero = torch.zeros(1, dtype=torch.int64, device=device)
            last = torch.arange(1, kept[0].shape[1] + 1, dtype=torch.int32, device=device).clamp(max=shape.max_depth)
            kept[0].copy_(last)

    def read(self) -> FirstPass:
        state, drafted, rows, head = self._state, self._drafted, len(self._inputs.reads), self._runner.head
        known, computed = state.known[:rows], drafted.known[:rows]
        last_places, num_unread = (known - 1).clamp(min=0), known - computed
        root_columns = (num_unread - 1).clamp(min=0 if head.reads_pairs else -1, max=self._num_known - 1)
        self._kept[1].copy_(root_columns)
        # Columns after the last one compute its place again, so that no column has invalid numbers.
        places = torch.minimum(computed.unsqueeze(1) + self._columns, last_places.unsqueeze(1)).long()
        is_root = places >= last_places.unsqueeze(1)
        tokens = torch.where(is_root, state.roots[:rows].unsqueeze(1), drafted.following[:rows].gather(1, places))
        slots = state.slots[:rows].gather(1, places).flatten()
        features = head.project([self._target.taps[layer][slots] for layer in head.reads])
        root_positions = last_places if head.reads_pairs else known
        return FirstPass(tokens, root_columns, root_positions, num_unread <= self._num_known, features)

    def features(self, frontier: Frontier, candidates: Candidates, first: FirstPass) -> Tensor | None:
        if frontier.level == 0:
            return first.features
        if frontier.level == 1:  # children of the root
            columns = first.root_columns.long().unsqueeze(1).expand_as(frontier.numbers)
        else:
            columns = _parent_columns(frontier, candidates, self._zero)
        slots = self._inputs.slots.gather(1, columns).flatten()
        return self._runner.tensors.taps[0][slots]

    def keep(self, walked: Walk, trees: DeviceTrees, merged: DeviceTrees) -> None:
        path, lengths, _ = walked
        drafted, rows, num_kept = self._drafted, len(path), self._kept[1]
        num_kept.copy_(torch.where((lengths >= 0) & (self._inputs.reads > 0), num_kept, -1))
        tree_ops.commit(drafted.slots[:rows], drafted.known[:rows], self._inputs.slots, *self._kept)
        before = self._state.known[:rows] - lengths - 2  # places of the tokens before the roots
        tree_ops.commit(drafted.following[:rows], before, merged.tokens, path, lengths)


def _parent_columns(frontier: Frontier, candidates: Candidates, zero: Tensor) -> Tensor:
    """Return [rows, width] int64 columns of the parents of nodes below the first level.

    Args:
        zero: [1] int64; with it a maximum makes indices of int32 numbers, 0 for those of padding, in one launch.
    """
    parents = candidates.parents.gather(1, torch.maximum(frontier.numbers, zero))
    return torch.maximum(candidates.columns.gather(1, torch.maximum(parents, zero)), zero)
