"""DraftLoop: one drafter's part of a step on a device, with the trees of the drafters before it merged into its own.

The loops of several drafters run one after the other. The tree of each is a proposal to the next, merged there by the
tokens of its paths as the guesses of lookups are, so the last one's tree is that of all. What an earlier drafter has
computed of an accepted path is found by following the path in its own tree.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specinfer.core.request import DRAWS_EACH
from specinfer.engine.device.columns import DraftColumns
from specinfer.engine.device.growth import DraftShape, grow
from specinfer.engine.device.state import DeviceState, DraftState
from specinfer.kernels import tree_ops
from specinfer.kernels.drawn import Drawing
from specinfer.kernels.plain_draft import Candidates, Frontier, Grown, Limits, Sampling
from specinfer.kernels.plain_drawn import Draws
from specinfer.kernels.plain_guesses import Guesses
from specinfer.kernels.plain_logits import Paths
from specinfer.kernels.plain_tree import Walk
from specinfer.model.batch import ForwardBatch
from specinfer.model.forward import forward
from specinfer.model.runner import ModelRunner

# Adjusts logits in place, and returns the least score of a token that may follow.
Process = Callable[[Tensor, Paths], Tensor | None]


class DeviceDrafter(NamedTuple):
    """A drafter of steps on a device."""

    runner: ModelRunner
    to_target: Callable[[Tensor], Tensor]  # maps its logits [rows, drafter_vocab] to the target's vocabulary


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The inputs of one drafter that come from the host."""

    slots: Tensor  # [rows, columns] int32 of the tokens that it computes
    reads: Tensor  # [rows] int32, 1 if it has read the request
    max_nodes: Tensor  # [rows] int32, 0 if it is not asked


class Drafted(NamedTuple):
    """The trees of the drafters so far, as proposals to the next one."""

    guesses: Guesses
    max_nodes: Tensor  # [rows]


class DraftLoop:
    """The draft loop of one drafter, over static buffers.

    Args:
        shape: Its trees, with those that are merged into them.
        own: What it has computed of each request.
        inputs: What the host sends.
        trees: Its trees, written to.
        kept: [rows, depth + 1] int32 columns that it keeps, after the first one, and [rows] int32 their number; written
            to.
        target_vocab: Number of tokens of the target.
        draws: The draws of its trees, written to, or None if all tokens are chosen.
    """

    def __init__(
        self,
        drafter: DeviceDrafter,
        shape: DraftShape,
        state: DeviceState,
        own: DraftState,
        inputs: DraftInputs,
        trees: Grown,
        kept: tuple[Tensor, Tensor],
        target_vocab: int,
        draws: Draws | None = None,
    ) -> None:
        self._drafter, self._shape, self._state, self._own = drafter, shape, state, own
        self._inputs, self.trees, self._kept, self._draws = inputs, trees, kept, draws
        rows, device = len(inputs.reads), drafter.runner.loaded.device
        self._clamps = drafter.runner.loaded.vocab_size < target_vocab
        self._columns = DraftColumns(shape, rows, device)
        with torch.inference_mode(mode=False):
            self._numbers = torch.arange(rows + 1, dtype=torch.int32, device=device)
            self._logit_rows = torch.arange(rows * max(shape.frontiers), device=device)
            self._depths = torch.arange(shape.max_depth, dtype=torch.int32, device=device)
            self._nodes = torch.arange(1 + shape.num_nodes, device=device)

    def grow(
        self,
        num: Tensor,
        limits: Limits,
        process: Process,
        lookups: Guesses | None,
        before: Drafted | None,
        *,
        is_last: bool,
    ) -> Drafted | None:
        """Grow the trees. The drafter reads the root, and the token before it if it has not yet.

        Args:
            num: [1] int32 number of requests.
            limits: Limits of the trees of all drafters, but for their nodes.
            process: The processing of logits.
            lookups: What lookups propose, for the first drafter.
            before: The trees of the drafters before, for the others.
            is_last: Whether no drafter comes after it; otherwise its trees are returned for the next one.
        """
        state, own, runner, rows = self._state, self._own, self._drafter.runner, len(self._inputs.reads)
        known, roots, has_two = state.known[:rows], state.roots[:rows], own.has_two[:rows]
        reads = (self._numbers[:-1] < num) & (state.num_left[:rows] > 0) & (self._inputs.reads > 0)
        last = runner.loaded.max_position - 1
        layouts = self._columns.lay_out(self._inputs.slots, reads, own.known[:rows], known, num, last)
        pair = torch.stack([torch.where(has_two, own.before[:rows], roots), torch.where(has_two, roots, 0)], dim=1)
        wanted = self._numbers[:-1] * 2 + has_two

        def score(frontier: Frontier, candidates: Candidates) -> tuple[Tensor, Tensor | None]:
            is_first = frontier.level == 0
            tokens = pair if is_first else frontier.tokens
            if self._clamps:
                tokens = tokens.clamp(max=runner.loaded.vocab_size - 1)
            layout, positions, slots = layouts[frontier.level]
            batch = ForwardBatch(
                token_ids=tokens.flatten(),
                positions=positions,
                slots=slots,
                logit_rows=wanted if is_first else self._logit_rows[: tokens.numel()],
                pieces=(),
                store=runner.tensors,
                allows_native=False,
                layout=layout.over(own.slots[:rows], None if is_first else frontier.sees.flatten(0, 1)),
            )
            logits = self._drafter.to_target(forward(runner.loaded.model, batch))
            paths = Paths(frontier.numbers, candidates.tokens, candidates.parents, 0, frontier.level)
            return logits, process(logits, paths)

        mine = replace(
            limits,
            max_nodes=torch.where(reads, self._inputs.max_nodes, 0),
            max_depth=torch.minimum(limits.max_depth, last - known),
        )
        most = mine.max_nodes if before is None else torch.maximum(mine.max_nodes, before.max_nodes)
        drawing = None
        if self._draws is not None:
            streams, first = own.streams[:rows], own.first_draw[:rows]
            drawing = Drawing(state.is_drawn[:rows], streams, first, state.truncation.first(rows), self._draws)
        candidates = grow(
            self._shape, roots, has_two, score, Sampling(state.seeds[:rows], state.temperatures[:rows], known),
            own.chances, mine, self.trees, lookups if before is None else before.guesses, most, drawing,
        )  # fmt: skip
        if drawing is not None:
            own.first_draw[:rows].add_((mine.max_nodes > 0) * DRAWS_EACH)
        if is_last:
            return None
        by_path_prob = replace(self.trees, confidence=torch.empty_like(self.trees.confidence))
        valued = replace(candidates, confidence=candidates.path_prob)
        tree_ops.best_tree(candidates.path_prob, valued, roots, has_two, replace(mine, max_nodes=most), by_path_prob)
        in_use = self._nodes < self.trees.sizes.unsqueeze(1)
        path_prob = torch.where(in_use, by_path_prob.confidence, -1.0)[:, 1:].contiguous()
        return Drafted(Guesses(self.trees.tokens[:, 1:].contiguous(), self.trees.parents[:, 1:] - 1, path_prob), most)

    def keep(self, walked: Walk, drafted: Tensor | None) -> None:
        """Keep what the drafter computed of the accepted paths.

        Args:
            drafted: [rows, depth] int64 tokens of the paths, or None if they are paths in the trees of this drafter.
        """
        path, lengths, _ = walked
        own, rows = self._own, len(path)
        tokens, columns = self.trees.tokens, self.trees.columns
        if drafted is not None:
            columns = self._follow(path, drafted)
            tokens, path = drafted.int(), torch.where(path >= 0, self._depths, -1)
        tree_ops.keep_drafted(
            path, lengths, tokens, columns, self._inputs.reads, own.before[:rows], own.has_two[:rows], self._kept
        )
        tree_ops.commit(own.slots[:rows], own.known[:rows], self._inputs.slots, *self._kept)

    def _follow(self, path: Tensor, drafted: Tensor) -> Tensor:
        """Return the columns of the paths' tokens in the trees of this drafter, -1 where it has none: [rows, depth]."""
        trees, depth = self.trees, path.shape[1]
        accepted = torch.nn.functional.pad(drafted.masked_fill(path < 0, -1), (0, 1), value=-1)
        _, depths = tree_ops.mark_ancestors(
            trees.parents, torch.zeros_like(trees.sizes), max_depth=depth, last=depth
        )  # fmt: skip
        starts = self._numbers[:-1] * trees.tokens.shape[1]
        following = accepted.gather(1, depths.long()).flatten()
        found, _, _ = tree_ops.walk(following, starts, trees.tokens, trees.parents, trees.sizes, max_depth=depth)
        return torch.where(found >= 0, trees.columns.gather(1, found.clamp(min=0).long()), -1)
